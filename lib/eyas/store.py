"""The store: hidden states of a data set on disk, whole or absent, opened in a moment.

    manifest.json         what these states are, written before any of them; a run with another manifest is refused
    head.safetensors      the target's final norm and head, so that logits can be recomputed without it
    shards/*.safetensors  boundary-major and unpadded: `boundary_<b>` [S, H], `input_ids` int64 [S], `loss_mask` uint8 [S]
    index.parquet         a row a sample: COLUMNS below
    data_config.json      the summary: samples, tokens, bytes, errors, rates

A shard is renamed to its final name before the index counts its samples, and the index is replaced as a whole, so a
kill at any moment leaves a store whose index names only whole shards. An orphan shard is overwritten by the next one.
"""

import contextlib
import fcntl
import shutil
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eyas.errors import EyasError
from eyas.files import read_json, write_atomic, write_json
from eyas.target import Head

FORMAT = "eyas-store-1"
COLUMNS = {
    "id": "string", "split": "string", "category": "string", "state": "string", "reason": "string", "shard": "string", "offset": "int64",
    "length": "int64", "loss_tok": "int64", "content_hash": "string", "truncated": "bool",
}


@dataclass
class Rows:
    """One sample as it goes into a store. states: boundary -> [T, H]."""

    id: str
    split: str
    category: str
    input_ids: torch.Tensor  # int64 [T]
    loss_mask: torch.Tensor  # bool [T]
    states: dict[int, torch.Tensor]
    truncated: bool = False

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for t in self.states.values())


def content_hash(input_ids: torch.Tensor, loss_mask: torch.Tensor, states: dict[int, torch.Tensor]) -> str:
    """xxh3-128 over ids, mask and the states in ascending order of boundary: finds any altered byte (not an attacker)."""
    digest = xxhash.xxh3_128(input_ids.to(torch.int64).contiguous().numpy())
    digest.update(loss_mask.to(torch.uint8).contiguous().numpy())
    for b in sorted(states):
        digest.update(states[b].contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def head_hash(weights: dict[str, torch.Tensor]) -> str:
    """xxh3-128 over the weights of head.safetensors, which keeps it in its metadata."""
    digest = xxhash.xxh3_128()
    for name in sorted(weights):
        digest.update(weights[name].contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


class Store:
    """Open for reading. `index` is a DataFrame with the columns of COLUMNS, in the order of extraction."""

    def __init__(self, folder: Path, manifest: dict, index: pd.DataFrame):
        self.folder, self.manifest, self.index = Path(folder), manifest, index
        self.boundaries = tuple(manifest["boundaries"])
        self._row = {id: n for n, id in enumerate(index["id"])}
        self._shards: dict[str, safe_open] = {}

    @classmethod
    def open(cls, folder: Path) -> "Store":
        """EyasError when there is no store."""
        folder = Path(folder)
        if not (folder / "manifest.json").is_file():
            raise EyasError(f"no store at {folder.name!r} of run {folder.parent.name!r}", "a folder with manifest.json", "python -m eyas extract --profile demo")
        manifest = read_json(folder / "manifest.json")
        if manifest.get("format") != FORMAT:
            raise EyasError(f"the store's format is {manifest.get('format')!r}", FORMAT, "extract it again with this version")
        index = pd.read_parquet(folder / "index.parquet") if (folder / "index.parquet").is_file() else _empty_index()
        return cls(folder, manifest, index)

    def samples(self, split: str | None = None) -> list[str]:
        """Ids of the extracted samples, in index order."""
        rows = self.index[self.index["state"] == "extracted"]
        return list(rows["id"] if split is None else rows.loc[rows["split"] == split, "id"])

    def row(self, id: str) -> pd.Series:
        if id not in self._row:
            raise EyasError(f"sample {id!r} is not in the store", "", "python -m eyas verify")
        return self.index.iloc[self._row[id]]

    def read(self, id: str, boundaries: tuple[int, ...] | None = None) -> dict:
        """{"input_ids": int64 [T], "loss_mask": bool [T], "states": {b: [T, H]}}; only these bytes are read (memory map)."""
        row = self.row(id)
        if row["state"] != "extracted":
            raise EyasError(f"sample {id!r} was not extracted ({row['state']}: {row['reason']})", "", "python -m eyas extract")
        missing = set(boundaries or ()) - set(self.boundaries)
        if missing:
            raise EyasError(f"the store has boundaries {list(self.boundaries)}, not {sorted(missing)}", "", "python -m eyas extract -p boundaries '[...]'")
        shard = self._shards.get(row["shard"])
        if shard is None:
            shard = self._shards[row["shard"]] = safe_open(self.folder / "shards" / row["shard"], framework="pt")
        span = slice(int(row["offset"]), int(row["offset"] + row["length"]))
        mask = shard.get_slice("loss_mask")[span]  # [T]
        if len(mask) and mask.max() > 1:
            raise ValueError(f"the loss mask of {id} holds {int(mask.max())}")
        return {
            "input_ids": shard.get_slice("input_ids")[span],  # [T]
            "loss_mask": mask.bool(),  # [T]
            "states": {b: shard.get_slice(f"boundary_{b}")[span] for b in (self.boundaries if boundaries is None else boundaries)},  # [T, H] each
        }

    def head(self) -> Head:
        weights = load_file(self.folder / "head.safetensors")
        return Head(weights["norm_weight"].float(), weights["lm_head"].float(), self.manifest["target"]["rms_norm_eps"])

    @property
    def n_bytes(self) -> int:
        """Bytes that the shards take on the disk."""
        return sum(path.stat().st_size for path in (self.folder / "shards").glob("*.safetensors"))


class StoreWriter:
    """Adds samples to a store. One writer at a time (a lock file, gone with its process)."""

    def __init__(self, folder: Path, manifest: dict, head: Head, shard_bytes: int):
        self.folder, self.shard_bytes = Path(folder), shard_bytes
        (self.folder / "shards").mkdir(parents=True, exist_ok=True)
        self._lock = open(self.folder / ".lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EyasError(f"another process is writing to the store of run {self.folder.parent.name!r}", "one writer", "wait for it, or end it") from None
        manifest = {"format": FORMAT, **manifest}
        path = self.folder / "manifest.json"
        if path.is_file():
            differs = _differences(read_json(path), manifest)
            if differs:
                raise EyasError(
                    f"the store of run {self.folder.parent.name!r} was made with another {', '.join(differs)}", "the same",
                    "another run, e.g. -p run_name NAME, or remove the old store",
                )
        else:
            write_json(path, manifest)
        if not (self.folder / "head.safetensors").is_file():
            weights = {"norm_weight": _compact(head.norm_weight), "lm_head": _compact(head.lm_head)}
            write_atomic(self.folder / "head.safetensors", lambda p: save_file(weights, p, metadata={"content_hash": head_hash(weights)}))
        for leftover in [*self.folder.glob(".*.tmp"), *(self.folder / "shards").glob(".*.tmp")]:  # of a writer that was killed
            leftover.unlink()
        self.store = Store.open(self.folder)
        self._index = {row["id"]: row for row in self.store.index.to_dict("records")}
        self._open: list[Rows] = []
        used = [int(row["shard"].split(".")[0]) for row in self._index.values() if row["shard"]]
        self._next_shard = max(used, default=-1) + 1

    @property
    def extracted(self) -> set[str]:
        return {id for id, row in self._index.items() if row["state"] == "extracted"}

    def add(self, rows: Rows) -> bool:
        """True when this closed a shard, i.e. everything added so far is now counted and survives a kill."""
        self._open.append(rows)
        if sum(r.n_bytes for r in self._open) >= self.shard_bytes:
            self.flush()
            return True
        return False

    def fail(self, id: str, split: str, category: str, reason: str) -> None:
        self._index[id] = _index_row(id=id, split=split, category=category, state="failed", reason=reason)

    def mark_damaged(self, damaged: dict[str, str]) -> None:
        """Sample id -> what is wrong with it, so that the next extraction makes just these again."""
        for id, reason in damaged.items():
            self._index[id] |= {"state": "failed", "reason": reason}
        self.flush()

    def flush(self) -> None:
        """Close the open shard: data first, then the index that counts it."""
        if self._open:
            name = f"{self._next_shard:06d}.safetensors"
            tensors = {
                "input_ids": torch.cat([r.input_ids.to(torch.int64) for r in self._open]),  # [S]
                "loss_mask": torch.cat([r.loss_mask.to(torch.uint8) for r in self._open]),  # [S]
            }
            for b in self.store.boundaries:
                tensors[f"boundary_{b}"] = torch.cat([r.states[b] for r in self._open])  # [S, H]
            write_atomic(self.folder / "shards" / name, lambda p: save_file(tensors, p))
            offset = 0
            for r in self._open:
                self._index[r.id] = _index_row(
                    id=r.id, split=r.split, category=r.category, state="extracted", shard=name, offset=offset, length=len(r.input_ids),
                    loss_tok=int(r.loss_mask.sum()), content_hash=content_hash(r.input_ids, r.loss_mask, r.states), truncated=r.truncated,
                )
                offset += len(r.input_ids)
            self._open = []
            self._next_shard += 1
        index = pd.DataFrame(list(self._index.values()), columns=list(COLUMNS)).astype(COLUMNS)
        write_atomic(self.folder / "index.parquet", lambda p: index.to_parquet(p, index=False))

    def close(self) -> Store:
        self.flush()
        self.release()
        return Store.open(self.folder)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self._lock.close()


def free_bytes(folder: Path) -> int:
    folder = Path(folder)
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _index_row(**values) -> dict:
    return {"reason": "", "shard": "", "offset": 0, "length": 0, "loss_tok": 0, "content_hash": "", "truncated": False} | values


def _empty_index() -> pd.DataFrame:
    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in COLUMNS.items()})


def _compact(weight: torch.Tensor) -> torch.Tensor:
    """bf16 where that loses nothing."""
    small = weight.to(torch.bfloat16)
    return small.contiguous() if torch.equal(small.to(weight.dtype), weight) else weight.contiguous()


def _differences(old, new, prefix: str = "") -> list[str]:
    """Dotted names of the fields that differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [name for key in sorted({*old, *new}) for name in _differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)]
    return [] if old == new else [f"{prefix} ({_short(old)}, now {_short(new)})"]


def _short(value) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
