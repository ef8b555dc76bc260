"""Read a store: the hidden states of a data set on disk. It opens within a second.

    manifest.json         what these states are; written before any of them. A run with another
                          manifest is refused.
    head.safetensors      the target's final norm and head, to recompute logits without the target
    shards/*.safetensors  unpadded tensors: `boundary_<b>` [S, H], `input_ids` int64 [S] and
                          `loss_mask` uint8 [S]. fp8 stores: `boundary_<b>` in e4m3, and
                          `scale_<b>` float32 [S], one scale a token and boundary.
    index.parquet         one row a sample (COLUMNS below): extracted, failed (with the reason) or
                          pending (not extracted yet)
    data_config.json      the summary: samples, tokens, bytes, errors, rates

Why a store survives a kill at any moment, and why its bytes do not depend on interruptions:

- `StoreWriter.plan` gives every sample its place, a shard and an offset, before any data exist.
  The place depends only on the order and the lengths of the samples. A place whose sample is
  missing holds zeros. So a store that was killed, ran out of disk space, or lost samples and was
  repaired is byte-identical to an uninterrupted one.
- A shard gets its final name before the index counts its samples, and the index is replaced as a
  whole. So the index only names samples that exist.
- Each shard's metadata repeats its rows of the index, with a hash. The index repeats the manifest.
  So either can be rebuilt (`eyas.capture.verify`).
"""

import fcntl
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import xxhash
from safetensors import SafetensorError, safe_open

from eyas.errors import EyasError
from eyas.files import is_sealed, read_json, sha256_json, write_atomic
from eyas.models.boundaries import tensor_name
from eyas.models.target import Head
from eyas.store.sample import Sample

FORMAT = "eyas-store-3"
COLUMNS = {
    "id": "string",
    "split": "string",
    "category": "string",
    "topic": "string",
    "state": "string",
    "reason": "string",
    "shard": "string",
    "offset": "int64",
    "length": "int64",
    "loss_tok": "int64",
    "content_hash": "string",
    "truncated": "bool",
}
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the largest value of e4m3
OPEN_SHARDS = 4  # shards that one reader keeps mapped


class StoreDamaged(EyasError):
    """Report that the manifest or the index itself is missing, torn or altered."""


@dataclass(frozen=True)
class Planned:
    """Describe one sample before it is extracted.

    length_tok: 0 if the sample was refused and will have no rows. topic: empty if unknown.
    """

    id: str
    split: str
    category: str
    length_tok: int
    topic: str = ""


Rows = Sample  # the name that writers of a store still use


def to_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows [T, H]; return (e4m3 [T, H], scale float32 [T]).

    Each token's largest absolute value becomes the largest value of e4m3.
    """
    rows = rows.float()
    scale = (rows.abs().amax(dim=1) / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)  # [T]
    return (rows / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def from_fp8(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Dequantise e4m3 rows [T, H] with their scales [T]; return bfloat16 [T, H]."""
    return (rows.float() * scale[:, None]).to(torch.bfloat16)


def content_hash(tensors: dict[str, torch.Tensor]) -> str:
    """Return the xxh3-128 hash over a sample's stored tensors, with name, dtype and shape.

    It detects any altered byte, but gives no protection from an attacker.
    """
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def tensor_names(boundaries: tuple[int, ...], dtype: str) -> list[str]:
    """Return the names of the tensors of a shard."""
    names = ["input_ids", "loss_mask"] + [tensor_name(b) for b in boundaries]
    if dtype == "float8_e4m3fn":
        names += [f"scale_{b}" for b in boundaries]
    return names


def token_bytes(n_boundaries: int, hidden_size: int, dtype: str) -> int:
    """Return the bytes of one token in a store: its states, id and mask."""
    boundary_bytes = hidden_size * getattr(torch, dtype).itemsize
    if dtype == "float8_e4m3fn":
        boundary_bytes += 4  # the scale
    return n_boundaries * boundary_bytes + 8 + 1


class Store:
    """Read a store. `index` is a DataFrame with the columns COLUMNS, in the order of extraction."""

    def __init__(self, folder: Path, manifest: dict, index: pd.DataFrame):
        self.folder = Path(folder)
        self.manifest = manifest
        self.index = index
        self.boundaries = tuple(manifest["boundaries"])
        self._row = {id: n for n, id in enumerate(index["id"])}
        self._shards: dict[str, safe_open] = {}
        self._checked: set[str] = set()  # samples whose content hash was compared
        # It names the run, because a mixture reads the stores of several runs.
        self._repair = f"python -m eyas verify --repair -p run_name {self.folder.parent.name}"

    @classmethod
    def open(cls, folder: Path) -> "Store":
        """Open the store in a folder.

        Raise EyasError if there is no store, and StoreDamaged if its manifest or its index is
        missing, torn or altered.
        """
        folder = Path(folder)
        if not is_begun(folder):
            raise EyasError(
                f"no store at {folder.name!r} of run {folder.parent.name!r}",
                "a folder with manifest.json",
                "python -m eyas extract",
            )
        manifest = read_manifest(folder)
        if manifest.get("format") != FORMAT:
            raise EyasError(
                f"the store's format is {manifest.get('format')!r}",
                FORMAT,
                f"python -m eyas data rm {folder.parent.name} --yes, then python -m eyas extract",
            )
        index, written = read_index(folder)
        if written not in (None, manifest):
            raise StoreDamaged(
                f"manifest.json of run {folder.parent.name!r} is not the one"
                " that index.parquet was written with",
                "both of one store",
                f"put the right one back, or python -m eyas data rm {folder.parent.name}",
            )
        return cls(folder, manifest, index)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token in this store."""
        return token_bytes(
            len(self.boundaries), self.manifest["hidden_size"], self.manifest["dtype"]
        )

    @property
    def identity(self) -> str:
        """Return one hash over the manifest and the extracted samples, in any order."""
        done = self.index[self.index["state"] == "extracted"]
        return sha256_json([self.manifest, sorted(zip(done["id"], done["content_hash"]))])

    def samples(self, split: str | None = None) -> list[str]:
        """Return the ids of the extracted samples, in the order of the index."""
        rows = self.index[self.index["state"] == "extracted"]
        if split is not None:
            rows = rows[rows["split"] == split]
        return list(rows["id"])

    def row(self, id: str) -> pd.Series:
        """Return a sample's row of the index."""
        return self.index.iloc[self._place(id)]

    def category(self, id: str) -> str:
        return self.row(id)["category"]

    def _place(self, id: str) -> int:
        if id not in self._row:
            raise EyasError(f"sample {id!r} is not in the store", "", "python -m eyas verify")
        return self._row[id]

    def read(self, id: str, boundaries: tuple[int, ...] | None = None) -> Sample:
        """Return one sample with its states at these boundaries, or at all that the store has.

        Only these bytes are read (memory map). fp8 states are returned in bfloat16. The first read
        of a sample with all boundaries compares its content hash; see `checks`. Raise EyasError for
        a sample or a boundary that the store does not have, and for a shard that cannot be read or
        is not what was written.
        """
        row = self._extracted(self.row(id))
        missing = set(boundaries or ()) - set(self.boundaries)
        if missing:
            raise EyasError(
                f"the store has boundaries {list(self.boundaries)}, not {sorted(missing)}",
                "",
                "python -m eyas extract -p boundaries '[...]'",
            )
        boundaries = self.boundaries if boundaries is None else boundaries
        stored = self._readable(row, row, boundaries)
        mask = self._checked_mask(stored["loss_mask"], row)  # [T]
        if self.checks(boundaries) and id not in self._checked:
            if content_hash(stored) != row["content_hash"]:
                raise self._altered(row)
            self._checked.add(id)
        states = {b: stored[tensor_name(b)] for b in boundaries}  # [T, H] each
        if self.manifest["dtype"] == "float8_e4m3fn":
            states = {b: from_fp8(rows, stored[f"scale_{b}"]) for b, rows in states.items()}
        return Sample(
            row["id"],
            row["split"],
            row["category"],
            stored["input_ids"],
            mask,
            states,
            bool(row["truncated"]),
            row["topic"],
        )

    def checks(self, boundaries: tuple[int, ...]) -> bool:
        """Return whether a read of these boundaries compares the sample's content hash.

        The hash covers all boundaries, so a read of fewer cannot be compared without reading more.
        """
        return set(boundaries) == set(self.boundaries)

    def texts(self, ids: list[str]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield (id, input_ids int64 [T], loss_mask bool [T]) of each sample, shard by shard.

        Only ids and masks are read, each shard's once. Errors are those of `read`.
        """
        by_shard: dict[str, list[dict]] = {}
        for row in self.index.iloc[[self._place(id) for id in ids]].to_dict("records"):
            by_shard.setdefault(self._extracted(row)["shard"], []).append(row)
        for shard, rows in by_shard.items():
            first = min(row["offset"] for row in rows)
            end = max(row["offset"] + row["length"] for row in rows)
            span = {"shard": shard, "offset": first, "length": end - first}
            stored = self._readable(span, rows[0], ())
            for row in rows:
                start = row["offset"] - first
                place = slice(start, start + row["length"])
                mask = self._checked_mask(stored["loss_mask"][place], row)
                yield row["id"], stored["input_ids"][place], mask

    def _readable(self, span, row, boundaries: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """Return the stored tensors of a span that contains a sample's row; see `stored`."""
        try:
            return self.stored(span, boundaries)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise EyasError(
                f"{row['shard']}, which holds sample {row['id']!r}, cannot be read:"
                f" {type(error).__name__}",
                "a whole shard",
                self._repair,
            ) from None

    def _extracted(self, row):
        """Return the row. Raise EyasError if its sample is not extracted."""
        if row["state"] != "extracted":
            raise EyasError(
                f"sample {row['id']!r} was not extracted ({row['state']}: {row['reason']})",
                "",
                f"python -m eyas extract -p run_name {self.folder.parent.name}",
            )
        return row

    def _checked_mask(self, mask: torch.Tensor, row) -> torch.Tensor:
        """Return a stored mask, uint8 [T], as bool [T]. Raise EyasError if it is damaged."""
        if len(mask) != row["length"] or mask.max() > 1:
            raise self._altered(row)
        return mask.bool()

    def _altered(self, row) -> EyasError:
        return EyasError(
            f"{row['shard']}, which holds sample {row['id']!r}, is torn or altered",
            "as it was written",
            self._repair,
        )

    def stored(self, row, boundaries: tuple[int, ...] | None = None) -> dict[str, torch.Tensor]:
        """Return the stored tensors of an index row, without conversion."""
        shard = self._shards.get(row["shard"])
        if shard is None:
            shard = self._open_shard(row["shard"])
        span = slice(int(row["offset"]), int(row["offset"] + row["length"]))
        boundaries = self.boundaries if boundaries is None else boundaries
        names = tensor_names(boundaries, self.manifest["dtype"])
        return {name: shard.get_slice(name)[span] for name in names}

    def _open_shard(self, name: str) -> safe_open:
        """Map a shard, and close the oldest one if too many are mapped.

        What was read of a mapped file counts as memory of this process.
        """
        opened = list(self._shards)  # a copy, since several threads read
        if len(opened) >= OPEN_SHARDS:
            self._shards.pop(opened[0], None)
        shard = safe_open(self.folder / "shards" / name, framework="pt")
        self._shards[name] = shard
        return shard

    def head(self) -> Head:
        """Return the copied norm and head. Raise EyasError if they are missing, torn or altered."""
        weights = read_head(self.folder)
        if weights is None:
            raise EyasError(
                f"head.safetensors of run {self.folder.parent.name!r} is missing, torn or altered",
                "as it was written",
                "python -m eyas verify --repair",
            )
        kind = NormedHead if self.manifest.get("last_state") == "post-norm" else Head
        return kind(
            weights["norm_weight"].float(),
            weights["lm_head"].float(),
            self.manifest["target"]["rms_norm_eps"],
        )

    @property
    def head_hash(self) -> str:
        """Return the content hash of head.safetensors; empty if it is missing, torn or altered."""
        weights = read_head(self.folder)
        return content_hash(weights) if weights is not None else ""

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the shards on disk."""
        return sum(path.stat().st_size for path in (self.folder / "shards").glob("*.safetensors"))


class NormedHead(Head):
    """Replace `Head` where the last states are already normed, as in some imported stores."""

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """Return states [..., H], which are already normed, in float32."""
        return states.float()


def is_begun(folder: Path) -> bool:
    """Return whether a folder has any part of a store, with or without a manifest."""
    names = ("manifest.json", "index.parquet")
    return any((Path(folder) / name).is_file() for name in names) or _has_shards(folder)


def _has_shards(folder: Path) -> bool:
    return next((Path(folder) / "shards").glob("*.safetensors"), None) is not None


def lock_store(folder: Path) -> IO:
    """Make the folder of a store, lock it for writing and return the open lock file.

    Closing the file, or the end of the process, releases the lock. Raise EyasError if another
    process holds it, or if the folder is not writable.
    """
    folder = Path(folder)
    try:
        (folder / "shards").mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "w")
    except OSError as error:
        raise EyasError(
            f"the store of run {folder.parent.name!r} can't be written: {error.strerror}",
            "a folder that can be written",
            "set EYAS_DATA to one",
        ) from None
    return _flock(file, fcntl.LOCK_EX, folder.parent.name)


def lock_for_reading(folder: Path) -> IO | None:
    """Lock a store against writers and return the open lock file; closing it releases the lock.

    Return None if the store has no lock file or this process may not open it. Raise EyasError if
    another process is writing.
    """
    try:
        file = open(Path(folder) / ".lock")
    except OSError:
        return None
    return _flock(file, fcntl.LOCK_SH, Path(folder).parent.name)


def _flock(file: IO, kind: int, run_name: str) -> IO:
    """Lock an open file at once and return it. Raise EyasError if that fails."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise EyasError(
                f"another process is writing to the store of run {run_name!r}, or verifying it",
                "one at a time",
                "wait for it, or end it",
            ) from None
        raise EyasError(
            f"the store of run {run_name!r} can't be locked: {error.strerror}",
            "a file system that has locks",
            "set EYAS_DATA to a folder on one",
        ) from None
    return file


def read_manifest(folder: Path) -> dict:
    """Return the manifest. Raise StoreDamaged if it is not what was written."""
    try:
        manifest = read_json(Path(folder) / "manifest.json")
    except (ValueError, OSError):
        manifest = None
    if not is_sealed(manifest):
        if isinstance(manifest, dict) and manifest.get("format") == "eyas-store-1":
            return manifest  # that format had no seal; Store.open refuses it by its name
        raise StoreDamaged(
            f"manifest.json of run {Path(folder).parent.name!r} is missing, torn or altered",
            "as it was written",
            "python -m eyas verify --repair",
        )
    return manifest


def index_columns(manifest: dict) -> dict[str, str]:
    """Return COLUMNS, and for fp8 one more column a boundary.

    That column is the sample's median over tokens of |dequantised - exact| / |exact|.
    """
    if manifest["dtype"] != "float8_e4m3fn":
        return COLUMNS
    return COLUMNS | {f"fp8_error_{b}": "float64" for b in manifest["boundaries"]}


def write_index(folder: Path, rows: list[dict], manifest: dict) -> None:
    """Write index.parquet, with a hash of its rows and a copy of the manifest in its metadata."""
    columns = index_columns(manifest)
    frame = pd.DataFrame(rows, columns=list(columns)).astype(columns)
    table = pa.Table.from_pandas(frame, preserve_index=False)
    written = json.dumps({"rows": _rows_hash(frame), "manifest": manifest}).encode()
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), b"eyas": written})
    write_atomic(Path(folder) / "index.parquet", lambda p: pq.write_table(table, p))


def read_index(folder: Path) -> tuple[pd.DataFrame, dict | None]:
    """Return the rows of the index and its copy of the manifest.

    A store with neither index nor shards has no rows, and None in place of the copy. Raise
    StoreDamaged if the index is not what was written.
    """
    path = Path(folder) / "index.parquet"
    if not path.is_file() and not _has_shards(folder):
        return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in COLUMNS.items()}), None
    try:
        with open(path, "rb") as file:  # opened once: see files.read_parquet
            table = pq.read_table(file)
        frame = table.to_pandas()
        written = json.loads(table.schema.metadata[b"eyas"])
        whole = written["rows"] == _rows_hash(frame)
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        UnicodeError,
        OverflowError,
        MemoryError,
    ):
        whole = False
    if not whole:
        raise StoreDamaged(
            f"index.parquet of run {Path(folder).parent.name!r} is missing, torn or altered",
            "as it was written",
            "python -m eyas verify --repair",
        )
    return frame, written["manifest"]


def read_head(folder: Path) -> dict[str, torch.Tensor] | None:
    """Return the weights of head.safetensors, or None if they are not what was written."""
    try:
        with safe_open(Path(folder) / "head.safetensors", framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}
            written_hash = (file.metadata() or {}).get("content_hash")
    except (SafetensorError, OSError, ValueError):
        return None
    return weights if written_hash == content_hash(weights) else None


def rows_of_shard(path: Path) -> list[dict]:
    """Return the index rows in a shard's header; its data may be torn.

    Raise ValueError if the header is not what was written.
    """
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = file.read(size) if size <= path.stat().st_size else b""
        metadata = json.loads(header)["__metadata__"]
        rows = json.loads(metadata["rows"])
        rows_hash = xxhash.xxh3_128_hexdigest(metadata["rows"].encode())
        whole = rows_hash == metadata["rows_hash"]
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no header of a shard: {type(error).__name__}") from None
    if not whole:
        raise ValueError("its header is altered")
    return rows


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    folder = Path(folder)
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _rows_hash(frame: pd.DataFrame) -> str:
    columns = {name: frame[name].tolist() for name in frame}
    return xxhash.xxh3_128_hexdigest(json.dumps(columns, separators=(",", ":")).encode())


def index_row(columns: dict[str, str], **values) -> dict:
    """Return an index row with these values, and with empty values in the other columns."""
    empty = {"string": "", "int64": 0, "float64": float("nan"), "bool": False}
    return {name: empty[kind] for name, kind in columns.items()} | values
