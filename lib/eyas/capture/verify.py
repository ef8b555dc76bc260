"""Verify that a store is complete and whole. `python -m eyas verify --profile P` reads every byte.

`--repair` marks what is broken, so that only that is made again. `python -m eyas parity` answers
the other question: whether the states are those of serving.

What finds an altered byte:

- manifest.json and data_config.json carry a hash of their content;
- index.parquet carries a hash of its rows, and each row the content hash of its sample;
- each shard carries its rows of the index, and a hash of them.

A change that leaves all of these as they are is harmless: it is in white space of a JSON file, in
bytes of the Parquet file that hold no value, or in the zeros in place of a missing sample.
"""

import contextlib
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open

from eyas.errors import EyasError
from eyas.files import is_sealed, read_json, write_json
from eyas.models.boundaries import tensor_name
from eyas.models.target import Head
from eyas.progress import Progress
from eyas.prompts.chat_template import encode, template_hash, tokenizer_hash
from eyas.prompts.prompt_set import PromptSet
from eyas.store.reader import (
    Store,
    StoreDamaged,
    content_hash,
    index_columns,
    lock_for_reading,
    lock_store,
    read_head,
    read_index,
    read_manifest,
    rows_of_shard,
    tensor_names,
    write_index,
)
from eyas.store.summary import counted, last_run, write_data_config


@dataclass
class VerifyReport:
    """Hold the result of a verification.

    checks: (name, ok, detail) in the order in which they were made.
    damaged: {sample id: what is wrong with it}.
    extra: files that are not the store's.
    foreign: the prompt set or the tokenizer is another than the store was made from.
    """

    checks: list[tuple[str, bool, str]] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    foreign: bool = False

    @property
    def ok(self) -> bool:
        """Return whether all checks passed."""
        return all(ok for _, ok, _ in self.checks)

    def table(self) -> pd.DataFrame:
        """Return one row a check."""
        return pd.DataFrame(self.checks, columns=["check", "ok", "detail"])

    def __str__(self) -> str:
        lines = [
            f"{'ok  ' if ok else 'FAIL'}  {name:22} {detail}" for name, ok, detail in self.checks
        ]
        lines += [f"      {id}: {what}" for id, what in list(self.damaged.items())[:20]]
        if len(self.damaged) > 20:
            lines.append(f"      ... and {len(self.damaged) - 20} more")
        return "\n".join(lines)


def verify(
    folder: Path,
    prompts: PromptSet | None = None,
    tokenizer=None,
    deep: bool = True,
    head: Head | None = None,
) -> VerifyReport:
    """Read the whole store and check it; if not `deep`, only sizes and headers.

    With the prompt set and the tokenizer, ids and masks are compared with what they should be. With
    the target's `head`, the copied one is compared with it. The report is written beside the store,
    as verification.json, if the folder is writable.

    Raise EyasError if there is no store, or if another process is writing to it.
    """
    with lock_for_reading(folder) or contextlib.nullcontext():
        return _verify(folder, prompts, tokenizer, deep, head)


def _verify(
    folder: Path, prompts: PromptSet | None, tokenizer, deep: bool, head: Head | None
) -> VerifyReport:
    report = VerifyReport()
    try:
        store = Store.open(folder)
    except StoreDamaged as error:
        report.checks.append((error.found.split(" ")[0], False, error.found))
        _keep(Path(folder), report, deep)
        return report
    done = store.index[store.index["state"] == "extracted"]
    _check_index(store.index, report)
    expected = _expected(store, prompts, tokenizer, report)
    report.checks.append(("head", *_check_head(store, head)))
    if deep:
        _read_samples(store, done, expected, report)
    _check_shards(store, report)
    bad = len(report.damaged)
    what = "shapes, dtype, finite, ids and mask, content hash" if deep else "sizes and headers only"
    report.checks.append(("samples", not bad, f"{len(done) - bad} of {len(done)} whole: {what}"))
    _check_counts(store, report)
    _keep(store.folder, report, deep)
    return report


def _check_index(index: pd.DataFrame, report: VerifyReport) -> None:
    """Check that no sample is in the index twice, and count its states."""
    counts = index["state"].value_counts()
    states = [f"{counts.get(state, 0)} {state}" for state in ("extracted", "failed", "pending")]
    detail = f"{' + '.join(states)} = {len(index)} rows"
    if counts.get("pending", 0):
        detail += "; the same extract again makes the pending ones"
    doubled = sorted(set(index.loc[index["id"].duplicated(), "id"]))
    if doubled:
        detail += f"; doubled: {doubled[:3]}"
    report.checks.append(("index", not doubled, detail))


def _check_head(store: Store, head: Head | None) -> tuple[bool, str]:
    """Return whether head.safetensors is as written, and that in words.

    If the target's head is given, it must equal that too.
    """
    again = "--repair has it written again"
    weights = read_head(store.folder)
    if weights is None:
        return False, f"missing, torn or altered: {again}"
    if head is None:
        return True, "final norm and head as written"
    own = {"norm_weight": head.norm_weight, "lm_head": head.lm_head}
    if all(torch.equal(weights[name].float(), own[name]) for name in own):
        return True, "final norm and head are the target's own"
    return False, f"final norm and head are not the target's: {again}"


def _keep(folder: Path, report: VerifyReport, deep: bool) -> None:
    """Write verification.json. A full or read-only disk is no fault of the store."""
    checks = [
        {"check": name, "ok": bool(ok), "detail": detail} for name, ok, detail in report.checks
    ]
    record = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ok": report.ok,
        "deep": deep,
        "checks": checks,
        "damaged": report.damaged,
        "extra": report.extra,
    }
    with contextlib.suppress(OSError):
        write_json(folder / "verification.json", record)


def _expected(store: Store, prompts: PromptSet | None, tokenizer, report: VerifyReport) -> dict:
    """Return {id: sample} as the prompt set gives it now.

    The result is empty for an imported store, and if the manifest names another prompt set or
    tokenizer: then the samples are not damaged.
    """
    manifest = store.manifest
    if prompts is None or tokenizer is None or manifest["prompts"]["hash"] is None:
        return {}
    for name, was, now in (
        ("prompt set", manifest["prompts"]["hash"], prompts.hash),
        ("tokenizer", manifest["tokenizer_hash"], tokenizer_hash(tokenizer)),
        ("chat template", manifest["template_hash"], template_hash(tokenizer)),
    ):
        detail = "as in the manifest"
        if was != now:
            detail = f"the manifest has {was[:12]}, it is {now[:12]} now"
        report.checks.append((name, was == now, detail))
    report.foreign = not all(ok for _, ok, _ in report.checks[-3:])
    if report.foreign:
        return {}
    wanted = set(store.samples())
    return {
        c.id: encode(c, tokenizer, manifest["prompts"]["max_length"])
        for c in prompts.conversations
        if c.id in wanted
    }


def _read_samples(store: Store, done: pd.DataFrame, expected: dict, report: VerifyReport) -> None:
    """Read every extracted sample, and record what is wrong with it."""
    with Progress(total=len(done)) as progress:
        for row in done.to_dict("records"):
            id = row["id"]
            try:
                what = _wrong(store, row, expected.get(id))
            except (SafetensorError, OSError, ValueError, IndexError, RuntimeError) as error:
                what = f"{row['shard']} cannot be read: {type(error).__name__}"
            if expected and id not in expected:
                what = "not in the prompt set"
            if what:
                report.damaged[id] = what
                progress.update(errors=1)
            else:
                progress.update(
                    samples=1, tok=row["length"], bytes=row["length"] * store.token_bytes
                )


def _wrong(store: Store, row: dict, expected) -> str:
    """Return the first thing that is wrong with a sample; empty if nothing is."""
    dtype = getattr(torch, store.manifest["dtype"])
    width = store.manifest["hidden_size"]
    stored = store.stored(row)
    ids = stored["input_ids"]
    mask = stored["loss_mask"]
    if len(ids) != row["length"]:
        return f"{len(ids)} tokens, the index says {row['length']}"
    for b in store.boundaries:
        rows = stored[tensor_name(b)]
        if tuple(rows.shape) != (row["length"], width) or rows.dtype != dtype:
            return f"boundary {b} is {tuple(rows.shape)} {rows.dtype}"
        if not torch.isfinite(rows.float()).all():
            return f"boundary {b} holds NaN or Inf"
    if content_hash(stored) != row["content_hash"]:
        return "altered: the content hash differs from the index"
    if int(mask.sum()) != row["loss_tok"]:
        return "the loss mask differs from the index"
    if expected is not None and not (
        np.array_equal(ids.numpy(), expected.input_ids)
        and np.array_equal(mask.numpy().astype(bool), expected.loss_mask)
    ):
        return "token ids or loss mask differ from the prompt set"
    return ""


def _check_shards(store: Store, report: VerifyReport) -> None:
    """Check that each shard has the planned length and repeats its rows of the index.

    Files that the index does not name are reported too.
    """
    counted_bytes = 0
    stored_bytes = 0
    planned: dict[str, list[dict]] = {}  # shard -> its rows of the index
    for row in store.index.to_dict("records"):
        if row["shard"]:
            planned.setdefault(row["shard"], []).append(row)
    for name, rows in sorted(planned.items()):
        done = [row for row in rows if row["state"] == "extracted"]
        counted_bytes += sum(row["length"] for row in done) * store.token_bytes
        if not done:
            continue
        path = store.folder / "shards" / name
        try:
            fault = _shard_fault(store, path, rows)
            stored_bytes += path.stat().st_size
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            fault = f"cannot be read: {type(error).__name__}"
        if fault:
            for row in done:
                report.damaged.setdefault(row["id"], f"{name} {fault}")
    folder = store.folder / "shards"
    files = folder.iterdir() if folder.is_dir() else ()
    report.extra = sorted(path.name for path in files if path.name not in planned)
    detail = f"{counted_bytes:,} bytes of samples in {stored_bytes:,} bytes of shards"
    if report.extra:
        detail += f"; not the store's: {', '.join(report.extra[:5])}"
    report.checks.append(("files", not report.extra, detail))


def _shard_fault(store: Store, path: Path, rows: list[dict]) -> str:
    """Return how a shard differs from its rows of the index; empty if it does not.

    After a kill, the shard may describe more extracted samples than the index.
    """
    n_tok = sum(row["length"] for row in rows)
    width = store.manifest["hidden_size"]
    shapes = {}
    for key in tensor_names(store.boundaries, store.manifest["dtype"]):
        shapes[key] = [n_tok, width] if key.startswith("boundary_") else [n_tok]
    with safe_open(path, framework="pt") as shard:
        stored_shapes = {key: shard.get_slice(key).get_shape() for key in shard.keys()}
    described = {row["id"]: row for row in rows_of_shard(path)}
    if stored_shapes != shapes:
        return "has other tensors than the index says"
    differs = _places(described.values()) != _places(rows) or any(
        described[row["id"]] != row for row in rows if row["state"] == "extracted"
    )
    return "says other things of its samples than the index" if differs else ""


def _places(rows) -> list[tuple]:
    """Return what a shard and the index must say alike of every planned sample."""
    columns = ("offset", "id", "split", "category", "topic", "shard", "length")
    return sorted(tuple(row[name] for name in columns) for row in rows)


def _check_counts(store: Store, report: VerifyReport) -> None:
    """Check that data_config.json says what the index says."""
    wanted = counted(store)
    try:
        config = read_json(store.folder / "data_config.json")
    except (ValueError, OSError):
        config = None
    config = config if isinstance(config, dict) else {}
    wrong = [
        f"{name} is {config.get(name)}, should be {value}"
        for name, value in wanted.items()
        if config.get(name) != value
    ]
    if not is_sealed(config):
        wrong = ["missing, torn or altered"]
    good = (
        f"{wanted['total_samples']} samples, {wanted['total_tokens']:,} tokens,"
        f" {wanted['bytes']:,} bytes"
    )
    report.checks.append(("data_config.json", not wrong, "; ".join(wrong) or good))


def repair(folder: Path, report: VerifyReport) -> list[str]:
    """Repair a store from itself, and mark the rest so that `extract` makes only that again.

    Return one line for each thing that was done. A manifest is rebuilt from the index, an index
    from its shards, data_config.json from both. Raise EyasError if manifest and index are both
    lost.
    """
    with lock_store(folder):
        return _repair(Path(folder), report)


def _repair(folder: Path, report: VerifyReport) -> list[str]:
    done = []
    try:
        manifest = read_manifest(folder)
    except StoreDamaged:
        try:
            manifest = read_index(folder)[1]
        except StoreDamaged:
            manifest = None
        if manifest is None:
            raise EyasError(
                "manifest.json and index.parquet are both torn or altered",
                "one of them whole",
                f"python -m eyas data rm {folder.parent.name} --yes, then python -m eyas extract",
            ) from None
        write_json(folder / "manifest.json", manifest)
        done.append("manifest.json: written again from the index")
    try:
        read_index(folder)
    except StoreDamaged:
        rows = _rows_of_shards(folder, manifest)
        write_index(folder, rows, manifest)
        done.append(f"index.parquet: made again from the shards, {len(rows)} samples")
    planned = set(read_index(folder)[0]["shard"])
    for name in report.extra:
        path = folder / "shards" / name
        if name in planned:  # since the verification
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        done.append(f"{name}: removed, nobody planned it")
    if any(name == "head" and not ok for name, ok, _ in report.checks):
        (folder / "head.safetensors").unlink(missing_ok=True)
        done.append("head.safetensors: removed, extract writes it again")
    store = Store.open(folder)
    if report.damaged:
        rows = store.index.to_dict("records")
        for row in rows:
            if row["id"] in report.damaged:
                row |= {"state": "pending", "reason": report.damaged[row["id"]]}
        write_index(folder, rows, manifest)
        done.append(f"{len(report.damaged)} samples: marked, extract makes just these again")
        store = Store.open(folder)
    write_data_config(store, last_run(folder))
    return done


def _rows_of_shards(folder: Path, manifest: dict) -> list[dict]:
    """Return the index rows that the shards repeat.

    The samples of a shard with a torn header are planned again, after these.
    """
    rows = {}
    columns = list(index_columns(manifest))
    for path in sorted((folder / "shards").glob("*.safetensors")):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            of_shard = {}
            for row in rows_of_shard(path):
                of_shard[row["id"]] = {name: row[name] for name in columns}
            # A file with rows of another shard is a copy that somebody made.
            is_copy = any(row["shard"] != path.name for row in of_shard.values())
            if not is_copy and not of_shard.keys() & rows.keys():
                rows |= of_shard
    return list(rows.values())
