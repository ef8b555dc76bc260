"""Is a store complete and whole? `python -m eyas verify --profile P` reads every byte back; `--mend` has the damaged samples made again.

Whether it is the *right thing* (serving's own states) is another question: see eyas.parity when it is there.
"""

from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open

from eyas.files import read_json
from eyas.progress import Progress
from eyas.prompts import PromptSet, encode, template_hash, tokenizer_hash
from eyas.store import Store, StoreWriter, content_hash, head_hash


@dataclass
class VerifyReport:
    """`checks`: (name, ok, detail), in the order in which they were made. `damaged`: sample id -> what is wrong with it."""

    checks: list[tuple[str, bool, str]] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(ok for _, ok, _ in self.checks)

    def table(self) -> pd.DataFrame:
        return pd.DataFrame(self.checks, columns=["check", "ok", "detail"])

    def __str__(self) -> str:
        lines = [f"{'ok  ' if ok else 'FAIL'}  {name:22} {detail}" for name, ok, detail in self.checks]
        lines += [f"      {id}: {what}" for id, what in list(self.damaged.items())[:20]]
        if len(self.damaged) > 20:
            lines.append(f"      ... and {len(self.damaged) - 20} more")
        return "\n".join(lines)


def verify(store: Store, prompts: PromptSet | None = None, tokenizer=None) -> VerifyReport:
    """Read everything back. With the prompt set and the tokenizer, token ids and masks are compared with what they should be."""
    report = VerifyReport()
    index = store.index
    done = index[index["state"] == "extracted"]
    failed = int((index["state"] == "failed").sum())
    doubled = sorted(set(index.loc[index["id"].duplicated(), "id"]))
    report.checks.append(("index", not doubled, f"{len(done)} extracted + {failed} failed = {len(index)} rows" + (f"; doubled: {doubled[:3]}" if doubled else "")))
    _check_head(store, report)
    expected = _expected(store, prompts, tokenizer, report)
    _read_samples(store, done, expected, report)
    bad = len(report.damaged)
    report.checks.append(("samples", not bad, f"{len(done) - bad} of {len(done)} whole: shapes, dtype, finite, ids and mask, content hash"))
    _check_counts(store, done, failed, report)
    return report


def _expected(store: Store, prompts: PromptSet | None, tokenizer, report: VerifyReport) -> dict:
    """id -> Sample as the prompt set has it now; the manifest must name this very prompt set and tokenizer."""
    if prompts is None or tokenizer is None:
        return {}
    manifest = store.manifest
    for name, was, now in (
        ("prompt set", manifest["prompts"]["hash"], prompts.hash),
        ("tokenizer", manifest["tokenizer_hash"], tokenizer_hash(tokenizer)),
        ("chat template", manifest["template_hash"], template_hash(tokenizer)),
    ):
        report.checks.append((name, was == now, "as in the manifest" if was == now else f"the manifest has {was[:12]}, it is {now[:12]} now"))
    wanted = set(store.samples())
    return {c.id: encode(c, tokenizer, manifest["prompts"]["max_length"]) for c in prompts.conversations if c.id in wanted}


def _read_samples(store: Store, done: pd.DataFrame, expected: dict, report: VerifyReport) -> None:
    dtype, width = getattr(torch, store.manifest["dtype"]), store.manifest["hidden_size"]
    with Progress(total=len(done)) as progress:
        for row in done.to_dict("records"):
            id = row["id"]
            try:
                sample = store.read(id)
            except (SafetensorError, OSError, ValueError, IndexError, RuntimeError) as error:
                report.damaged[id] = f"{row['shard']} cannot be read: {type(error).__name__}"
                progress.update(errors=1)
                continue
            what = _wrong(sample, row, expected.get(id), dtype, width)
            if expected and id not in expected:
                what = "not in the prompt set"
            if what:
                report.damaged[id] = what
            progress.update(samples=1, tok=row["length"], bytes=sum(t.nbytes for t in sample["states"].values()))


def _wrong(sample: dict, row: dict, expected, dtype: torch.dtype, width: int) -> str:
    """The first thing that is wrong with a sample, or nothing."""
    ids, mask, states = sample["input_ids"], sample["loss_mask"], sample["states"]
    if len(ids) != row["length"]:
        return f"{len(ids)} tokens, the index says {row['length']}"
    for b, rows in states.items():
        if tuple(rows.shape) != (row["length"], width) or rows.dtype != dtype:
            return f"boundary {b} is {tuple(rows.shape)} {rows.dtype}"
        if not torch.isfinite(rows).all():
            return f"boundary {b} holds NaN or Inf"
    if content_hash(ids, mask, states) != row["content_hash"]:
        return "altered: the content hash differs from the index"
    if int(mask.sum()) != row["loss_tok"]:
        return "the loss mask differs from the index"
    if expected is not None and not (np.array_equal(ids.numpy(), expected.input_ids) and np.array_equal(mask.numpy(), expected.loss_mask)):
        return "token ids or loss mask differ from the prompt set"
    return ""


def _check_head(store: Store, report: VerifyReport) -> None:
    try:
        with safe_open(store.folder / "head.safetensors", framework="pt") as file:
            recorded = (file.metadata() or {}).get("content_hash")
            whole = recorded == head_hash({name: file.get_tensor(name) for name in file.keys()})
    except (SafetensorError, OSError, ValueError):
        whole = False
    report.checks.append(("head", whole, "final norm and head as written" if whole else "torn or altered: remove head.safetensors, then python -m eyas extract writes it again"))


def _check_counts(store: Store, done: pd.DataFrame, failed: int, report: VerifyReport) -> None:
    config = read_json(store.folder / "data_config.json") if (store.folder / "data_config.json").is_file() else {}
    want = {"total_samples": len(done), "total_tokens": int(done["length"].sum()), "loss_tokens": int(done["loss_tok"].sum()), "errors": failed, "bytes": store.n_bytes}
    wrong = [f"{name} is {config.get(name)}, should be {value}" for name, value in want.items() if config.get(name) != value]
    report.checks.append(("data_config.json", not wrong, "; ".join(wrong) or f"{want['total_samples']} samples, {want['total_tokens']:,} tokens, {want['bytes']:,} bytes"))
    row_bytes = len(store.boundaries) * store.manifest["hidden_size"] * torch.empty(0, dtype=getattr(torch, store.manifest["dtype"])).element_size() + 8 + 1
    used = set(done["shard"])
    counted = int(done["length"].sum()) * row_bytes
    dead = stored = 0
    for path in sorted((store.folder / "shards").glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as shard:
                tokens = shard.get_slice("input_ids").get_shape()[0]
        except (SafetensorError, OSError):
            continue  # its samples are in `damaged`
        stored += tokens * row_bytes
        if path.name not in used:
            dead += 1
    ok = stored >= counted
    report.checks.append(("bytes on disk", ok, f"{counted:,} of {stored:,} tensor bytes are counted by the index" + (f"; {dead} shard(s) with none" if dead else "")))


def mend(store: Store, report: VerifyReport) -> None:
    """Mark the damaged samples as failed, so that the next `extract` makes just these again."""
    writer = StoreWriter(store.folder, {k: v for k, v in store.manifest.items() if k != "format"}, store.head(), shard_bytes=1)
    try:
        writer.mark_damaged(report.damaged)
    finally:
        writer.release()
