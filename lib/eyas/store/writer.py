"""Write a store: every sample gets its place first, and a kill at any moment leaves a whole store. The layout: `eyas.store.reader`."""

import itertools
import json
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError

from eyas.errors import EyasError
from eyas.files import seal, write_json, write_safetensors
from eyas.models.boundaries import tensor_name
from eyas.models.target import Head
from eyas.store.reader import (
    FORMAT,
    Planned,
    Rows,
    Store,
    content_hash,
    from_fp8,
    index_columns,
    index_row,
    is_begun,
    lock_store,
    read_head,
    read_manifest,
    tensor_names,
    to_fp8,
    write_index,
)

WRITING = 2  # shards at a time


class StoreWriter:
    """Adds samples to a store. One writer at a time (a lock file, gone with its process).

    Shards are written in threads of their own, two at a time: one waits for the disk, one is copied, and a third is filled meanwhile. An error there
    comes out of a later call (OSError when the disk is full).
    """

    def __init__(self, folder: Path, manifest: dict, head: Head, shard_bytes: int):
        self.folder, self.shard_bytes = Path(folder), shard_bytes
        self._lock_file = lock_store(self.folder)
        try:
            self._open(manifest, head)
        except BaseException:
            self._lock_file.close()
            raise

    def _open(self, manifest: dict, head: Head) -> None:
        for folder in (
            self.folder,
            self.folder / "shards",
        ):  # hidden files are of a writer that was killed
            for leftover in folder.glob(".*"):
                if leftover.name != ".lock" and not leftover.is_dir():
                    leftover.unlink()
        manifest = seal({"format": FORMAT, **manifest})
        if is_begun(self.folder):
            differs = _differences(read_manifest(self.folder), manifest)
            if differs:
                raise EyasError(
                    f"the store of run {self.folder.parent.name!r} was made with another {', '.join(differs)}",
                    "the same",
                    f"another run, e.g. -p run_name NAME, or python -m eyas data rm {self.folder.parent.name}",
                )
        else:
            write_json(self.folder / "manifest.json", manifest)
        if read_head(self.folder) is None:
            weights = {"norm_weight": _compact(head.norm_weight), "lm_head": _compact(head.lm_head)}
            write_safetensors(
                self.folder / "head.safetensors", weights, {"content_hash": content_hash(weights)}
            )
        self.store = Store.open(self.folder)
        self._dtype, self._fp8 = (
            getattr(torch, manifest["dtype"]),
            manifest["dtype"] == "float8_e4m3fn",
        )
        self._columns = index_columns(manifest)
        self._index = {row["id"]: row for row in self.store.index.to_dict("records")}
        self._lock = threading.Lock()  # of _index, which the writing thread changes
        self._members: dict[str, list[str]] = {}  # shard -> its samples, by offset
        for row in self._index.values():
            if row["shard"]:
                self._members.setdefault(row["shard"], []).append(row["id"])
        for ids in self._members.values():
            ids.sort(key=lambda id: self._index[id]["offset"])
        self._awaited: dict[
            str, set[str]
        ] = {}  # shard -> samples that this run will still add or fail
        self._held: dict[str, dict[str, dict]] = {}  # shard -> id -> what is to be written
        self._index_lock = (
            threading.Lock()
        )  # of index.parquet: an older picture never replaces a newer one
        self._threads = ThreadPoolExecutor(WRITING, "eyas-store")
        self._writing: deque[Future] = deque()

    @property
    def extracted(self) -> set[str]:
        with self._lock:
            return {id for id, row in self._index.items() if row["state"] == "extracted"}

    def plan(self, samples: list[Planned], retry_failed: bool = False) -> list[str]:
        """Give each new sample its place and say so in the index. Ids that this run has to `add` or `fail`, in order."""
        per_token = self.store.token_bytes
        taken = {int(name.split(".")[0]) for name in self._members}
        numbers = (
            n for n in itertools.count() if n not in taken
        )  # a lost shard's number is taken again
        shard, filled = None, 0
        for sample in samples:
            row = self._index.get(sample.id)
            if row is not None and row["length"] not in (0, sample.length_tok):
                raise EyasError(
                    f"sample {sample.id!r} has {sample.length_tok} tokens, the store planned {row['length']}",
                    "the same prompt set and template",
                    "another run: -p run_name NAME",
                )
            if row is not None and (row["shard"] or not sample.length_tok):
                continue
            place = {"shard": "", "offset": 0, "length": 0}
            if sample.length_tok:
                if shard is None or filled * per_token >= self.shard_bytes:
                    shard, filled = f"{next(numbers):06d}.safetensors", 0
                    self._members[shard] = []
                place = {"shard": shard, "offset": filled, "length": sample.length_tok}
                self._members[shard].append(sample.id)
                filled += sample.length_tok
            said = {
                "id": sample.id,
                "split": sample.split,
                "category": sample.category,
                "topic": sample.topic,
            }
            self._index[sample.id] = index_row(self._columns, state="pending", **said, **place)
        wanted = ("pending", "failed") if retry_failed else ("pending",)
        todo = [s.id for s in samples if self._index[s.id]["state"] in wanted]
        for id in todo:
            self._awaited.setdefault(self._index[id]["shard"], set()).add(id)
        self._write_index()
        return todo

    def add(self, rows: Rows) -> None:
        """A planned sample. Its shard is written when all of its samples that this run tries have come."""
        row = self._index[rows.id]
        if not len(rows.input_ids) == row["length"] > 0:
            raise ValueError(
                f"{rows.id} has {len(rows.input_ids)} tokens, planned were {row['length']}"
            )
        stored = {
            "input_ids": rows.input_ids.to(torch.int64),
            "loss_mask": rows.loss_mask.to(torch.uint8),
        }  # [T] each
        found = {
            "state": "extracted",
            "reason": "",
            "loss_tok": int(rows.loss_mask.sum()),
            "truncated": rows.truncated,
        }
        for b in self.store.boundaries:
            states = rows.states[b]  # [T, H]
            if tuple(states.shape) != (row["length"], self.store.manifest["hidden_size"]) or not (
                self._fp8 or states.dtype == self._dtype
            ):
                raise ValueError(
                    f"boundary {b} of {rows.id} is {tuple(states.shape)} {states.dtype}"
                )
            if self._fp8:
                stored[tensor_name(b)], stored[f"scale_{b}"] = to_fp8(states)
                error = (
                    from_fp8(stored[tensor_name(b)], stored[f"scale_{b}"]).float() - states.float()
                )
                found[f"fp8_error_{b}"] = float(
                    (error.norm(dim=1) / states.float().norm(dim=1).clamp(min=1e-30)).median()
                )
            else:
                stored[tensor_name(b)] = states
        found["content_hash"] = content_hash(stored)
        self._held.setdefault(row["shard"], {})[rows.id] = {"tensors": stored, "row": found}
        self._settle(row["shard"], rows.id)

    def fail(self, id: str, reason: str, again: bool = False) -> None:
        """A planned sample that can't be had. `again`: the fault was not its own, the same command tries it again."""
        with self._lock:
            self._index[id] |= {"state": "pending" if again else "failed", "reason": reason}
        self._settle(self._index[id]["shard"], id)

    def _settle(self, shard: str, id: str) -> None:
        awaited = self._awaited.get(shard, set())
        awaited.discard(id)
        if not awaited and shard in self._held:
            self._submit(shard)

    def _submit(self, shard: str) -> None:
        self._wait(WRITING - 1)
        self._writing.append(self._threads.submit(self._write_shard, shard, self._held.pop(shard)))

    def _wait(self, left: int = 0) -> None:
        """Until at most `left` shards are being written. One that failed stays first, so that every later call says so too."""
        while len(self._writing) > left:
            self._writing[0].result()
            self._writing.popleft()

    def _write_shard(self, shard: str, held: dict[str, dict]) -> None:
        """Data first, then the index that counts it. What the shard has already stays, what it lacks is zeros."""
        names = tensor_names(self.store.boundaries, self.store.manifest["dtype"])
        with self._lock:
            rows = [dict(self._index[id]) for id in self._members[shard]]
        pieces = {name: [] for name in names}
        old = Store(self.folder, self.store.manifest, self.store.index)
        for row in rows:
            if row["id"] in held:
                row |= held[row["id"]]["row"]
                tensors = held[row["id"]]["tensors"]
            else:
                tensors = _kept(old, row)
            for name in names:
                pieces[name].append(tensors[name] if tensors else self._zeros(name, row["length"]))
        place = ("id", "split", "category", "topic", "shard", "offset", "length")
        described = [
            row
            if row["state"] == "extracted"
            else index_row(self._columns, state="pending", **{name: row[name] for name in place})
            for row in rows
        ]
        text = json.dumps(described, separators=(",", ":"))
        write_safetensors(
            self.folder / "shards" / shard,
            pieces,
            {"rows": text, "rows_hash": xxhash.xxh3_128_hexdigest(text.encode())},
        )
        with self._lock:
            for row in rows:
                self._index[row["id"]] = row
        self._write_index()

    def _zeros(self, name: str, length: int) -> torch.Tensor:
        if name == "input_ids":
            return torch.zeros(length, dtype=torch.int64)
        if name == "loss_mask":
            return torch.zeros(length, dtype=torch.uint8)
        if name.startswith("scale_"):
            return torch.zeros(length, dtype=torch.float32)
        return torch.zeros(length, self.store.manifest["hidden_size"], dtype=self._dtype)

    def _write_index(self) -> None:
        with self._index_lock:
            with self._lock:
                rows = list(self._index.values())
            write_index(self.folder, rows, self.store.manifest)

    def flush(self) -> None:
        """Write what is held, also shards that are not complete yet; afterwards all of it is counted and survives a kill."""
        for shard in list(self._held):
            self._submit(shard)
        self._wait()
        self._write_index()

    def close(self) -> Store:
        self.flush()
        self.release()
        return Store.open(self.folder)

    def release(self) -> None:
        """Give the lock back, whatever state this is in."""
        self._threads.shutdown(wait=True)
        self._lock_file.close()


def _kept(store: Store, row: dict) -> dict[str, torch.Tensor] | None:
    """What a shard that is written anew keeps of a sample; a damaged one is marked, to be made again."""
    if row["state"] != "extracted":
        return None
    try:
        tensors = store.stored(row)
        if content_hash(tensors) == row["content_hash"]:
            return tensors
    except (SafetensorError, OSError, ValueError, RuntimeError):
        pass
    row |= {"state": "pending", "reason": "damaged"}
    return None


def _compact(weight: torch.Tensor) -> torch.Tensor:
    """bf16 where that loses nothing."""
    small = weight.to(torch.bfloat16)
    return (
        small.contiguous() if torch.equal(small.to(weight.dtype), weight) else weight.contiguous()
    )


def _differences(old, new, prefix: str = "") -> list[str]:
    """Dotted names of the fields that differ. mem_fraction_static, of older manifests, leaves what is captured as it is."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted({*old, *new} - {"content_hash", "mem_fraction_static"})
        return [
            name
            for key in keys
            for name in _differences(
                old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key
            )
        ]
    return [] if old == new else [f"{prefix} ({_short(old)}, now {_short(new)})"]


def _short(value) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
