"""Write a store. `eyas.store.reader` describes its layout.

Every sample gets its place before any data exist. A kill at any moment leaves a whole store.
"""

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

WRITING = 2  # shards that are written at a time


class StoreWriter:
    """Add samples to a store. A lock file allows one writer at a time; its process holds it.

    Shards are written in two threads: while one waits for the disk, another is copied and a third
    is filled. An error in a thread is raised by a later call (OSError if the disk is full).
    """

    def __init__(self, folder: Path, manifest: dict, head: Head, shard_bytes: int):
        self.folder = Path(folder)
        self.shard_bytes = shard_bytes
        self._lock_file = lock_store(self.folder)
        try:
            self._open(manifest, head)
        except BaseException:
            self._lock_file.close()
            raise

    def _open(self, manifest: dict, head: Head) -> None:
        self._remove_leftovers()
        manifest = seal({"format": FORMAT, **manifest})
        self._write_or_check(manifest)
        if read_head(self.folder) is None:
            weights = {"norm_weight": _compact(head.norm_weight), "lm_head": _compact(head.lm_head)}
            metadata = {"content_hash": content_hash(weights)}
            write_safetensors(self.folder / "head.safetensors", weights, metadata)
        self.store = Store.open(self.folder)
        self._dtype = getattr(torch, manifest["dtype"])
        self._fp8 = manifest["dtype"] == "float8_e4m3fn"
        self._columns = index_columns(manifest)
        self._index = {row["id"]: row for row in self.store.index.to_dict("records")}
        self._lock = threading.Lock()  # guards _index, which the writing threads change
        self._members = self._members_by_shard()  # shard -> its samples, by offset
        # shard -> samples that this run will still add or fail
        self._awaited: dict[str, set[str]] = {}
        self._held: dict[str, dict[str, dict]] = {}  # shard -> id -> what is to be written
        # guards index.parquet: an older version never replaces a newer one
        self._index_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(WRITING, "eyas-store")
        self._writing: deque[Future] = deque()

    def _remove_leftovers(self) -> None:
        """Remove the hidden files of a writer that was killed."""
        for folder in (self.folder, self.folder / "shards"):
            for leftover in folder.glob(".*"):
                if leftover.name != ".lock" and not leftover.is_dir():
                    leftover.unlink()

    def _write_or_check(self, manifest: dict) -> None:
        """Write the manifest of a new store. Raise EyasError if an old store has another one."""
        if not is_begun(self.folder):
            write_json(self.folder / "manifest.json", manifest)
            return
        differs = _differences(read_manifest(self.folder), manifest)
        if differs:
            run_name = self.folder.parent.name
            raise EyasError(
                f"the store of run {run_name!r} was made with another {', '.join(differs)}",
                "the same",
                f"another run, e.g. -p run_name NAME, or python -m eyas data rm {run_name}",
            )

    def _members_by_shard(self) -> dict[str, list[str]]:
        """Return {shard: its sample ids in the order of their offsets}."""
        members: dict[str, list[str]] = {}
        for row in self._index.values():
            if row["shard"]:
                members.setdefault(row["shard"], []).append(row["id"])
        for ids in members.values():
            ids.sort(key=lambda id: self._index[id]["offset"])
        return members

    @property
    def extracted(self) -> set[str]:
        """Return the ids of the extracted samples."""
        with self._lock:
            return {id for id, row in self._index.items() if row["state"] == "extracted"}

    def plan(self, samples: list[Planned], retry_failed: bool = False) -> list[str]:
        """Give each new sample its place and write the index.

        Return the ids, in order, that this run has to `add` or to `fail`. Raise EyasError if a
        sample has another length than the store planned.
        """
        per_token = self.store.token_bytes
        taken = {int(name.split(".")[0]) for name in self._members}
        # The number of a lost shard is used again.
        free_numbers = (n for n in itertools.count() if n not in taken)
        shard = None
        filled_tok = 0
        for sample in samples:
            row = self._index.get(sample.id)
            if row is not None and row["length"] not in (0, sample.length_tok):
                raise EyasError(
                    f"sample {sample.id!r} has {sample.length_tok} tokens,"
                    f" the store planned {row['length']}",
                    "the same prompt set and template",
                    "another run: -p run_name NAME",
                )
            if row is not None and (row["shard"] or not sample.length_tok):
                continue
            place = {"shard": "", "offset": 0, "length": 0}
            if sample.length_tok:
                if shard is None or filled_tok * per_token >= self.shard_bytes:
                    shard = f"{next(free_numbers):06d}.safetensors"
                    filled_tok = 0
                    self._members[shard] = []
                place = {"shard": shard, "offset": filled_tok, "length": sample.length_tok}
                self._members[shard].append(sample.id)
                filled_tok += sample.length_tok
            description = {
                "id": sample.id,
                "split": sample.split,
                "category": sample.category,
                "topic": sample.topic,
            }
            self._index[sample.id] = index_row(
                self._columns, state="pending", **description, **place
            )
        wanted = ("pending", "failed") if retry_failed else ("pending",)
        todo = [s.id for s in samples if self._index[s.id]["state"] in wanted]
        for id in todo:
            self._awaited.setdefault(self._index[id]["shard"], set()).add(id)
        self._write_index()
        return todo

    def add(self, rows: Rows) -> None:
        """Add a planned sample.

        Its shard is written once all of its samples that this run tries are added or failed.
        """
        row = self._index[rows.id]
        if not len(rows.input_ids) == row["length"] > 0:
            raise ValueError(
                f"{rows.id} has {len(rows.input_ids)} tokens, planned were {row['length']}"
            )
        stored = {
            "input_ids": rows.input_ids.to(torch.int64),  # [T]
            "loss_mask": rows.loss_mask.to(torch.uint8),  # [T]
        }
        columns = {
            "state": "extracted",
            "reason": "",
            "loss_tok": int(rows.loss_mask.sum()),
            "truncated": rows.truncated,
        }
        for b in self.store.boundaries:
            states = rows.states[b]  # [T, H]
            self._check_states(rows.id, b, states, row["length"])
            if not self._fp8:
                stored[tensor_name(b)] = states
                continue
            codes, scale = to_fp8(states)
            stored[tensor_name(b)] = codes
            stored[f"scale_{b}"] = scale
            columns[f"fp8_error_{b}"] = _fp8_error(states, codes, scale)
        columns["content_hash"] = content_hash(stored)
        held = {"tensors": stored, "row": columns}
        self._held.setdefault(row["shard"], {})[rows.id] = held
        self._settle(row["shard"], rows.id)

    def _check_states(self, id: str, b: int, states: torch.Tensor, n_tok: int) -> None:
        """Raise ValueError unless states are [n_tok, H] in the store's dtype."""
        shape = (n_tok, self.store.manifest["hidden_size"])
        right_dtype = self._fp8 or states.dtype == self._dtype
        if tuple(states.shape) != shape or not right_dtype:
            raise ValueError(f"boundary {b} of {id} is {tuple(states.shape)} {states.dtype}")

    def fail(self, id: str, reason: str, again: bool = False) -> None:
        """Record that a planned sample cannot be extracted.

        `again`: the fault was not the sample's own, so the same command tries it again.
        """
        with self._lock:
            self._index[id] |= {"state": "pending" if again else "failed", "reason": reason}
        self._settle(self._index[id]["shard"], id)

    def _settle(self, shard: str, id: str) -> None:
        """Stop waiting for a sample; write its shard if it was the last one."""
        awaited = self._awaited.get(shard, set())
        awaited.discard(id)
        if not awaited and shard in self._held:
            self._submit(shard)

    def _submit(self, shard: str) -> None:
        self._wait(WRITING - 1)
        self._writing.append(self._threads.submit(self._write_shard, shard, self._held.pop(shard)))

    def _wait(self, left: int = 0) -> None:
        """Wait until at most `left` shards are being written.

        A shard that failed stays first in the queue, so that every later call raises its error.
        """
        while len(self._writing) > left:
            self._writing[0].result()
            self._writing.popleft()

    def _write_shard(self, shard: str, held: dict[str, dict]) -> None:
        """Write a shard, and then the index that counts its samples.

        Samples that the shard has already are kept. Missing samples are zeros.
        """
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
        text = json.dumps([self._described(row) for row in rows], separators=(",", ":"))
        metadata = {"rows": text, "rows_hash": xxhash.xxh3_128_hexdigest(text.encode())}
        write_safetensors(self.folder / "shards" / shard, pieces, metadata)
        with self._lock:
            for row in rows:
                self._index[row["id"]] = row
        self._write_index()

    def _described(self, row: dict) -> dict:
        """Return an index row as the shard's metadata has it.

        Samples that are not extracted only have their place, so that the shard's bytes do not
        depend on what failed before.
        """
        if row["state"] == "extracted":
            return row
        place = ("id", "split", "category", "topic", "shard", "offset", "length")
        return index_row(self._columns, state="pending", **{name: row[name] for name in place})

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
        """Write all added samples, also into shards that are not complete yet.

        Afterwards the index counts them, and they survive a kill.
        """
        for shard in list(self._held):
            self._submit(shard)
        self._wait()
        self._write_index()

    def close(self) -> Store:
        """Write all added samples, release the lock and open the store."""
        self.flush()
        self.release()
        return Store.open(self.folder)

    def release(self) -> None:
        """Release the lock, in whatever state the writer is."""
        self._threads.shutdown(wait=True)
        self._lock_file.close()


def _kept(store: Store, row: dict) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a sample in a shard that is written again; None if it has none.

    A damaged sample becomes pending, so that it is extracted again.
    """
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


def _fp8_error(states: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> float:
    """Return the median over tokens of |dequantised - exact| / |exact| (L2) of states [T, H]."""
    exact = states.float()
    error = from_fp8(codes, scale).float() - exact
    return float((error.norm(dim=1) / exact.norm(dim=1).clamp(min=1e-30)).median())


def _compact(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight in bfloat16 if that loses nothing, otherwise unchanged."""
    small = weight.to(torch.bfloat16)
    if torch.equal(small.to(weight.dtype), weight):
        return small.contiguous()
    return weight.contiguous()


def _differences(old, new, prefix: str = "") -> list[str]:
    """Return the dotted names of the fields that differ, with both values.

    mem_fraction_static, which older manifests have, does not change what is captured.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        names = []
        for key in sorted({*old, *new} - {"content_hash", "mem_fraction_static"}):
            dotted = f"{prefix}.{key}" if prefix else key
            names += _differences(old.get(key), new.get(key), dotted)
        return names
    return [] if old == new else [f"{prefix} ({_short(old)}, now {_short(new)})"]


def _short(value) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
