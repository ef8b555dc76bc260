"""The store: hidden states of a data set on disk, whole or absent, opened in a moment.

    manifest.json         what these states are, written before any of them; a run with another manifest is refused
    head.safetensors      the target's final norm and head, so that logits can be recomputed without it
    shards/*.safetensors  boundary-major and unpadded: `boundary_<b>` [S, H], `input_ids` int64 [S], `loss_mask` uint8 [S]
                          (fp8 stores: `boundary_<b>` in e4m3 and `scale_<b>` float32 [S], a scale per token and boundary)
    index.parquet         a row a sample: COLUMNS below; extracted, failed (with the reason) or pending (still to come)
    data_config.json      the summary: samples, tokens, bytes, errors, rates

Every sample gets its place, shard and offset, before any data is there (`plan`), from the order and the lengths alone. So a
store that was killed, ran out of disk, lost samples and was mended ends with the very bytes of one that was left in peace. A place
whose sample is not there holds zeros. A shard is renamed to its final name before the index counts its samples, and the index is
replaced as a whole: a kill at any moment leaves an index that names only what is there. Each shard's metadata repeats its rows of
the index, with a hash of them, and the index repeats the manifest, so that either can be made again (`eyas.capture.verify`).
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
FP8, FP8_MAX = torch.float8_e4m3fn, 448.0
OPEN_SHARDS = 4  # of a reader


class StoreDamaged(EyasError):
    """The manifest or the index itself is missing, torn or altered."""


@dataclass(frozen=True)
class Planned:
    """One sample before it is extracted. `length_tok` 0: it will have no rows (refused before it was asked for). `topic` '': unknown."""

    id: str
    split: str
    category: str
    length_tok: int
    topic: str = ""


Rows = Sample  # the name that writers of a store still use


def to_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [T, H] -> (e4m3 [T, H], scale float32 [T]): each token's largest value becomes the largest of e4m3."""
    rows = rows.float()
    scale = (rows.abs().amax(dim=1) / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)  # [T]
    return (rows / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def from_fp8(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The other way, in bfloat16 [T, H]."""
    return (rows.float() * scale[:, None]).to(torch.bfloat16)


def content_hash(tensors: dict[str, torch.Tensor]) -> str:
    """xxh3-128 over a sample's tensors as they are stored, with name, dtype and shape: finds any altered byte (not an attacker)."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def tensor_names(boundaries: tuple[int, ...], dtype: str) -> list[str]:
    """The tensors of a shard."""
    names = ["input_ids", "loss_mask"] + [tensor_name(b) for b in boundaries]
    return names + [f"scale_{b}" for b in boundaries] if dtype == "float8_e4m3fn" else names


def token_bytes(n_boundaries: int, hidden_size: int, dtype: str) -> int:
    """Bytes of one token in a store: states, id and mask."""
    fp8 = dtype == "float8_e4m3fn"
    return n_boundaries * (hidden_size * getattr(torch, dtype).itemsize + 4 * fp8) + 8 + 1


class Store:
    """Open for reading. `index` is a DataFrame with the columns of COLUMNS, in the order of extraction."""

    def __init__(self, folder: Path, manifest: dict, index: pd.DataFrame):
        self.folder, self.manifest, self.index = Path(folder), manifest, index
        self.boundaries = tuple(manifest["boundaries"])
        self._row = {id: n for n, id in enumerate(index["id"])}
        self._shards: dict[str, safe_open] = {}
        self._mend = f"python -m eyas verify --repair -p run_name {self.folder.parent.name}"  # a mix of stores has several runs

    @classmethod
    def open(cls, folder: Path) -> "Store":
        """EyasError when there is no store, StoreDamaged when its manifest or index is missing, torn or altered."""
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
                f"manifest.json of run {folder.parent.name!r} is not the one that index.parquet was written with",
                "both of one store",
                f"put the right one back, or python -m eyas data rm {folder.parent.name}",
            )
        return cls(folder, manifest, index)

    @property
    def token_bytes(self) -> int:
        return token_bytes(
            len(self.boundaries), self.manifest["hidden_size"], self.manifest["dtype"]
        )

    @property
    def identity(self) -> str:
        """One hash for what the store is and holds: its manifest and its extracted samples, whatever their order."""
        done = self.index[self.index["state"] == "extracted"]
        return sha256_json([self.manifest, sorted(zip(done["id"], done["content_hash"]))])

    def samples(self, split: str | None = None) -> list[str]:
        """Ids of the extracted samples, in index order."""
        rows = self.index[self.index["state"] == "extracted"]
        return list(rows["id"] if split is None else rows.loc[rows["split"] == split, "id"])

    def row(self, id: str) -> pd.Series:
        return self.index.iloc[self._place(id)]

    def category(self, id: str) -> str:
        return self.row(id)["category"]

    def _place(self, id: str) -> int:
        if id not in self._row:
            raise EyasError(f"sample {id!r} is not in the store", "", "python -m eyas verify")
        return self._row[id]

    def read(self, id: str, boundaries: tuple[int, ...] | None = None) -> Sample:
        """Return one sample with its states at these boundaries, or at all that the store has.

        Only these bytes are read (memory map). fp8 states are returned in bfloat16. Raise EyasError
        for a sample or a boundary that the store does not have, or a shard that cannot be read.
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

    def texts(self, ids: list[str]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """(id, input_ids int64 [T], loss_mask bool [T]) of each of these samples, shard by shard: of each just ids and masks are read, once. Errors as in `read`."""
        by_shard: dict[str, list[dict]] = {}
        for row in self.index.iloc[[self._place(id) for id in ids]].to_dict("records"):
            by_shard.setdefault(self._extracted(row)["shard"], []).append(row)
        for members in by_shard.values():
            start, end = (
                min(row["offset"] for row in members),
                max(row["offset"] + row["length"] for row in members),
            )
            stored = self._readable(
                {"shard": members[0]["shard"], "offset": start, "length": end - start},
                members[0],
                (),
            )
            for row in members:
                place = slice(row["offset"] - start, row["offset"] - start + row["length"])
                yield (
                    row["id"],
                    stored["input_ids"][place],
                    self._checked_mask(stored["loss_mask"][place], row),
                )

    def _readable(self, span, row, boundaries: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """`stored` of a span of rows, for a sample that lies in it."""
        try:
            return self.stored(span, boundaries)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise EyasError(
                f"{row['shard']}, which holds sample {row['id']!r}, cannot be read: {type(error).__name__}",
                "a whole shard",
                self._mend,
            ) from None

    def _extracted(self, row):
        if row["state"] != "extracted":
            raise EyasError(
                f"sample {row['id']!r} was not extracted ({row['state']}: {row['reason']})",
                "",
                f"python -m eyas extract -p run_name {self.folder.parent.name}",
            )
        return row

    def _checked_mask(self, mask: torch.Tensor, row) -> torch.Tensor:
        """uint8 [T] as stored -> bool [T]."""
        if len(mask) != row["length"] or mask.max() > 1:
            raise EyasError(
                f"{row['shard']}, which holds sample {row['id']!r}, is torn or altered",
                "as it was written",
                self._mend,
            )
        return mask.bool()

    def stored(self, row, boundaries: tuple[int, ...] | None = None) -> dict[str, torch.Tensor]:
        """The tensors of an index row as they lie in its shard."""
        shard = self._shards.get(row["shard"])
        if shard is None:
            if len(opened := list(self._shards)) >= OPEN_SHARDS:  # a copy: several threads read
                self._shards.pop(
                    opened[0], None
                )  # what was read of it counts as this process's memory for as long as it is mapped
            shard = self._shards[row["shard"]] = safe_open(
                self.folder / "shards" / row["shard"], framework="pt"
            )
        span = slice(int(row["offset"]), int(row["offset"] + row["length"]))
        names = tensor_names(
            self.boundaries if boundaries is None else boundaries, self.manifest["dtype"]
        )
        return {name: shard.get_slice(name)[span] for name in names}

    def head(self) -> Head:
        """EyasError when it is missing, torn or altered."""
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
        """The content hash of head.safetensors as its bytes are; empty when it is missing, torn or altered."""
        weights = read_head(self.folder)
        return content_hash(weights) if weights is not None else ""

    @property
    def n_bytes(self) -> int:
        """Bytes that the shards take on the disk."""
        return sum(path.stat().st_size for path in (self.folder / "shards").glob("*.safetensors"))


class NormedHead(Head):
    """For last states that stand after the final norm already, as some imports have them."""

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """[..., H] after the final norm -> the same in float32."""
        return states.float()


def is_begun(folder: Path) -> bool:
    """Is there anything of a store, be it without its manifest?"""
    return any(
        (Path(folder) / name).is_file() for name in ("manifest.json", "index.parquet")
    ) or _has_shards(folder)


def _has_shards(folder: Path) -> bool:
    return next((Path(folder) / "shards").glob("*.safetensors"), None) is not None


def lock_store(folder: Path) -> IO:
    """The open lock file of a store, whose folder is made; closing it, or dying, gives it back. EyasError: held by another, or not writable."""
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
    """Keeps writers out while it is open; None where nobody ever wrote, or this process could not. EyasError: somebody is writing."""
    try:
        file = open(Path(folder) / ".lock")
    except OSError:
        return None
    return _flock(file, fcntl.LOCK_SH, Path(folder).parent.name)


def _flock(file: IO, kind: int, run_name: str) -> IO:
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
    """StoreDamaged when it is not what was written."""
    try:
        manifest = read_json(Path(folder) / "manifest.json")
    except (ValueError, OSError):
        manifest = None
    if not is_sealed(manifest):
        if isinstance(manifest, dict) and manifest.get("format") == "eyas-store-1":
            return manifest  # which had no seal; Store.open refuses it by its name
        raise StoreDamaged(
            f"manifest.json of run {Path(folder).parent.name!r} is missing, torn or altered",
            "as it was written",
            "python -m eyas verify --repair",
        )
    return manifest


def index_columns(manifest: dict) -> dict[str, str]:
    """COLUMNS, and for fp8 the error of each boundary: median over the sample's tokens of |dequantised - exact| / |exact|."""
    return COLUMNS | (
        {f"fp8_error_{b}": "float64" for b in manifest["boundaries"]}
        if manifest["dtype"] == "float8_e4m3fn"
        else {}
    )


def write_index(folder: Path, rows: list[dict], manifest: dict) -> None:
    """index.parquet, with a hash of its rows and a copy of the manifest in its metadata."""
    columns = index_columns(manifest)
    frame = pd.DataFrame(rows, columns=list(columns)).astype(columns)
    table = pa.Table.from_pandas(frame, preserve_index=False)
    table = table.replace_schema_metadata(
        {
            **(table.schema.metadata or {}),
            b"eyas": json.dumps({"rows": _rows_hash(frame), "manifest": manifest}).encode(),
        }
    )
    write_atomic(Path(folder) / "index.parquet", lambda p: pq.write_table(table, p))


def read_index(folder: Path) -> tuple[pd.DataFrame, dict | None]:
    """(rows, copy of the manifest); no rows where there is no index yet, and so no shard. StoreDamaged when it is not what was written."""
    path = Path(folder) / "index.parquet"
    if not path.is_file() and not _has_shards(folder):
        return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in COLUMNS.items()}), None
    try:
        with open(path, "rb") as file:  # once: see files.read_parquet
            table = pq.read_table(file)
        frame, written = table.to_pandas(), json.loads(table.schema.metadata[b"eyas"])
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
    """The weights of head.safetensors, or None when they are not what was written."""
    try:
        with safe_open(Path(folder) / "head.safetensors", framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}
            return (
                weights
                if (file.metadata() or {}).get("content_hash") == content_hash(weights)
                else None
            )
    except (SafetensorError, OSError, ValueError):
        return None


def rows_of_shard(path: Path) -> list[dict]:
    """What a shard says of its samples, from its header alone: its data may be torn. ValueError when the header is not what was written."""
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            metadata = json.loads(file.read(size) if size <= path.stat().st_size else b"")[
                "__metadata__"
            ]
        rows, whole = (
            json.loads(metadata["rows"]),
            xxhash.xxh3_128_hexdigest(metadata["rows"].encode()) == metadata["rows_hash"],
        )
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no header of a shard: {type(error).__name__}") from None
    if not whole:
        raise ValueError("its header is altered")
    return rows


def free_bytes(folder: Path) -> int:
    folder = Path(folder)
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _rows_hash(frame: pd.DataFrame) -> str:
    return xxhash.xxh3_128_hexdigest(
        json.dumps({name: frame[name].tolist() for name in frame}, separators=(",", ":")).encode()
    )


def index_row(columns: dict[str, str], **values) -> dict:
    empty = {"string": "", "int64": 0, "float64": float("nan"), "bool": False}
    return {name: empty[kind] for name, kind in columns.items()} | values
