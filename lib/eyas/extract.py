"""From a prompt set to a store, through a running server: `python -m eyas extract --profile P`. Run it again and it goes on.

The server writes each request's rows into its spool and answers with a path; the client checks them, moves them into
the store and removes the spool file. Every sample asked for ends as extracted, skipped (already there) or failed.
"""

import contextlib
import time
import uuid
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import torch
from safetensors.torch import load

from eyas import __version__
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import write_json
from eyas.progress import Progress, bytes_text
from eyas.prompts import Conversation, PromptSet, Sample, encode, template_hash, tokenizer_hash
from eyas.serve import Server, check_for_capture
from eyas.store import Rows, Store, StoreWriter, free_bytes
from eyas.target import Target

ATTEMPTS = 3  # per sample, for failures of the transport
FAILURES_IN_A_ROW = 8  # then the job stops with the reason instead of failing the rest
REQUEST_TIMEOUT_S = 600.0
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class SampleError(Exception):
    """This one sample cannot be extracted; the reason goes into the index."""


@dataclass(frozen=True)
class Summary:
    """extracted + skipped + failed = asked. total_tok and bytes are of the whole store, as it lies on the disk."""

    asked: int
    extracted: int
    skipped: int
    failed: int
    total_samples: int
    total_tok: int
    loss_tok: int
    bytes: int
    seconds: float
    reasons: dict[str, int]

    def __str__(self) -> str:
        why = "".join(f"\n  {count} x {reason}" for reason, count in self.reasons.items())
        return (f"asked {self.asked} = extracted {self.extracted} + skipped {self.skipped} (already there) + failed {self.failed}{why}\n"
                f"store: {self.total_samples} samples, {self.total_tok:,} tokens ({self.loss_tok:,} supervised), {bytes_text(self.bytes)}; {self.seconds:.0f} s")


def chosen(config: Config, prompts: PromptSet) -> list[Conversation]:
    """The conversations that a profile asks for, training topics first, each split in its seeded order."""
    return prompts.select("train", config.train_samples, config.seed) + prompts.select("heldout", config.heldout_samples, config.seed)


def make_manifest(config: Config, status: dict, target: Target, prompts: PromptSet, tokenizer) -> dict:
    """What decides the bytes of the states; a store is only ever continued under the same one."""
    return {
        "target": {
            "name": target.name, "config_hash": target.config_hash, "fingerprint": target.fingerprint, "n_blocks": target.n_blocks,
            "hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "rms_norm_eps": target.rms_norm_eps,
        },
        "engine": {"name": "sglang", "version": status["sglang"], "device": status["device"], "capture_plugin": status["capture"]["version"]},
        "boundaries": sorted({*config.boundaries, target.n_blocks}),
        "dtype": status["dtype"],
        "hidden_size": target.hidden_size,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": template_hash(tokenizer),
        "prompts": {"hash": prompts.hash, "order": "by split, seeded", "seed": config.seed, "max_length": config.max_length},
        "server_flags": {name: status[name] for name in ("radix_cache", "chunked_prefill", "overlap", "prefill_graph")} | status["flags"],
    }


def extract(config: Config, server: Server, target: Target, prompts: PromptSet) -> Summary:
    """Extract what the profile asks for and the store does not have yet.

    EyasError before the first request: an unfit server, a store of something else, too little disk. During the run:
    a dead server or a full disk stops it (what is counted stays), one bad sample does not.
    """
    started = time.monotonic()
    status = server.status()
    tokenizer = target.tokenizer()
    check_for_capture(status, (*config.boundaries, target.n_blocks), target)
    if config.max_length > (status["context_tok"] or target.context_tok):
        raise EyasError(f"max_length = {config.max_length}, but the server's context is {status['context_tok'] or target.context_tok}", "at most that", "-p max_length N, or a server with a longer context_tok")
    conversations = chosen(config, prompts)
    if not conversations:
        raise EyasError(f"no conversation of {prompts.path.name} is asked for", "train_samples or heldout_samples to find some", "python -m eyas prompts show")
    writer = StoreWriter(config.store_dir, make_manifest(config, status, target, prompts, tokenizer), target.head(), config.shard_mib * 2**20)
    try:
        have = writer.extracted
        todo = [c for c in conversations if c.id not in have]
        counts = {"extracted": 0, "failed": 0}
        samples, refused = _encode_all(todo, tokenizer, config.max_length)
        _check_disk(config, samples, status["dtype"], len(writer.store.boundaries) * target.hidden_size, Path(status["capture"]["spool"]))
        with Progress(total=len(todo)) as progress:
            for conversation, reason in refused:
                writer.fail(conversation.id, conversation.split, conversation.category, reason)
                counts["failed"] += 1
                progress.update(errors=1)
            _run(config, server, writer, samples, status, counts, progress)
    finally:
        with contextlib.suppress(OSError):
            writer.flush()  # Ctrl-C, a dead server: what has arrived is kept
        writer.release()
    return _summarise(config, len(conversations), counts["extracted"], len(conversations) - len(todo), counts["failed"], time.monotonic() - started)


def _encode_all(todo, tokenizer, max_length: int) -> tuple[list[Sample], list[tuple[Conversation, str]]]:
    samples, refused = [], []
    for conversation in todo:
        try:
            samples.append(encode(conversation, tokenizer, max_length))
        except EyasError as error:
            refused.append((conversation, error.found))
    return samples, refused


def _check_disk(config: Config, samples: list[Sample], dtype: str, width: int, spool: Path) -> None:
    need = sum(len(s.input_ids) for s in samples) * width * DTYPE_BYTES[dtype]
    in_flight = 2 * config.concurrency * config.max_length * width * DTYPE_BYTES[dtype]
    for name, folder, needed in (("store", config.store_dir, need), ("spool", spool, in_flight)):
        if folder.exists() and free_bytes(folder) < needed * 1.02 + 64 * 2**20:
            raise EyasError(
                f"the {name}'s disk has {bytes_text(free_bytes(folder))} free, {bytes_text(int(needed))} will be written", "room for them",
                "free some, set EYAS_DATA to a larger disk, or ask for fewer samples (-p train_samples N)",
            )


def _run(config: Config, server: Server, writer: StoreWriter, samples: list[Sample], status: dict, counts: dict, progress: Progress) -> None:
    """Bounded concurrency; results are taken in the order of the samples, so that a store's order does not depend on timing."""
    dtype = getattr(torch, status["dtype"])
    waiting: deque[tuple[Sample, Future]] = deque()
    queue = deque(samples)
    failures = 0
    with httpx.Client(base_url=server.url, timeout=REQUEST_TIMEOUT_S, limits=httpx.Limits(max_connections=config.concurrency)) as client, \
            ThreadPoolExecutor(config.concurrency) as pool:
        try:
            while queue or waiting:
                while queue and len(waiting) < 2 * config.concurrency:
                    sample = queue.popleft()
                    waiting.append((sample, pool.submit(capture, client, sample, writer.store.boundaries, dtype)))
                sample, future = waiting.popleft()
                try:
                    states = future.result()
                    writer.add(Rows(sample.id, sample.split, sample.category, torch.from_numpy(sample.input_ids), torch.from_numpy(sample.loss_mask), states, sample.truncated))
                    counts["extracted"] += 1
                    failures = 0
                    progress.update(samples=1, tok=len(sample.input_ids), bytes=sum(t.nbytes for t in states.values()))
                except SampleError as error:
                    writer.fail(sample.id, sample.split, sample.category, str(error))
                    counts["failed"] += 1
                    failures += 1
                    progress.update(errors=1)
                    if failures >= FAILURES_IN_A_ROW:
                        dead = server.pid and server.process() is None
                        what = "the server has died" if dead else f"{failures} samples failed in a row, the last one: {error}"
                        raise EyasError(what, "", "python -m eyas server up, then the same command again: it goes on where it was") from None
                except OSError as error:
                    raise EyasError(f"writing the store failed: {error}", "room on its disk", "free some, then the same command again: it goes on where it was") from None
        finally:
            for _, future in waiting:
                future.cancel()


def capture(client: httpx.Client, sample: Sample, boundaries: tuple[int, ...], dtype: torch.dtype) -> dict[int, torch.Tensor]:
    """One request: {boundary: [T, H]}, checked (rows, ids, dtype, finite). SampleError with the reason when it cannot be had."""
    name = uuid.uuid4().hex
    ids = sample.input_ids.tolist()
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "custom_params": {"eyas_capture": name}}}
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(2.0**attempt)
        try:
            answer = client.post("/generate", json=body)
        except httpx.HTTPError as error:
            reason = f"{type(error).__name__} from the server"
            continue
        if answer.status_code >= 500:
            reason = f"HTTP {answer.status_code} from the server"
            continue
        break
    else:
        raise SampleError(reason)
    if answer.status_code != 200:
        raise SampleError(f"HTTP {answer.status_code}: {answer.text[:200]}")
    found = (answer.json()["meta_info"].get("eyas_capture") or [{"error": "the answer names no file: is the capture plugin on?"}])[0]
    if "error" in found:
        raise SampleError(f"server: {found['error']}")
    path = Path(found["path"])
    try:
        tensors = load(path.read_bytes())
    except FileNotFoundError:
        raise SampleError("the server's spool file is not visible here: spool and client must share a file system") from None
    finally:
        path.unlink(missing_ok=True)
    if tensors["input_ids"].tolist() != ids:
        raise SampleError("the rows belong to other token ids")
    states = {}
    for b in boundaries:
        rows = tensors[f"boundary_{b}"]  # [T, H]
        if rows.shape[0] != len(ids):
            raise SampleError(f"boundary {b} has {rows.shape[0]} rows for {len(ids)} tokens")
        if rows.dtype != dtype:
            raise SampleError(f"boundary {b} is {rows.dtype}, the server said {dtype}")
        if not torch.isfinite(rows).all():
            raise SampleError(f"boundary {b} holds NaN or Inf")
        states[b] = rows
    return states


def _summarise(config: Config, asked: int, extracted: int, skipped: int, failed: int, seconds: float) -> Summary:
    store = Store.open(config.store_dir)
    done = store.index[store.index["state"] == "extracted"]
    bad = store.index[store.index["state"] == "failed"]
    reasons = {str(reason): int(count) for reason, count in bad["reason"].value_counts().items()}
    summary = Summary(asked, extracted, skipped, failed, len(done), int(done["length"].sum()), int(done["loss_tok"].sum()), store.n_bytes, seconds, reasons)
    tok = int(done["length"].tail(extracted).sum()) if extracted else 0
    write_json(config.store_dir / "data_config.json", {
        "eyas": __version__, "total_samples": summary.total_samples, "total_tokens": summary.total_tok, "loss_tokens": summary.loss_tok, "bytes": summary.bytes,
        "errors": len(bad), "boundaries": list(store.boundaries), "dtype": store.manifest["dtype"], "hidden_size": store.manifest["hidden_size"],
        "last_run": asdict(summary) | {"samples_per_s": extracted / max(seconds, 1e-9), "tok_per_s": tok / max(seconds, 1e-9)},
    })
    return summary
