"""Is a store complete and whole? `python -m eyas verify --profile P` reads every byte back; `--repair` has just what is broken made again.

Whether it is the *right thing* (serving's own states) is another question: `python -m eyas parity`.

What finds an altered byte: manifest.json and data_config.json carry a hash of their content, index.parquet a hash of its rows, each row the
content hash of its sample, each shard its rows of the index and a hash of them. A change that leaves all of them as they are is harmless by
construction: it is in white space of a JSON file, in bytes of the Parquet file that no value comes from, or in the zeros of a place whose sample is not there.
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
    """`checks`: (name, ok, detail), in the order in which they were made. `damaged`: sample id -> what is wrong with it. `extra`: files that are not the store's."""

    checks: list[tuple[str, bool, str]] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    foreign: bool = (
        False  # compared with another prompt set or tokenizer than the store was made from
    )

    @property
    def ok(self) -> bool:
        return all(ok for _, ok, _ in self.checks)

    def table(self) -> pd.DataFrame:
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
    """Read everything back; not `deep`: sizes and headers only. With the prompt set and the tokenizer, ids and masks are compared with what they should be,
    with the target's `head` the copied one.

    The report is kept beside the store, as verification.json, where that can be written. EyasError when there is no store, or somebody is writing to it.
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
    index = store.index
    done = index[index["state"] == "extracted"]
    states = index["state"].value_counts()
    doubled = sorted(set(index.loc[index["id"].duplicated(), "id"]))
    detail = (
        " + ".join(
            f"{states.get(state, 0)} {state}" for state in ("extracted", "failed", "pending")
        )
        + f" = {len(index)} rows"
    )
    if states.get("pending", 0):
        detail += "; pending ones come with the same extract again"
    report.checks.append(
        ("index", not doubled, detail + (f"; doubled: {doubled[:3]}" if doubled else ""))
    )
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


def _check_head(store: Store, head: Head | None) -> tuple[bool, str]:
    """Return whether head.safetensors is as written and, where the target's head is given, the target's own; and that in words."""
    weights, again = read_head(store.folder), "--repair has it written again"
    if weights is None:
        return False, f"missing, torn or altered: {again}"
    if head is None:
        return True, "final norm and head as written"
    own = {"norm_weight": head.norm_weight, "lm_head": head.lm_head}
    if all(torch.equal(weights[name].float(), own[name]) for name in own):
        return True, "final norm and head are the target's own"
    return False, f"final norm and head are not the target's: {again}"


def _keep(folder: Path, report: VerifyReport, deep: bool) -> None:
    checks = [
        {"check": name, "ok": bool(ok), "detail": detail} for name, ok, detail in report.checks
    ]
    with contextlib.suppress(OSError):  # a full or read-only disk changes nothing about the store
        write_json(
            folder / "verification.json",
            {
                "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "ok": report.ok,
                "deep": deep,
                "checks": checks,
                "damaged": report.damaged,
                "extra": report.extra,
            },
        )


def _expected(store: Store, prompts: PromptSet | None, tokenizer, report: VerifyReport) -> dict:
    """id -> Sample as the prompt set has it now. Nothing for an imported store, or when the manifest names another prompt set or tokenizer: that is no damage of samples."""
    manifest = store.manifest
    if prompts is None or tokenizer is None or manifest["prompts"]["hash"] is None:
        return {}
    for name, was, now in (
        ("prompt set", manifest["prompts"]["hash"], prompts.hash),
        ("tokenizer", manifest["tokenizer_hash"], tokenizer_hash(tokenizer)),
        ("chat template", manifest["template_hash"], template_hash(tokenizer)),
    ):
        report.checks.append(
            (
                name,
                was == now,
                "as in the manifest"
                if was == now
                else f"the manifest has {was[:12]}, it is {now[:12]} now",
            )
        )
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
    """The first thing that is wrong with a sample, or nothing."""
    dtype, width = getattr(torch, store.manifest["dtype"]), store.manifest["hidden_size"]
    stored = store.stored(row)
    ids, mask = stored["input_ids"], stored["loss_mask"]
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
    """Each shard has the length that the plan gave it and says of itself what the index says; no file is there that nobody planned."""
    names, width = (
        tensor_names(store.boundaries, store.manifest["dtype"]),
        store.manifest["hidden_size"],
    )
    counted_bytes = stored_bytes = 0
    planned: dict[str, list[dict]] = {}  # shard -> its rows of the index
    for row in store.index.to_dict("records"):
        if row["shard"]:
            planned.setdefault(row["shard"], []).append(row)
    for name, rows in sorted(planned.items()):
        path, done = (
            store.folder / "shards" / name,
            [row for row in rows if row["state"] == "extracted"],
        )
        counted_bytes += sum(row["length"] for row in done) * store.token_bytes
        if not done:
            continue
        tokens, what = sum(row["length"] for row in rows), ""
        try:
            with safe_open(path, framework="pt") as shard:
                shapes = {key: shard.get_slice(key).get_shape() for key in shard.keys()}
            described = {row["id"]: row for row in rows_of_shard(path)}
            if shapes != {
                key: [tokens, width] if key.startswith("boundary_") else [tokens] for key in names
            }:
                what = "has other tensors than the index says"
            elif _places(described.values()) != _places(rows) or any(
                described[row["id"]] != row for row in done
            ):
                what = "says other things of its samples than the index"  # it may say more, after a kill
            stored_bytes += path.stat().st_size
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            what = f"cannot be read: {type(error).__name__}"
        if what:
            report.damaged.update(
                {row["id"]: f"{name} {what}" for row in done if row["id"] not in report.damaged}
            )
    folder = store.folder / "shards"
    report.extra = (
        sorted(path.name for path in folder.iterdir() if path.name not in planned)
        if folder.is_dir()
        else []
    )
    detail = f"{counted_bytes:,} bytes of samples in {stored_bytes:,} bytes of shards"
    report.checks.append(
        (
            "files",
            not report.extra,
            detail + (f"; not the store's: {', '.join(report.extra[:5])}" if report.extra else ""),
        )
    )


def _places(rows) -> list[tuple]:
    """What a shard and the index say alike of every sample that was planned for it."""
    return sorted(
        (
            row["offset"],
            row["id"],
            row["split"],
            row["category"],
            row["topic"],
            row["shard"],
            row["length"],
        )
        for row in rows
    )


def _check_counts(store: Store, report: VerifyReport) -> None:
    path, want = store.folder / "data_config.json", counted(store)
    try:
        config = read_json(path)
    except (ValueError, OSError):
        config = None
    config = config if isinstance(config, dict) else {}
    wrong = [
        f"{name} is {config.get(name)}, should be {value}"
        for name, value in want.items()
        if config.get(name) != value
    ]
    if not is_sealed(config):
        wrong = ["missing, torn or altered"]
    report.checks.append(
        (
            "data_config.json",
            not wrong,
            "; ".join(wrong)
            or f"{want['total_samples']} samples, {want['total_tokens']:,} tokens, {want['bytes']:,} bytes",
        )
    )


def repair(folder: Path, report: VerifyReport) -> list[str]:
    """Put right what can be from the store itself, and mark the rest so that the next `extract` makes just that again. What was done, a line each.

    A manifest comes back from the index, an index from its shards, data_config.json from both. EyasError when manifest and index are both lost.
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
        if name not in planned:  # by now
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(
                missing_ok=True
            )
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
    rows, columns = {}, list(index_columns(manifest))
    for path in sorted((folder / "shards").glob("*.safetensors")):
        with contextlib.suppress(
            ValueError, KeyError, TypeError
        ):  # its samples are planned anew, after these
            found = {
                row["id"]: {name: row[name] for name in columns} for row in rows_of_shard(path)
            }
            if not found.keys() & rows.keys() and all(
                row["shard"] == path.name for row in found.values()
            ):  # else somebody's copy
                rows |= found
    return list(rows.values())
