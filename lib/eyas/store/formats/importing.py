"""Import other projects' hidden states into a store. `python -m eyas data import --from FORMAT FOLDER`"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import sha256_json
from eyas.models.boundaries import drafter_boundaries
from eyas.models.target import Target
from eyas.progress import Progress, bytes_text
from eyas.prompts.chat_template import template_hash, tokenizer_hash
from eyas.store.formats.common import Sample, need_room
from eyas.store.formats.known import FORMATS
from eyas.store.formats.norm_check import NormCheck, check_norm, decide_norm
from eyas.store.reader import Planned, Rows, Store, token_bytes
from eyas.store.summary import write_data_config
from eyas.store.writer import StoreWriter

CHECK_SAMPLES = 4  # samples that the check of the norm convention looks at


def _unfit(sample: Sample, vocab_size: int) -> str:
    """Why a sample of the right shapes is of no use, or nothing."""
    ids, mask = sample.input_ids, sample.loss_mask
    if not len(ids):
        return "no token"
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        return f"token id {int(ids.max()) if int(ids.max()) >= vocab_size else int(ids.min())} is outside the target's vocabulary of {vocab_size}"
    if not bool(((mask == 0) | (mask == 1)).all()):
        return "the loss mask holds other values than 0 and 1"
    if not bool(mask.any()):
        return "its loss mask is zero everywhere"
    return next(
        (
            f"state {n} of {len(sample.states)} holds NaN or Inf"
            for n, t in enumerate(sample.states, 1)
            if not bool(torch.isfinite(t).all())
        ),
        "",
    )


@dataclass(frozen=True)
class Imported:
    """asked = imported + skipped (there already) + failed, which has the reason of each id."""

    store: Store
    imported: int
    failed: dict[str, str]
    check: NormCheck

    def __str__(self) -> str:
        index = self.store.index
        why = "".join(f"\n  {id}: {reason}" for id, reason in list(self.failed.items())[:20])
        more = f"\n  ... and {len(self.failed) - 20} more" if len(self.failed) > 20 else ""
        heldout = len(self.store.samples("heldout"))
        return (
            f"asked {len(index)} = imported {self.imported} + skipped {len(index) - self.imported - len(self.failed)} (already there) + failed {len(self.failed)}{why}{more}\n"
            f"store: {len(self.store.samples())} samples ({heldout} held out), {int(index['length'].sum()):,} tokens, {bytes_text(self.store.n_bytes)}; "
            f"last states {self.store.manifest['last_state']}: {self.check}"
        )


def import_store(
    config: Config,
    target: Target,
    name: str,
    source: Path,
    norm: str | None = None,
    heldout_every: int = 20,
) -> Imported:
    """A store of the run from the files of another project; started again after a kill it goes on.

    Boundaries are the profile's, ascending, as the files have them, and boundary N is the last state. Of the samples in the order of their
    numbers the first of every `heldout_every` is held out (0: none). `norm` (pre, post): what the last states are, where the files are not what their
    format says. EyasError for files that are torn, of other shapes or not of this target, before anything is written; a sample whose
    values are unfit (NaN, ids outside the vocabulary, a mask that selects nothing) is marked as failed.
    """
    started_s = time.monotonic()
    source = Path(source).expanduser()
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
    said = FORMATS[name].said_boundaries(source)
    if said is not None and said != boundaries.with_last:
        fits = said[-1] == target.n_blocks
        raise EyasError(
            f"the files hold boundaries {list(said)}",
            f"{list(boundaries.with_last)}",
            f"-p boundaries '{list(said[:-1])}'" if fits else "-p target FOLDER",
        )
    reader = FORMATS[name](source, len(boundaries.with_last), target.hidden_size)
    if not reader.numbers:
        raise EyasError(
            f"{source.name!r} holds no file of {name}",
            "a folder of this format",
            "python -m eyas data import --help",
        )
    lengths, dtype = _lengths(reader)
    head = target.head()
    few = [
        reader.read(number)
        for number in sorted(
            {
                reader.numbers[i * (len(reader.numbers) - 1) // (CHECK_SAMPLES - 1)]
                for i in range(CHECK_SAMPLES)
            }
        )
    ]
    check = check_norm(head, [sample for sample in few if not _unfit(sample, target.vocab_size)])
    last_state = decide_norm(name, reader.norm, norm, check)
    manifest = _manifest(
        config,
        target,
        name,
        reader,
        lengths,
        "float8_e4m3fn" if config.store_fp8 else dtype,
        last_state,
        heldout_every,
    )
    need = sum(lengths.values()) * token_bytes(
        len(manifest["boundaries"]), target.hidden_size, manifest["dtype"]
    )
    there = sum(
        path.stat().st_size for path in (config.store_dir / "shards").glob("*.safetensors")
    )  # of an import that was killed
    need_room(config.store_dir, max(need - there, 0), "set EYAS_DATA to a larger disk")
    numbers = sorted({*lengths, *reader.missing})
    ids = {number: f"{name}-{number:06d}" for number in numbers}
    planned = [
        Planned(
            ids[n],
            "heldout" if heldout_every and place % heldout_every == 0 else "train",
            "imported",
            lengths.get(n, 0),
        )
        for place, n in enumerate(numbers)
    ]
    by_id = dict(zip(ids.values(), planned))
    writer, counts = (
        StoreWriter(config.store_dir, manifest, head, config.shard_mib * 2**20),
        {"samples": 0, "tok": 0},
    )
    try:
        todo = set(writer.plan(planned))
        with Progress(len(todo)) as progress:
            for number in numbers:
                id = ids[number]
                if id not in todo:
                    continue
                sample = reader.read(number) if number in lengths else None
                reason = _unfit(sample, target.vocab_size) if sample else "no file of states"
                if reason:
                    writer.fail(id, reason)
                    progress.update(errors=1)
                    continue
                states = {
                    b: rows.contiguous() for b, rows in zip(manifest["boundaries"], sample.states)
                }
                writer.add(
                    Rows(
                        id,
                        by_id[id].split,
                        "imported",
                        sample.input_ids.long(),
                        sample.loss_mask.bool(),
                        states,
                    )
                )
                counts = {
                    "samples": counts["samples"] + 1,
                    "tok": counts["tok"] + len(sample.input_ids),
                }
                progress.update(samples=1, tok=len(sample.input_ids), bytes=sample.n_bytes)
        writer.flush()
    finally:
        writer.release()
    store, seconds = Store.open(config.store_dir), time.monotonic() - started_s
    write_data_config(
        store,
        {
            "seconds": seconds,
            "samples_per_s": counts["samples"] / seconds,
            "tok_per_s": counts["tok"] / seconds,
        },
    )
    bad = store.index[store.index["state"] != "extracted"]
    return Imported(store, counts["samples"], dict(zip(bad["id"], bad["reason"])), check)


def _lengths(reader) -> tuple[dict[int, int], str]:
    """(number -> tokens, dtype of the states), from every file, whose shapes are checked on the way."""
    lengths, dtypes = {}, {}
    for number in reader.numbers:
        sample = reader.open(number)
        lengths[number] = len(sample.input_ids)
        dtypes.setdefault(sample.states[0].dtype, reader.paths[number].name)
    if len(dtypes) > 1:
        raise EyasError(
            "the files hold states of different dtypes: "
            + ", ".join(f"{name} {dtype}" for dtype, name in dtypes.items()),
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
    """The fields of an extraction's manifest; what an import doesn't know is None."""
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
