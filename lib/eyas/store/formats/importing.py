"""Import other projects' hidden states into a store.

python -m eyas data import --from FORMAT FOLDER
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import sha256_json
from eyas.models.boundaries import Boundaries, drafter_boundaries
from eyas.models.target import Target
from eyas.progress import Progress, bytes_text
from eyas.prompts.chat_template import template_hash, tokenizer_hash
from eyas.store.formats.common import Sample, need_room
from eyas.store.formats.known import FORMATS
from eyas.store.formats.norm_check import NormCheck, check_norm, decide_norm
from eyas.store.reader import Planned, Rows, Store, token_bytes
from eyas.store.summary import write_data_config
from eyas.store.writer import StoreWriter

CHECK_SAMPLES = 4  # samples of which the norm convention is checked
LISTED = 20  # failed samples that the summary names


def _unfit(sample: Sample, vocab_size: int) -> str:
    """Return why a sample of the right shapes cannot be used; empty if it can."""
    ids = sample.input_ids
    mask = sample.loss_mask
    if not len(ids):
        return "no token"
    largest = int(ids.max())
    if int(ids.min()) < 0 or largest >= vocab_size:
        outside = largest if largest >= vocab_size else int(ids.min())
        return f"token id {outside} is outside the target's vocabulary of {vocab_size}"
    if not bool(((mask == 0) | (mask == 1)).all()):
        return "the loss mask holds other values than 0 and 1"
    if not bool(mask.any()):
        return "its loss mask is zero everywhere"
    for n, states in enumerate(sample.states, 1):
        if not bool(torch.isfinite(states).all()):
            return f"state {n} of {len(sample.states)} holds NaN or Inf"
    return ""


@dataclass(frozen=True)
class Imported:
    """Hold the result of an import: asked = imported + skipped (already there) + failed.

    failed: {id of a sample: why}.
    """

    store: Store
    imported: int
    failed: dict[str, str]
    check: NormCheck

    def __str__(self) -> str:
        index = self.store.index
        n_failed = len(self.failed)
        skipped = len(index) - self.imported - n_failed
        lines = [
            f"asked {len(index)} = imported {self.imported} + skipped {skipped} (already there)"
            f" + failed {n_failed}"
        ]
        lines += [f"  {id}: {reason}" for id, reason in list(self.failed.items())[:LISTED]]
        if n_failed > LISTED:
            lines.append(f"  ... and {n_failed - LISTED} more")
        lines.append(
            f"store: {len(self.store.samples())} samples"
            f" ({len(self.store.samples('heldout'))} held out),"
            f" {int(index['length'].sum()):,} tokens, {bytes_text(self.store.n_bytes)};"
            f" last states {self.store.manifest['last_state']}: {self.check}"
        )
        return "\n".join(lines)


def import_store(
    config: Config,
    target: Target,
    name: str,
    source: Path,
    norm: str | None = None,
    heldout_every: int = 20,
) -> Imported:
    """Make a store of the run from the files of another project. After a kill it resumes.

    The profile's boundaries, ascending, name the states of the files; the last state is boundary N.
    Of the samples in the order of their numbers, the first of every `heldout_every` is held out (0:
    none). `norm` ("pre" or "post") says what the last states are, if they are not what the format
    defines.

    Raise EyasError, before anything is written, if files are torn, of other shapes or not of this
    target. A sample with unusable values (NaN, ids outside the vocabulary, a mask that selects
    nothing) is marked as failed.
    """
    started_s = time.monotonic()
    source = Path(source).expanduser()
    boundaries = _checked_boundaries(config, target, name, source, heldout_every)
    reader = FORMATS[name](source, len(boundaries.with_last), target.hidden_size)
    if not reader.numbers:
        raise EyasError(
            f"{source.name!r} holds no file of {name}",
            "a folder of this format",
            "python -m eyas data import --help",
        )
    lengths, dtype = _lengths(reader)
    head = target.head()
    usable = [
        sample for sample in _samples_to_check(reader) if not _unfit(sample, target.vocab_size)
    ]
    check = check_norm(head, usable)
    last_state = decide_norm(name, reader.norm, norm, check)
    if config.store_fp8:
        dtype = "float8_e4m3fn"
    manifest = _manifest(config, target, name, reader, lengths, dtype, last_state, heldout_every)
    _check_disk(config, manifest, sum(lengths.values()))
    numbers = sorted({*lengths, *reader.missing})
    planned = {}
    for place, number in enumerate(numbers):
        is_heldout = heldout_every and place % heldout_every == 0
        planned[number] = Planned(
            f"{name}-{number:06d}",
            "heldout" if is_heldout else "train",
            "imported",
            lengths.get(number, 0),
        )
    n_samples = 0
    n_tok = 0
    writer = StoreWriter(config.store_dir, manifest, head, config.shard_mib * 2**20)
    try:
        todo = set(writer.plan(list(planned.values())))
        with Progress(len(todo)) as progress:
            for number in numbers:
                id = planned[number].id
                if id not in todo:
                    continue
                sample = reader.read(number) if number in lengths else None
                reason = _unfit(sample, target.vocab_size) if sample else "no file of states"
                if reason:
                    writer.fail(id, reason)
                    progress.update(errors=1)
                    continue
                writer.add(_rows(planned[number], sample, manifest["boundaries"]))
                n_samples += 1
                n_tok += len(sample.input_ids)
                progress.update(samples=1, tok=len(sample.input_ids), bytes=sample.n_bytes)
        writer.flush()
    finally:
        writer.release()
    store = Store.open(config.store_dir)
    seconds = time.monotonic() - started_s
    rates = {"samples_per_s": n_samples / seconds, "tok_per_s": n_tok / seconds}
    write_data_config(store, {"seconds": seconds} | rates)
    bad = store.index[store.index["state"] != "extracted"]
    return Imported(store, n_samples, dict(zip(bad["id"], bad["reason"])), check)


def _checked_boundaries(
    config: Config, target: Target, name: str, source: Path, heldout_every: int
) -> Boundaries:
    """Return the run's boundaries. Raise EyasError if these or another argument do not fit."""
    if not source.is_dir():
        raise EyasError(
            f"no folder {str(source)!r}",
            "a folder of hidden states",
            "python -m eyas data import --help",
        )
    if heldout_every < 0:
        raise EyasError(
            f"--heldout-every {heldout_every}",
            "1 or more, or 0 for none",
            "python -m eyas data import --help",
        )
    boundaries = drafter_boundaries(config, target.n_blocks)
    if boundaries.feeding[-1] >= boundaries.last:
        raise EyasError(
            f"boundaries {list(boundaries.feeding)}",
            f"boundaries below {target.n_blocks}, which is the last state",
            "-p boundaries '[...]'",
        )
    in_files = FORMATS[name].said_boundaries(source)
    if in_files is not None and in_files != boundaries.with_last:
        command = "-p target FOLDER"
        if in_files[-1] == target.n_blocks:
            command = f"-p boundaries '{list(in_files[:-1])}'"
        raise EyasError(
            f"the files hold boundaries {list(in_files)}", f"{list(boundaries.with_last)}", command
        )
    return boundaries


def _samples_to_check(reader) -> list[Sample]:
    """Read at most CHECK_SAMPLES samples, evenly spread over the files."""
    last = len(reader.numbers) - 1
    places = {i * last // (CHECK_SAMPLES - 1) for i in range(CHECK_SAMPLES)}
    return [reader.read(reader.numbers[place]) for place in sorted(places)]


def _check_disk(config: Config, manifest: dict, n_tok: int) -> None:
    """Raise EyasError if the disk is too small for what is not imported yet."""
    tok_bytes = token_bytes(len(manifest["boundaries"]), manifest["hidden_size"], manifest["dtype"])
    shards = (config.store_dir / "shards").glob("*.safetensors")  # of an import that was killed
    written = sum(path.stat().st_size for path in shards)
    missing = max(n_tok * tok_bytes - written, 0)
    need_room(config.store_dir, missing, "set EYAS_DATA to a larger disk")


def _rows(planned: Planned, sample: Sample, boundaries: list[int]) -> Rows:
    """Return a foreign sample as the store takes it."""
    return Rows(
        planned.id,
        planned.split,
        "imported",
        sample.input_ids.long(),
        sample.loss_mask.bool(),
        {b: rows.contiguous() for b, rows in zip(boundaries, sample.states)},
    )


def _lengths(reader) -> tuple[dict[int, int], str]:
    """Return {number: tokens} and the dtype of the states; check the shapes of every file.

    Raise EyasError if the files have different dtypes.
    """
    lengths = {}
    dtypes = {}  # dtype -> the first file that has it
    for number in reader.numbers:
        sample = reader.open(number)
        lengths[number] = len(sample.input_ids)
        dtypes.setdefault(sample.states[0].dtype, reader.paths[number].name)
    if len(dtypes) > 1:
        examples = ", ".join(f"{name} {dtype}" for dtype, name in dtypes.items())
        raise EyasError(
            f"the files hold states of different dtypes: {examples}",
            "one dtype",
            "import them apart",
        )
    dtype = torch.bfloat16 if torch.float8_e4m3fn in dtypes else next(iter(dtypes))
    return lengths, str(dtype).removeprefix("torch.")


def _manifest(
    config: Config,
    target: Target,
    name: str,
    reader,
    lengths: dict[int, int],
    dtype: str,
    last_state: str,
    heldout_every: int,
) -> dict:
    """Return the fields of an extraction's manifest; what an import does not know is None."""
    tokenizer = target.tokenizer()
    files = sorted((path.name, path.stat().st_size) for path in reader.paths.values())
    return {
        "target": {
            "name": target.name,
            "config_hash": target.config_hash,
            "fingerprint": target.fingerprint,
            "n_blocks": target.n_blocks,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "rms_norm_eps": target.rms_norm_eps,
        },
        "engine": {
            "name": name,
            "version": None,
            "device": None,
            "capture_plugin": None,
            "files": sha256_json(files),
        },
        "boundaries": list(drafter_boundaries(config, target.n_blocks).with_last),
        "dtype": dtype,
        "hidden_size": target.hidden_size,
        "last_state": last_state,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": template_hash(tokenizer),
        "prompts": {
            "hash": None,
            "order": "by number",
            "seed": None,
            "max_length": max(lengths.values()),
            "heldout_every": heldout_every,
        },
        "server_flags": {},
    }
