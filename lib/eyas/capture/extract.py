"""From a prompt set to a store, through a running server: `python -m eyas extract --profile P`. Run it again and it goes on.

The server writes each request's rows into its spool and answers with a path; the client checks them, moves them into
the store and removes the spool file. Every sample asked for ends as extracted, skipped (already there) or failed. Faults of the
transport (a server that is gone, busy or silent, a full disk) leave a sample pending, and the same command tries it again; a
fault of its own (NaN, a refused template) marks it failed, and `--retry-failed` does.
"""

import contextlib
import itertools
import json
import threading
import time
import uuid
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import torch
import xxhash
from safetensors.torch import load

from eyas.capture.plan import check_room, planned, store_dtype
from eyas.config import Config
from eyas.errors import EyasError
from eyas.models.boundaries import boundaries_of, tensor_name
from eyas.models.target import Target
from eyas.progress import Progress, bytes_text
from eyas.prompts.chat_template import Sample, encode, template_hash, tokenizer_hash
from eyas.prompts.prompt_set import PromptSet, chosen
from eyas.prompts.responses import check_responses
from eyas.server.serve import LIMITS, Server, check_for_capture
from eyas.store.reader import Planned, Rows, Store
from eyas.store.summary import last_run, write_data_config
from eyas.store.writer import StoreWriter

ATTEMPTS = 3  # per sample, for faults of the transport
BACK_OFF_S = 1.0  # before the second attempt, doubled for each further one; a server that failed rests as long
FAILURES_IN_A_ROW = 8  # then the job stops with the reason instead of failing the rest
LISTED = 20  # failed samples that a summary names


class SampleError(Exception):
    """This one sample cannot be extracted; the reason goes into the index."""


class TransportError(SampleError):
    """It could not be had this time; the fault is not the sample's."""


@dataclass(frozen=True)
class Summary:
    """extracted + skipped + failed = asked; `pending` of the failed ones are tried again by the same command. total_tok and bytes are the whole store's."""

    asked: int
    extracted: int
    skipped: int
    failed: int
    pending: int
    total_samples: int
    total_tok: int
    loss_tok: int
    bytes: int
    seconds: float
    reasons: dict[str, str]  # sample id -> why, of those that are not there

    def __str__(self) -> str:
        why = "".join(
            f"\n  {id}: {reason}" for id, reason in itertools.islice(self.reasons.items(), LISTED)
        )
        if len(self.reasons) > LISTED:
            why += f"\n  ... and {len(self.reasons) - LISTED} more"
        if self.failed:
            why += f"\n  {self.pending} of them are tried again by the same command, {self.failed - self.pending} by python -m eyas extract --retry-failed"
        return (
            f"asked {self.asked} = extracted {self.extracted} + skipped {self.skipped} (already there) + failed {self.failed}{why}\n"
            f"store: {self.total_samples} samples, {self.total_tok:,} tokens ({self.loss_tok:,} supervised), {bytes_text(self.bytes)}; {self.seconds:.0f} s"
        )


def make_manifest(
    config: Config, status: dict, target: Target, prompts: PromptSet, tokenizer
) -> dict:
    """What decides the bytes of the states; a store is only ever continued under the same one."""
    return {
        "target": {
            "name": target.name,
            "config_hash": target.config_hash,
            "fingerprint": target.fingerprint,
            "n_blocks": target.n_blocks,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "rms_norm_eps": target.rms_norm_eps,
        },
        "engine": {
            "name": "sglang",
            "version": status["sglang"],
            "device": status["device"],
            "capture_plugin": status["capture"]["version"],
        },
        "boundaries": list(boundaries_of(config, target.n_blocks).stored),
        "dtype": store_dtype(config, status["dtype"]),
        "computed_dtype": status["dtype"],
        "hidden_size": target.hidden_size,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": template_hash(tokenizer),
        **(
            {"chat_template_kwargs": json.loads(config.chat_template_kwargs)}
            if config.chat_template_kwargs
            else {}
        ),
        "prompts": {
            "hash": prompts.hash,
            "order": "by split, seeded",
            "seed": config.seed,
            "max_length": config.max_length,
        },
        "server_flags": {
            name: status[name]
            for name in ("radix_cache", "chunked_prefill", "overlap", "prefill_graph")
        }
        | status["flags"],
    }


def extract(
    config: Config,
    servers: list[Server],
    target: Target,
    prompts: PromptSet,
    retry_failed: bool = False,
    anyway: bool = False,
) -> Summary:
    """Extract what the profile asks for and the store does not have yet, shared out among the servers.

    EyasError before the first request: an unfit server, servers that differ, a store of something else, too little disk (unless `anyway`). During
    the run: dead servers or a full disk stop it (what has arrived stays), one bad sample does not. `retry_failed` tries failed samples again too.
    """
    started = time.monotonic()
    tokenizer = target.tokenizer()
    boundaries = boundaries_of(config, target.n_blocks).stored
    statuses = [server.status() for server in servers]
    for status in statuses:
        check_for_capture(status, boundaries, target)
        context_tok = status["context_tok"] or target.context_tok
        if config.max_length > context_tok:
            raise EyasError(
                f"max_length = {config.max_length}, but the server's context is {context_tok}",
                "at most that",
                "-p max_length N, or a server with a longer context_tok",
            )
    conversations = chosen(config, prompts)
    if not conversations:
        raise EyasError(
            f"no conversation of {prompts.path.name} is asked for",
            "train_samples or heldout_samples to find some",
            "python -m eyas prompts show",
        )
    check_responses(prompts, target, tokenizer)
    manifest = make_manifest(config, statuses[0], target, prompts, tokenizer)
    for status in statuses[1:]:
        if make_manifest(config, status, target, prompts, tokenizer) != manifest:
            raise EyasError(
                f"the servers {statuses[0]['url']} and {status['url']} differ in version, dtype or flags",
                "the same of all",
                "python -m eyas server status, for each",
            )
    fleet = Fleet(config, servers, statuses)
    samples, refused = _encode_all(conversations, tokenizer, config.max_length)
    asked, have, done, writer, summary = [c.id for c in conversations], set(), Counter(), None, None
    try:
        writer = StoreWriter(config.store_dir, manifest, target.head(), config.shard_mib * 2**20)
        have = writer.extracted
        lengths = [len(s.input_ids) for s in samples if s.id not in have]
        plan = planned(
            config,
            len(lengths),
            sum(lengths),
            target.n_blocks,
            target.hidden_size,
            statuses[0]["dtype"],
        )
        if plan.samples:
            print(plan, flush=True)
        check_room(plan, config.store_dir, fleet.spool_bytes(plan.tok), anyway)
        by_id = {s.id: s for s in samples}
        todo = writer.plan(
            [
                Planned(
                    c.id,
                    c.split,
                    c.category,
                    len(by_id[c.id].input_ids) if c.id in by_id else 0,
                    c.topic,
                )
                for c in conversations
            ],
            retry_failed,
        )
        fleet.clear_spools()
        with Progress(total=len(todo)) as progress:
            for id in set(todo) & set(refused):
                writer.fail(id, refused[id])
                progress.update(errors=1)
            _run(fleet, writer, [by_id[id] for id in todo if id in by_id], progress, done)
        summary = _summarise(config, asked, done, have, time.monotonic() - started)
        return summary
    except OSError as error:
        raise EyasError(
            f"writing the store failed: {error.strerror or error}",
            "room on its disk, and leave to write there",
            "free some, then the same command again: it goes on where it was",
        ) from None
    finally:
        fleet.close()
        if writer is not None:  # else the store is another's, and so are its files in the spools
            fleet.clear_spools()
            if summary is None:  # Ctrl-C, a dead server, a full disk: what has arrived is kept
                with contextlib.suppress(OSError):
                    writer.flush()
                with contextlib.suppress(OSError):
                    _summarise(config, asked, done, have, time.monotonic() - started)
            writer.release()


def _encode_all(conversations, tokenizer, max_length: int) -> tuple[list[Sample], dict[str, str]]:
    """The samples, and id -> why of those that the template or the tokenizer refuses."""
    samples, refused = [], {}
    for conversation in conversations:
        try:
            samples.append(encode(conversation, tokenizer, max_length))
        except EyasError as error:
            refused[conversation.id] = error.found + f"; next: {error.next_command}" * bool(
                error.next_command
            )
    return samples, refused


class Fleet:
    """The servers of a run, as one. A request goes to the one with the fewest in flight; one that failed rests for a while."""

    def __init__(self, config: Config, servers: list[Server], statuses: list[dict]):
        self.servers = servers
        self.width = config.concurrency * len(servers)
        self.dtype = getattr(torch, statuses[0]["dtype"])
        self.spools = [Path(status["capture"]["spool"]) for status in statuses]
        self.quotas = [status["capture"]["quota"] for status in statuses]
        self.token_bytes = (
            max(len(s["capture"]["boundaries"]) * s["capture"]["hidden_size"] for s in statuses)
            * self.dtype.itemsize
            + 8
        )  # in a spool
        self.stopped = threading.Event()
        self.prefix = (
            xxhash.xxh3_64_hexdigest(str(config.store_dir).encode()) + "-"
        )  # of this store's files in a spool: its lock says that nobody else uses them
        self._clients = [
            httpx.Client(base_url=s.url, timeout=config.request_timeout_s, limits=LIMITS)
            for s in servers
        ]
        self._in_flight = [0] * len(servers)
        self._rests_until = [0.0] * len(servers)
        self._lock = threading.Lock()

    def capture(self, sample: Sample, boundaries: tuple[int, ...]) -> dict[int, torch.Tensor]:
        """{boundary: [T, H]}; SampleError when it cannot be had, TransportError when not now."""
        for attempt in range(ATTEMPTS):
            n = self._take()
            try:
                return capture(self._clients[n], sample, boundaries, self.dtype, self.prefix)
            except TransportError as error:
                last = error
                if self.servers[n].pid and self.servers[n].process() is None:
                    last = TransportError("the server has died")
                if self.stopped.is_set() or (len(self.servers) == 1 and last is not error):
                    break
                with self._lock:
                    self._rests_until[n] = time.monotonic() + BACK_OFF_S * 2**attempt
            finally:
                with self._lock:
                    self._in_flight[n] -= 1
        raise last

    def _take(self) -> int:
        with self._lock:
            now = time.monotonic()
            rested = [n for n in range(len(self.servers)) if self._rests_until[n] <= now]
            n = (
                min(rested, key=self._in_flight.__getitem__)
                if rested
                else min(range(len(self.servers)), key=self._rests_until.__getitem__)
            )
            self._in_flight[n] += 1
            wait_s = self._rests_until[n] - now
        time.sleep(max(wait_s, 0.0))
        return n

    def spool_bytes(self, tok: int) -> dict[Path, int]:
        """The most that will wait in each spool while so many tokens are extracted."""
        return {
            spool: min(quota, tok * self.token_bytes)
            for spool, quota in zip(self.spools, self.quotas)
        }

    def clear_spools(self) -> None:
        """Remove what an earlier client of this store asked for and never took."""
        for spool in self.spools:
            with contextlib.suppress(
                OSError
            ):  # what a client may not remove it may not take either, and that is said then
                for leftover in spool.glob(f"{self.prefix}*") if spool.is_dir() else ():
                    leftover.unlink(missing_ok=True)

    def close(self) -> None:
        for client in self._clients:
            client.close()


def _run(
    fleet: Fleet, writer: StoreWriter, samples: list[Sample], progress: Progress, done: Counter
) -> None:
    """Bounded concurrency and bounded bytes in flight; results are taken in the order of the samples. `done` counts samples and tok."""
    per_token = writer.store.token_bytes
    waiting: deque[tuple[Sample, Future]] = deque()
    queue = deque(samples)
    failures = in_flight_tok = 0
    with ThreadPoolExecutor(fleet.width) as pool:
        try:
            while queue or waiting:
                while (
                    queue
                    and len(waiting) < 2 * fleet.width
                    and (
                        not waiting
                        or (in_flight_tok + len(queue[0].input_ids)) * fleet.token_bytes
                        <= sum(fleet.quotas)
                    )
                ):
                    sample = queue.popleft()
                    in_flight_tok += len(sample.input_ids)
                    waiting.append(
                        (sample, pool.submit(fleet.capture, sample, writer.store.boundaries))
                    )
                sample, future = waiting.popleft()
                tok = len(sample.input_ids)
                try:
                    states = future.result()
                    ids, mask = (
                        torch.from_numpy(sample.input_ids),
                        torch.from_numpy(sample.loss_mask),
                    )  # [T]
                    writer.add(
                        Rows(
                            sample.id,
                            sample.split,
                            sample.category,
                            ids,
                            mask,
                            states,
                            sample.truncated,
                            sample.topic,
                        )
                    )
                    done.update(samples=1, tok=tok)
                    failures = 0
                    progress.update(samples=1, tok=tok, bytes=tok * per_token)
                except SampleError as error:
                    writer.fail(sample.id, str(error), again=isinstance(error, TransportError))
                    failures += 1
                    progress.update(errors=1)
                    if failures >= FAILURES_IN_A_ROW:
                        raise EyasError(
                            f"{failures} samples failed in a row, the last one: {error}",
                            "",
                            "python -m eyas server status (down and up where it is dead), then the same command again: it goes on where it was",
                        ) from None
                in_flight_tok -= tok
            writer.flush()
        finally:
            fleet.stopped.set()
            for _, future in waiting:
                future.cancel()


def capture(
    client: httpx.Client,
    sample: Sample,
    boundaries: tuple[int, ...],
    dtype: torch.dtype,
    prefix: str = "",
) -> dict[int, torch.Tensor]:
    """One request: {boundary: [T, H]}, checked (rows, ids, dtype, finite). SampleError or TransportError with the reason when it cannot be had."""
    name = prefix + uuid.uuid4().hex
    ids = sample.input_ids.tolist()
    body = {
        "input_ids": ids,
        "sampling_params": {
            "max_new_tokens": 1,
            "temperature": 0.0,
            "custom_params": {"eyas_capture": name},
        },
    }
    try:
        answer = client.post("/generate", json=body)
        if answer.status_code >= 500 or answer.status_code in (408, 429):
            raise TransportError(f"HTTP {answer.status_code} from the server")
        if answer.status_code != 200:
            raise SampleError(f"HTTP {answer.status_code}: {answer.text[:200]}")
        found = (
            answer.json()["meta_info"].get("eyas_capture")
            or [{"error": "the answer names no file: is the capture plugin on?"}]
        )[0]
    except httpx.HTTPError as error:
        raise TransportError(f"{type(error).__name__} from the server") from None
    except (ValueError, KeyError, TypeError):
        raise TransportError("the server's answer is no answer of SGLang's") from None
    if "error" in found or "path" not in found:
        raise (TransportError if found.get("again") else SampleError)(
            f"server: {found.get('error', 'the answer names no file')}"
        )
    content = take_file(client, Path(found["path"]), name)
    try:
        tensors = load(content)
        found_ids, captured = (
            tensors["input_ids"].tolist(),
            {b: tensors[tensor_name(b)] for b in boundaries},
        )  # [T, H] each
    except Exception as error:
        raise TransportError(f"the server's file can't be read: {type(error).__name__}") from None
    if found_ids != ids:
        raise SampleError("the rows belong to other token ids")
    for b, rows in captured.items():
        if rows.shape[0] != len(ids):
            raise SampleError(f"boundary {b} has {rows.shape[0]} rows for {len(ids)} tokens")
        if rows.dtype != dtype:
            raise SampleError(f"boundary {b} is {rows.dtype}, the server said {dtype}")
        if not torch.isfinite(rows).all():
            raise SampleError(f"boundary {b} holds NaN or Inf")
    return captured


def take_file(client: httpx.Client, path: Path, name: str) -> bytes:
    """The spool file as soon as it is there, removed. The server writes it in the background; when it takes long, the server is asked why."""
    if not path.parent.is_dir():
        raise TransportError(
            f"the server's spool {path.parent.name!r} is not visible here: spool and client must share a file system"
        )
    pause_s, asked_s = 0.001, time.monotonic()
    while True:
        try:
            content = path.read_bytes()
            path.unlink(missing_ok=True)
            return content
        except FileNotFoundError:
            pass
        except OSError as error:
            raise TransportError(f"the spool can't be used: {error.strerror}") from None
        if time.monotonic() - asked_s > 1.0:
            try:
                info = client.get("/server_info", timeout=30).json()
            except (httpx.HTTPError, ValueError) as error:
                raise TransportError(
                    f"{type(error).__name__} while the server was writing"
                ) from None
            state = next(
                (s["eyas_capture"] for s in info.get("internal_states", []) if "eyas_capture" in s),
                {},
            )
            if name in state.get("failures", {}):
                raise TransportError(f"server: {state['failures'][name]}")
            if not state.get("queued_bytes") and not path.exists():
                raise TransportError("the server's file has not come")
            asked_s = time.monotonic()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def _summarise(
    config: Config, asked: list[str], counts: Counter, have: set[str], seconds: float
) -> Summary:
    """`have`: samples that were there before; of `counts` (samples and tok of this run) come the rates."""
    store = Store.open(config.store_dir)
    done = store.index[store.index["state"] == "extracted"]
    there, failed = (
        set(done["id"]) & set(asked),
        set(store.index.loc[store.index["state"] == "failed", "id"]),
    )
    reasons = dict(zip(store.index["id"], store.index["reason"]))
    missing = [id for id in asked if id not in there]
    summary = Summary(
        len(asked),
        len(there - have),
        len(there & have),
        len(missing),
        sum(id not in failed for id in missing),
        len(done),
        int(done["length"].sum()),
        int(done["loss_tok"].sum()),
        store.n_bytes,
        seconds,
        {id: reasons.get(id, "") for id in missing},
    )
    rates = {
        "samples_per_s": counts["samples"] / max(seconds, 1e-9),
        "tok_per_s": counts["tok"] / max(seconds, 1e-9),
    }
    if not counts["tok"]:  # nothing was measured; what was stays
        rates |= {name: rate for name, rate in last_run(config.store_dir).items() if name in rates}
    write_data_config(
        store,
        {
            name: value
            for name, value in asdict(summary).items()
            if name in ("asked", "extracted", "skipped", "failed", "pending", "seconds")
        }
        | rates,
    )
    return summary
