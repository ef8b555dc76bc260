"""Other projects' files of hidden states, out of a store and into one, a sample at a time.

    python -m eyas store export --to specforge --out FOLDER --profile demo
    python -m eyas store import --from speculators-v1 FOLDER -p target FOLDER -p boundaries '[3, 16, 28]' -p run_name NAME

    speculators-v1  speculators 0.3 and 0.4: data_{i}.pt, sample_lengths.json, data_config.json         last state before the final norm
    speculators     speculators >= 0.5: hidden_states/hs_{i}.safetensors and an Arrow data set          last state before the final norm
    specforge       SpecForge: rows_{g}-{g+2000}/data_{i}.ckpt (reads .ckpt.gz too)                     last state after the final norm

What each file holds was read in speculators 0.3.0 (`train/data.py`, `data_generation/config_generator.py`), speculators 0.9.0 (`train/data.py`,
`hs_connectors/transfer.py`) and specforge 0.2.0 (`runtime/data_plane/offline_reader.py`); tests/test_formats.py has their own readers read ours.

No file is unpickled beyond tensors, none outside the named folder is read. A state after the final norm cannot be turned back, so the manifest of
an import says what its last state is, and `Store.head()` norms accordingly.
"""

import bisect
import gzip
import io
import json
import math
import os
import pickle
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open

from eyas import __version__
from eyas.boundaries import boundaries_of
from eyas.config import Config
from eyas.errors import EyasError
from eyas.extract import write_data_config
from eyas.files import read_json, sha256_json, write_atomic, write_json, write_safetensors
from eyas.progress import Progress, bytes_text
from eyas.prompts import template_hash, tokenizer_hash
from eyas.store import Planned, Rows, Store, StoreWriter, free_bytes, token_bytes
from eyas.target import Head, Target

PRE, POST = "pre-norm", "post-norm"
ROWS_OF_A_FOLDER = 2000  # SpecForge's
CHECK_SAMPLES, CHECK_TOK = 4, 64  # what the check of the norm convention looks at: samples, and predictions of each
TOLERANCE = 2.0**-6  # of an RMS: two roundings to bfloat16, and the eps of the norm
FP8_SCALES, LENGTHS = "hidden_states_scales", "sample_lengths.json"


@dataclass(frozen=True)
class Sample:
    """One sample as these files have it. states: the drafter's boundaries in ascending order, then the last one, [T, H] each."""

    number: int
    input_ids: torch.Tensor  # [T]
    loss_mask: torch.Tensor  # [T]
    states: list[torch.Tensor]

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for t in (self.input_ids, self.loss_mask, *self.states))


# ---- reading: a class per format. `numbers` ascending; `open(number)` maps a file without reading its states; `read(number)` is the sample


class SpeculatorsV1:
    norm, id_is_boundary_minus = PRE, 1

    def __init__(self, source: Path, n_states: int, hidden_size: int):
        self.n_states, self.hidden_size = n_states, hidden_size
        self.paths = _numbered(source, source.glob("data_*.pt"), r"data_(\d+)\.pt")
        self.numbers = list(self.paths)
        self.lengths = {int(n): tok for n, tok in _json(source, source / LENGTHS).items() if n.isdecimal()} if (source / LENGTHS).is_file() else {}
        self.missing = sorted(set(self.lengths) - set(self.paths))

    @classmethod
    def said_boundaries(cls, source: Path) -> tuple[int, ...] | None:
        """The boundaries that data_config.json names, the last one included."""
        config = _json(source, source / "data_config.json") if (source / "data_config.json").is_file() else {}
        block = config.get("hidden_states")
        ids = block.get("layer_ids") if isinstance(block, dict) else None
        return tuple(x + cls.id_is_boundary_minus for x in ids) if isinstance(ids, list) and ids and all(isinstance(x, int) for x in ids) else None

    def open(self, number: int) -> Sample:
        path = self.paths[number]
        found = _unpickled(path, ("input_ids", "hidden_states", "loss_mask"))
        states = found["hidden_states"] if isinstance(found["hidden_states"], (list, tuple)) else []
        sample = _checked(path.name, Sample(number, found["input_ids"], found["loss_mask"], list(states)), self.n_states, self.hidden_size)
        if self.lengths.get(number, len(sample.input_ids)) != len(sample.input_ids):
            raise EyasError(f"{path.name} holds {len(sample.input_ids)} tokens, {LENGTHS} says {self.lengths[number]}", "files of one run", "make this file again")
        return sample

    read = open


class SpecForge:
    norm, id_is_boundary_minus = POST, 1

    def __init__(self, source: Path, n_states: int, hidden_size: int):
        self.n_states, self.hidden_size = n_states, hidden_size
        self.paths = _numbered(source, [*source.glob("data_*.ckpt*"), *source.glob("*/data_*.ckpt*")], r"data_(\d+)\.ckpt(?:\.gz)?")
        self.numbers, self.missing = list(self.paths), []

    @classmethod
    def said_boundaries(cls, source: Path) -> None:
        """Nothing in the files says which layers they are."""

    def open(self, number: int) -> Sample:
        path = self.paths[number]
        found = _unpickled(path, ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state"))
        last, aux = (_without_batch(found[name]) for name in ("hidden_state", "aux_hidden_state"))
        whole = isinstance(aux, torch.Tensor) and aux.ndim == 2 and aux.shape[1] % self.hidden_size == 0
        states = [*(aux.split(self.hidden_size, dim=1) if whole else [aux]), last]
        return _checked(path.name, Sample(number, found["input_ids"], found["loss_mask"], states), self.n_states, self.hidden_size)

    read = open


class Speculators:
    norm, id_is_boundary_minus = PRE, 0

    def __init__(self, source: Path, n_states: int, hidden_size: int):
        """Row i of the Arrow data set belongs to hs_{i}; a row without a file is in `missing`."""
        self.n_states, self.hidden_size = n_states, hidden_size
        self.paths = _numbered(source, (source / "hidden_states").glob("hs_*.safetensors"), r"hs_(\d+)\.safetensors")
        self.starts, self.batches, rows = [], [], 0  # first row of a batch, the batch, memory-mapped
        state = _json(source, source / "state.json")
        entries = state.get("_data_files")
        for name in [str(entry.get("filename")) if isinstance(entry, dict) else "" for entry in entries] if isinstance(entries, list) else [""]:
            if not name or Path(name).name != name:
                raise EyasError(f"state.json names the data file {name!r}", "a file beside it", "save the data set again: datasets.save_to_disk")
            for batch in _arrow(source, source / name):
                self.starts.append(rows)
                self.batches.append(batch)
                rows += len(batch)
        strays = [number for number in self.paths if number >= rows]
        if strays:
            raise EyasError(f"{self.paths[strays[0]].name} has no row in the data set, which has {rows}", "a row for each file", "remove it, or save the data set again")
        self.numbers, self.missing = list(self.paths), [number for number in range(rows) if number not in self.paths]

    @classmethod
    def said_boundaries(cls, source: Path) -> None:
        """Nothing in the files says which layers they are."""

    def _row(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids [T] and loss_mask [T] of a row."""
        place = bisect.bisect_right(self.starts, number) - 1
        batch, row = self.batches[place], number - self.starts[place]
        return tuple(torch.tensor(batch.column(name)[row].values.to_numpy(zero_copy_only=False)) for name in ("input_ids", "loss_mask"))

    def open(self, number: int) -> Sample:
        """States in the dtype of the file."""
        return self._open(number)[0]

    def _open(self, number: int) -> tuple[Sample, torch.Tensor | None]:
        path = self.paths[number]
        try:
            with safe_open(path, framework="pt") as file:
                missing = {"hidden_states", "token_ids"} - set(file.keys())
                if missing:
                    raise EyasError(f"{path.name} has no {', '.join(sorted(missing))}", "hidden_states and token_ids", "make this file again")
                found = {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, OSError) as error:
            raise _torn(path, error) from None
        ids, mask = self._row(number)
        if not torch.equal(found["token_ids"], ids.to(found["token_ids"].dtype)):
            raise EyasError(f"{path.name} holds other token ids than row {number} of the data set", "the same", "make this file again")
        states = found["hidden_states"]  # [T, n_states, H]
        sample = Sample(number, ids, mask, list(states.unbind(1)) if states.ndim == 3 else [states])
        return _checked(path.name, sample, self.n_states, self.hidden_size), found.get(FP8_SCALES)

    def read(self, number: int) -> Sample:
        """fp8 states (one float32 scale per token over all layers) come back in bfloat16, by the arithmetic of speculators' own reader."""
        sample, scales = self._open(number)
        if sample.states[0].dtype != torch.float8_e4m3fn:
            return sample
        if scales is None or scales.numel() != len(sample.input_ids):
            raise EyasError(f"{self.paths[number].name} holds fp8 states without a scale per token", FP8_SCALES, "make this file again")
        scales = scales.reshape(-1, 1).bfloat16()  # [T, 1]
        return Sample(number, sample.input_ids, sample.loss_mask, [states.bfloat16() * scales for states in sample.states])


FORMATS = {"speculators-v1": SpeculatorsV1, "speculators": Speculators, "specforge": SpecForge}


def _numbered(source: Path, paths, pattern: str) -> dict[int, Path]:
    """Number -> file, ascending; each inside `source`, however it is linked."""
    found: dict[int, Path] = {}
    for path in paths:
        match = re.fullmatch(pattern, path.name)
        if not match:
            continue
        number = int(match[1])
        if number in found:
            raise EyasError(f"sample {number} is there twice: {found[number].relative_to(source)} and {path.relative_to(source)}", "one file a sample", "remove one of them")
        found[number] = _inside(source, path)
    return dict(sorted(found.items()))


def _inside(source: Path, path: Path) -> Path:
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(source)):
        raise EyasError(f"{path.name} leads out of the folder {source.name!r}", "files of that folder only", "copy the file there if it is meant")
    return path


def _json(source: Path, path: Path) -> dict:
    try:
        found = read_json(_inside(source, path))
    except FileNotFoundError:
        raise EyasError(f"{source.name!r} has no {path.name}", "a folder of this format", "python -m eyas store import --help") from None
    except (OSError, ValueError) as error:
        raise _torn(path, error) from None
    if not isinstance(found, dict):
        raise EyasError(f"{path.name} is not a JSON object", "one", "make this file again")
    return found


def _arrow(source: Path, path: Path) -> list[pa.RecordBatch]:
    try:
        with pa.ipc.open_stream(pa.memory_map(str(_inside(source, path)))) as reader:
            batches = [batch for batch in reader if len(batch)]
            for batch in batches:
                batch.validate(full=True)
            schema = reader.schema
    except (OSError, pa.ArrowException) as error:
        raise _torn(path, error) from None
    for name in ("input_ids", "loss_mask"):
        kind = schema.field(name).type if name in schema.names else None
        lists = kind is not None and (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_integer(kind.value_type)
        if not lists or any(batch.column(name).null_count for batch in batches):
            raise EyasError(f"{path.name} has no whole column {name} of integers", "input_ids and loss_mask", "speculators' own data preparation writes them")
    return batches


def _unpickled(path: Path, keys: tuple[str, ...]) -> dict:
    """The dict of a torch.save file, memory-mapped where it isn't compressed. Tensors and plain values only: anything else is refused unread."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                found = torch.load(io.BytesIO(file.read()), weights_only=True, map_location="cpu")
        else:
            found = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        why = next((line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), "code in place of tensors")
        raise EyasError(f"{path.name} is not read: {why.strip()[:120]}", "tensors only; nothing is unpickled that could run code", "make this file again") from None
    except Exception as error:  # bytes of unknown origin: torch has no one class for what can be wrong with them
        raise _torn(path, error) from None
    missing = [name for name in keys if not isinstance(found, dict) or name not in found]
    if missing:
        raise EyasError(f"{path.name} has no {', '.join(missing)}", ", ".join(keys), "is it of another format? python -m eyas store import --help")
    return found


def _torn(path: Path, error: Exception) -> EyasError:
    return EyasError(f"{path.name} is torn: {str(error).splitlines()[0][:120] if str(error) else type(error).__name__}", "a whole file", "copy or make it again")


def _without_batch(value):
    return value[0] if isinstance(value, torch.Tensor) and value.ndim == 3 and len(value) == 1 else value


def _checked(name: str, sample: Sample, n_states: int, hidden_size: int) -> Sample:
    """The same sample, or an EyasError naming the file whose shapes aren't those of the format."""
    tensors = [sample.input_ids, sample.loss_mask, *sample.states]
    if not all(isinstance(t, torch.Tensor) and t.layout == torch.strided and t.untyped_storage().nbytes() >= t.nbytes for t in tensors):
        raise EyasError(f"{name} holds something else in the place of a tensor", "plain tensors", "make this file again")
    ids, mask = sample.input_ids, sample.loss_mask
    if ids.ndim != 1 or ids.is_floating_point() or mask.shape != ids.shape:
        raise EyasError(f"{name}: input_ids {tuple(ids.shape)} {ids.dtype}, loss_mask {tuple(mask.shape)}", "[T] both, ids as integers", "make this file again")
    if len(sample.states) != n_states:
        raise EyasError(f"{name} holds {len(sample.states)} states of {hidden_size} values a token", f"{n_states}: this run's {n_states - 1} boundaries and the last one",
                        "-p boundaries '[...]' with the boundaries that were captured, and -p target FOLDER")
    wrong = [t for t in sample.states if t.shape != (len(ids), hidden_size) or not t.is_floating_point() or t.dtype != sample.states[0].dtype]
    if wrong:
        raise EyasError(f"{name}: a state is {tuple(wrong[0].shape)} {wrong[0].dtype}", f"[{len(ids)}, {hidden_size}], all of one dtype", "-p target FOLDER with the target that it was made from")
    return sample


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
    return next((f"state {n} of {len(sample.states)} holds NaN or Inf" for n, t in enumerate(sample.states, 1) if not bool(torch.isfinite(t).all())), "")


# ---- before or after the final norm?


@dataclass(frozen=True)
class NormCheck:
    """What two witnesses say about last states. `norm` is pre-norm, post-norm, or empty where they contradict each other or say nothing."""

    norm: str
    unit_share: float  # of the tokens: RMS of state / norm weight is 1 within rounding, which the norm gives every token and nothing else does
    nll: dict[str, float]  # reading -> mean negative log-likelihood of the samples' own next tokens, nats
    blind_nll: float  # of a head that knows nothing: log V

    def __str__(self) -> str:
        return (f"{self.unit_share:.0%} of the tokens have the RMS that the target's final norm gives; next tokens cost {self.nll[PRE]:.2f} nats "
                f"read as {PRE}, {self.nll[POST]:.2f} as {POST} ({self.blind_nll:.2f}: a blind guess)")


def check_norm(head: Head, samples: list[Sample]) -> NormCheck:
    """The final norm divides by the RMS and multiplies by its weight: RMS(state / weight) is 1 for every token after it (to rounding), and not before.

    The second witness is the head itself, which counts where one reading of the states predicts the text at all.
    """
    near = tokens = followed = 0
    nll = {PRE: 0.0, POST: 0.0}
    for sample in samples:
        last = sample.states[-1].float()  # [T, H]
        rms = (last / head.norm_weight).square().mean(-1).sqrt()  # [T]
        near += int(((rms - 1).abs() < TOLERANCE).sum())
        tokens += len(last)
        at = torch.nonzero(sample.loss_mask[1:] != 0).squeeze(1)[:CHECK_TOK]  # [n]: token at+1 is the target's own
        next_ids = sample.input_ids[at + 1].long()
        for reading, states in ((PRE, head.normed(last[at])), (POST, last[at])):
            nll[reading] += float(torch.nn.functional.cross_entropy(states @ head.lm_head.T, next_ids, reduction="sum"))
        followed += len(at)
    share, nll = near / max(tokens, 1), {reading: value / max(followed, 1) for reading, value in nll.items()}
    said = set()
    if bool((head.norm_weight != 0).all()) and not 0.5 < share < 0.95:
        said.add(POST if share >= 0.95 else PRE)
    better, blind = min(nll, key=nll.get), math.log(len(head.lm_head))
    if followed and nll[better] < blind - 1 and abs(nll[PRE] - nll[POST]) > 0.1:
        said.add(better)
    return NormCheck(said.pop() if len(said) == 1 else "", share, nll, blind)


def _decide_norm(name: str, definition: str, told: str | None, check: NormCheck) -> str:
    if told:
        return f"{told}-norm"
    if check.norm != definition:
        found = f"look {check.norm}" if check.norm else "do not show which they are"
        raise EyasError(f"last states of {name} are {definition}, these {found}: {check}", "files and target that belong together",
                        f"is it the right -p target? If it is, say what the states are: --norm {'post' if check.norm == POST else 'pre'}, or --norm {'pre' if check.norm == POST else 'post'}")
    return definition


# ---- in


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
        return (f"asked {len(index)} = imported {self.imported} + skipped {len(index) - self.imported - len(self.failed)} (already there) + failed {len(self.failed)}{why}{more}\n"
                f"store: {len(self.store.samples())} samples ({heldout} held out), {int(index['length'].sum()):,} tokens, {bytes_text(self.store.n_bytes)}; "
                f"last states {self.store.manifest['last_state']}: {self.check}")


def import_store(config: Config, target: Target, name: str, source: Path, norm: str | None = None, heldout_every: int = 20) -> Imported:
    """A store of the run from the files of another project; started again after a kill it goes on.

    Boundaries are the profile's, ascending, as the files have them, and boundary N is the last state. Of the samples in the order of their
    numbers the first of every `heldout_every` is held out (0: none). `norm` (pre, post): what the last states are, where the files are not what their
    format says. EyasError for files that are torn, of other shapes or not of this target, before anything is written; a sample whose
    values are unfit (NaN, ids outside the vocabulary, a mask that selects nothing) is marked as failed.
    """
    started_s = time.monotonic()
    source = Path(source).expanduser()
    if not source.is_dir():
        raise EyasError(f"no folder {str(source)!r}", "a folder of hidden states", "python -m eyas store import --help")
    if heldout_every < 0:
        raise EyasError(f"--heldout-every {heldout_every}", "1 or more, or 0 for none", "python -m eyas store import --help")
    boundaries = boundaries_of(config, target.n_blocks)
    if boundaries.feeding[-1] >= boundaries.last:
        raise EyasError(f"boundaries {list(boundaries.feeding)}", f"boundaries below {target.n_blocks}, which is the last state", "-p boundaries '[...]'")
    said = FORMATS[name].said_boundaries(source)
    if said is not None and said != boundaries.with_last:
        fits = said[-1] == target.n_blocks
        raise EyasError(f"the files hold boundaries {list(said)}", f"{list(boundaries.with_last)}", f"-p boundaries '{list(said[:-1])}'" if fits else "-p target FOLDER")
    reader = FORMATS[name](source, len(boundaries.with_last), target.hidden_size)
    if not reader.numbers:
        raise EyasError(f"{source.name!r} holds no file of {name}", "a folder of this format", "python -m eyas store import --help")
    lengths, dtype = _lengths(reader)
    head = target.head()
    few = [reader.read(number) for number in sorted({reader.numbers[i * (len(reader.numbers) - 1) // (CHECK_SAMPLES - 1)] for i in range(CHECK_SAMPLES)})]
    check = check_norm(head, [sample for sample in few if not _unfit(sample, target.vocab_size)])
    last_state = _decide_norm(name, reader.norm, norm, check)
    manifest = _manifest(config, target, name, reader, lengths, "float8_e4m3fn" if config.store_fp8 else dtype, last_state, heldout_every)
    need = sum(lengths.values()) * token_bytes(len(manifest["boundaries"]), target.hidden_size, manifest["dtype"])
    there = sum(path.stat().st_size for path in (config.store_dir / "shards").glob("*.safetensors"))  # of an import that was killed
    _need_room(config.store_dir, max(need - there, 0), "set EYAS_DATA to a larger disk")
    numbers = sorted({*lengths, *reader.missing})
    ids = {number: f"{name}-{number:06d}" for number in numbers}
    planned = [Planned(ids[n], "heldout" if heldout_every and place % heldout_every == 0 else "train", "imported", lengths.get(n, 0)) for place, n in enumerate(numbers)]
    by_id = dict(zip(ids.values(), planned))
    writer, counts = StoreWriter(config.store_dir, manifest, head, config.shard_mib * 2**20), {"samples": 0, "tok": 0}
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
                states = {b: rows.contiguous() for b, rows in zip(manifest["boundaries"], sample.states)}
                writer.add(Rows(id, by_id[id].split, "imported", sample.input_ids.long(), sample.loss_mask.bool(), states))
                counts = {"samples": counts["samples"] + 1, "tok": counts["tok"] + len(sample.input_ids)}
                progress.update(samples=1, tok=len(sample.input_ids), bytes=sample.n_bytes)
        writer.flush()
    finally:
        writer.release()
    store, seconds = Store.open(config.store_dir), time.monotonic() - started_s
    write_data_config(store, {"seconds": seconds, "samples_per_s": counts["samples"] / seconds, "tok_per_s": counts["tok"] / seconds})
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
        raise EyasError("the files hold states of different dtypes: " + ", ".join(f"{name} {dtype}" for dtype, name in dtypes.items()), "one dtype", "import them apart")
    dtype = torch.bfloat16 if torch.float8_e4m3fn in dtypes else next(iter(dtypes))
    return lengths, str(dtype).removeprefix("torch.")


def _manifest(config: Config, target: Target, name: str, reader, lengths: dict[int, int], dtype: str, last_state: str, heldout_every: int) -> dict:
    """The fields of an extraction's manifest; what an import doesn't know is None."""
    tokenizer = target.tokenizer()
    files = sorted((path.name, path.stat().st_size) for path in reader.paths.values())
    return {
        "target": {
            "name": target.name, "config_hash": target.config_hash, "fingerprint": target.fingerprint, "n_blocks": target.n_blocks,
            "hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "rms_norm_eps": target.rms_norm_eps,
        },
        "engine": {"name": name, "version": None, "device": None, "capture_plugin": None, "files": sha256_json(files)},
        "boundaries": list(boundaries_of(config, target.n_blocks).with_last),
        "dtype": dtype,
        "hidden_size": target.hidden_size,
        "last_state": last_state,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": template_hash(tokenizer),
        "prompts": {"hash": None, "order": "by number", "seed": None, "max_length": max(lengths.values()), "heldout_every": heldout_every},
        "server_flags": {},
    }


# ---- out


def export_store(store: Store, name: str, folder: Path, boundaries: tuple[int, ...], split: str | None = None) -> str:
    """Write the extracted samples (of one split) as files of another project into an empty folder; gives a line that says what was written.

    Samples are numbered in index order; those of an import keep the numbers that they came with, except for `speculators`, whose rows have no gaps.
    The states keep their dtype, fp8 goes out as bfloat16. For `specforge` a last state before the norm is normed in float32 and rounded to its dtype.
    """
    format, folder = FORMATS[name], Path(folder).expanduser()
    missing = [b for b in boundaries if b not in store.boundaries[:-1]]
    if missing:
        raise EyasError(f"the store has boundaries {list(store.boundaries)}, not {missing} and the last", "", "-p boundaries '[...]' with some of them")
    last_state = store.manifest.get("last_state", PRE)
    if last_state == POST and format.norm == PRE:
        raise EyasError(f"the store's last states are {POST}, files of {name} hold them {PRE}, and the norm can't be undone", "a format with states after the norm", "--to specforge")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise EyasError(f"{folder.name!r} is not empty", "a folder that is empty or not there yet", "--out FOLDER")
    ids = store.samples(split)
    if not ids:
        raise EyasError("the store has no extracted sample" + (f" of split {split}" if split else ""), "one at least", "python -m eyas extract")
    tokens = int(store.index.set_index("id").loc[ids, "length"].sum())
    row_bytes = (len(boundaries) + 1) * store.manifest["hidden_size"] * max(getattr(torch, store.manifest["dtype"]).itemsize, 2) + 16
    _need_room(folder, tokens * row_bytes, "--out FOLDER on a larger disk")
    folder.mkdir(parents=True, exist_ok=True)
    with Progress(len(ids)) as progress:
        {"speculators-v1": _write_speculators_v1, "speculators": _write_speculators, "specforge": _write_specforge}[name](
            folder, _outgoing(store, ids, boundaries, name, progress), store, boundaries)
    layers = [b - format.id_is_boundary_minus for b in boundaries]
    return f"{len(ids)} samples, {tokens:,} tokens, {bytes_text(tokens * row_bytes)} for {name}; boundaries {list(boundaries)} are its layer ids {layers}"


def _outgoing(store: Store, ids: list[str], boundaries: tuple[int, ...], name: str, progress: Progress) -> Iterator[Sample]:
    """The samples as the format has them: last state before or after the norm, ids and mask int64."""
    norming = FORMATS[name].norm == POST and store.manifest.get("last_state", PRE) == PRE
    head = store.head() if norming else None
    own_numbers = store.manifest["engine"]["name"] in FORMATS and name != "speculators"
    for place, id in enumerate(ids):
        found = store.read(id, (*boundaries, store.boundaries[-1]))
        states = list(found["states"].values())  # [T, H] each
        if head is not None:
            states[-1] = head.normed(states[-1]).to(states[-1].dtype)
        yield Sample(int(id.rsplit("-", 1)[1]) if own_numbers else place, found["input_ids"], found["loss_mask"].long(), states)
        progress.update(samples=1, tok=len(found["input_ids"]), bytes=sum(t.nbytes for t in states))


def _write_speculators_v1(folder: Path, samples: Iterator[Sample], store: Store, boundaries: tuple[int, ...]) -> None:
    lengths = {}
    for sample in samples:
        _torch_save(folder / f"data_{sample.number}.pt", {"input_ids": sample.input_ids, "hidden_states": sample.states, "loss_mask": sample.loss_mask})
        lengths[str(sample.number)] = len(sample.input_ids)
    write_json(folder / "sample_lengths.json", lengths)
    manifest, width = store.manifest, store.manifest["hidden_size"]
    write_json(folder / "data_config.json", {
        "version": "2.0",
        "generated_at": datetime.now(UTC).isoformat(),
        "speculators_version": None,
        "reproducibility": {
            "command": f"eyas {__version__}: store export", "gpu": None,
            "package_versions": {"torch": torch.__version__, "vllm": None, "transformers": None, "speculators": None, manifest["engine"]["name"]: manifest["engine"]["version"]},
        },
        "model": {"target_model_path": manifest["target"]["name"], "tensor_parallel_size": None, "gpu_memory_utilization": None, "hidden_size": width},
        "data": {
            "train_data_path": f"eyas store of run {store.folder.parent.name}", "seq_length": manifest["prompts"]["max_length"], "max_samples": None,
            "num_samples": len(lengths), "seed": manifest["prompts"].get("seed"), "chat_template_note": "the tokenizer's own chat template",
        },
        "hidden_states": {
            "layer_ids": [b - SpeculatorsV1.id_is_boundary_minus for b in (*boundaries, store.boundaries[-1])],
            "description": "outputs of these decoder layers; the last one before the final norm",
        },
        "generation": {"cache_dir": None},
        "format": {
            "file_pattern": "data_{idx}.pt", "data_format_version": 1,
            "schema": {
                "input_ids": {"dtype": "torch.long", "shape": "[seq_len]", "description": "token ids"},
                "hidden_states": {
                    "dtype": f"list[{sample.states[0].dtype}]", "shape": f"list of [seq_len, {width}]", "num_tensors": len(boundaries) + 1,
                    "description": "one tensor for each of layer_ids",
                },
                "loss_mask": {"dtype": "torch.long", "shape": "[seq_len]", "description": "1 where the token is the target's own, 0 elsewhere"},
            },
        },
    })  # fmt: skip


def _write_specforge(folder: Path, samples: Iterator[Sample], store: Store, boundaries: tuple[int, ...]) -> None:
    for sample in samples:
        first = sample.number // ROWS_OF_A_FOLDER * ROWS_OF_A_FOLDER
        _torch_save(folder / f"rows_{first}-{first + ROWS_OF_A_FOLDER}" / f"data_{sample.number}.ckpt", {
            "input_ids": sample.input_ids, "loss_mask": sample.loss_mask,
            "hidden_state": sample.states[-1][None], "aux_hidden_state": torch.cat(sample.states[:-1], dim=1)[None],
        })  # fmt: skip


def _write_speculators(folder: Path, samples: Iterator[Sample], store: Store, boundaries: tuple[int, ...]) -> None:
    """What `datasets.save_to_disk` writes is an Arrow stream and two JSON files that name its columns."""
    features = {name: {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "Sequence"} for name in ("input_ids", "loss_mask")}
    features["seq_len"] = {"dtype": "int64", "_type": "Value"}
    schema = pa.schema([("input_ids", pa.list_(pa.int64())), ("loss_mask", pa.list_(pa.int64())), ("seq_len", pa.int64())],
                       {"huggingface": json.dumps({"info": {"features": features}})})  # fmt: skip

    def write(path: Path) -> None:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as rows:
            for sample in samples:
                write_safetensors(folder / "hidden_states" / f"hs_{sample.number}.safetensors", {
                    "hidden_states": torch.stack(sample.states, dim=1), "token_ids": sample.input_ids,  # [T, n, H], [T]
                }, {})  # fmt: skip
                columns = [pa.array([t.numpy()], pa.list_(pa.int64())) for t in (sample.input_ids, sample.loss_mask)]
                rows.write_batch(pa.record_batch([*columns, pa.array([len(sample.input_ids)], pa.int64())], schema=schema))

    name = "data-00000-of-00001.arrow"
    write_atomic(folder / name, write)
    write_json(folder / "dataset_info.json", {"citation": "", "description": "", "features": features, "homepage": "", "license": ""})
    write_json(folder / "state.json", {
        "_data_files": [{"filename": name}], "_fingerprint": sha256_json([store.manifest, list(store.index["content_hash"])])[:16],
        "_format_columns": list(features), "_format_kwargs": {}, "_format_type": "torch", "_output_all_columns": False, "_split": None,
    })  # fmt: skip


def _torch_save(path: Path, found: dict) -> None:
    """torch.save writes the whole storage of a tensor: of a view into a shard, the shard. So every tensor is given a storage of its own size."""
    found = {name: [t.clone() for t in value] if isinstance(value, list) else value.clone() for name, value in found.items()}

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:  # a file, not a path: torch puts the path's name into the archive
            torch.save(found, file)

    write_atomic(path, write)


def _need_room(folder: Path, need_bytes: int, otherwise: str) -> None:
    free = free_bytes(folder)
    if free < 1.02 * need_bytes + 2**26:
        raise EyasError(f"{bytes_text(free)} free, {bytes_text(need_bytes)} will be written", "room for them", f"free some, or {otherwise}")
