"""Extract a prompt set into a store, through a running server. `python -m eyas extract --profile P`

- The server writes each request's rows into its spool, and answers with the file's path.
- The client checks the rows, moves them into the store and removes the spool file.
- Every requested sample ends as extracted, skipped (already in the store) or failed.
- A fault of the transport (a server that is gone, busy or silent, a full disk) leaves a sample
  pending: the same command tries it again. A fault of the sample (NaN, a refused template) marks it
  failed: `--retry-failed` tries it again.
- After any interruption, run the same command again: it resumes.
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
from eyas.prompts.prompt_set import Conversation, PromptSet, chosen
from eyas.prompts.responses import check_responses
from eyas.server.serve import LIMITS, Server, check_for_capture
from eyas.store.reader import Planned, Rows, Store
from eyas.store.summary import last_run, write_data_config
from eyas.store.writer import StoreWriter

ATTEMPTS = 3  # per sample, for faults of the transport
BACK_OFF_S = 1.0  # pause of a server after its first failure, doubled for each further one
FAILURES_IN_A_ROW = 8  # then the job stops with the reason instead of failing the rest
LISTED = 20  # failed samples that a summary names
ASK_AFTER_S = 1.0  # wait for a spool file, then ask the server why it does not exist


class SampleError(Exception):
    """Report that this one sample cannot be extracted; the reason goes into the index."""


class TransportError(SampleError):
    """Report that a sample could not be extracted this time; the fault is not its own."""


@dataclass(frozen=True)
class Summary:
    """Hold the counts of an extraction: asked = extracted + skipped + failed.

    pending: those of the failed samples that the same command tries again.
    total_samples, total_tok, loss_tok and bytes describe the whole store.
    """

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
    reasons: dict[str, str]  # {id of a sample that failed or is pending: why}

    def __str__(self) -> str:
        lines = [
            f"asked {self.asked} = extracted {self.extracted}"
            f" + skipped {self.skipped} (already there) + failed {self.failed}"
        ]
        listed = itertools.islice(self.reasons.items(), LISTED)
        lines += [f"  {id}: {reason}" for id, reason in listed]
        if len(self.reasons) > LISTED:
            lines.append(f"  ... and {len(self.reasons) - LISTED} more")
        if self.failed:
            lines.append(
                f"  {self.pending} of them are tried again by the same command,"
                f" {self.failed - self.pending} by python -m eyas extract --retry-failed"
            )
        lines.append(
            f"store: {self.total_samples} samples, {self.total_tok:,} tokens"
            f" ({self.loss_tok:,} supervised), {bytes_text(self.bytes)}; {self.seconds:.0f} s"
        )
        return "\n".join(lines)


def make_manifest(
    config: Config, status: dict, target: Target, prompts: PromptSet, tokenizer
) -> dict:
    """Return what decides the bytes of the states.

    A store is only ever continued under the same manifest.
    """
    template_settings = {}
    if config.chat_template_kwargs:
        template_settings["chat_template_kwargs"] = json.loads(config.chat_template_kwargs)
    checked_flags = ("radix_cache", "chunked_prefill", "overlap", "prefill_graph")
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
        **template_settings,
        "prompts": {
            "hash": prompts.hash,
            "order": "by split, seeded",
            "seed": config.seed,
            "max_length": config.max_length,
        },
        "server_flags": {name: status[name] for name in checked_flags} | status["flags"],
    }


def extract(
    config: Config,
    servers: list[Server],
    target: Target,
    prompts: PromptSet,
    retry_failed: bool = False,
    anyway: bool = False,
) -> Summary:
    """Extract the samples of the profile that the store does not have yet.

    The work is divided among the servers. `retry_failed` tries failed samples again too. `anyway`
    starts in spite of too little disk space.

    Raise EyasError before the first request if a server is unfit, if the servers differ, if the
    store has another manifest, or if the disk is too small. During the run, dead servers or a full
    disk stop the extraction, and extracted samples are kept. One bad sample does not stop it.
    """
    started_s = time.monotonic()
    tokenizer = target.tokenizer()
    statuses = [server.status() for server in servers]
    _check_servers(config, statuses, target)
    conversations = chosen(config, prompts)
    if not conversations:
        raise EyasError(
            f"no conversation of {prompts.path.name} is asked for",
            "train_samples or heldout_samples to find some",
            "python -m eyas prompts show",
        )
    check_responses(prompts, target, tokenizer)
    manifest = _common_manifest(config, statuses, target, prompts, tokenizer)
    fleet = Fleet(config, servers, statuses)
    samples, refused = _encode_all(conversations, tokenizer, config.max_length)
    asked = [c.id for c in conversations]
    have: set[str] = set()
    done = Counter()
    writer = None
    summary = None

    def summarise() -> Summary:
        return _summarise(config, asked, done, have, time.monotonic() - started_s)

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
        todo = writer.plan(_planned_samples(conversations, by_id), retry_failed)
        fleet.clear_spools()
        with Progress(total=len(todo)) as progress:
            for id in set(todo) & set(refused):
                writer.fail(id, refused[id])
                progress.update(errors=1)
            _run(fleet, writer, [by_id[id] for id in todo if id in by_id], progress, done)
        summary = summarise()
        return summary
    except OSError as error:
        raise EyasError(
            f"writing the store failed: {error.strerror or error}",
            "free space on its disk, and permission to write there",
            "free some, then the same command again: it resumes",
        ) from None
    finally:
        fleet.close()
        if writer is not None:  # otherwise another process has the store, and its spool files
            fleet.clear_spools()
            if summary is None:  # Ctrl-C, a dead server, a full disk: keep what is extracted
                with contextlib.suppress(OSError):
                    writer.flush()
                with contextlib.suppress(OSError):
                    summarise()
            writer.release()


def _check_servers(config: Config, statuses: list[dict], target: Target) -> None:
    """Raise EyasError if a server cannot capture these boundaries, or if its context is short."""
    boundaries = boundaries_of(config, target.n_blocks).stored
    for status in statuses:
        check_for_capture(status, boundaries, target)
        context_tok = status["context_tok"] or target.context_tok
        if config.max_length > context_tok:
            raise EyasError(
                f"max_length = {config.max_length}, but the server's context is {context_tok}",
                "at most that",
                "-p max_length N, or a server with a longer context_tok",
            )


def _common_manifest(
    config: Config, statuses: list[dict], target: Target, prompts: PromptSet, tokenizer
) -> dict:
    """Return the store's manifest. Raise EyasError if the servers would give different ones."""
    manifest = make_manifest(config, statuses[0], target, prompts, tokenizer)
    for status in statuses[1:]:
        if make_manifest(config, status, target, prompts, tokenizer) != manifest:
            raise EyasError(
                f"the servers {statuses[0]['url']} and {status['url']} differ in version,"
                " dtype or flags",
                "the same of all",
                "python -m eyas server status, for each",
            )
    return manifest


def _planned_samples(
    conversations: list[Conversation], samples: dict[str, Sample]
) -> list[Planned]:
    """Return the samples as the store plans them; refused ones have length 0."""
    planned_samples = []
    for c in conversations:
        length_tok = len(samples[c.id].input_ids) if c.id in samples else 0
        planned_samples.append(Planned(c.id, c.split, c.category, length_tok, c.topic))
    return planned_samples


def _encode_all(conversations, tokenizer, max_length: int) -> tuple[list[Sample], dict[str, str]]:
    """Encode the conversations; return the samples, and {id: why} of those that are refused."""
    samples = []
    refused = {}
    for conversation in conversations:
        try:
            samples.append(encode(conversation, tokenizer, max_length))
        except EyasError as error:
            next_step = f"; next: {error.next_command}" if error.next_command else ""
            refused[conversation.id] = error.found + next_step
    return samples, refused


class Fleet:
    """Use the servers of a run as one.

    A request is sent to the server with the fewest requests in flight. A server that failed rests
    for a while.
    """

    def __init__(self, config: Config, servers: list[Server], statuses: list[dict]):
        self.servers = servers
        self.width = config.concurrency * len(servers)
        self.dtype = getattr(torch, statuses[0]["dtype"])
        self.spools = [Path(status["capture"]["spool"]) for status in statuses]
        self.quotas = [status["capture"]["quota"] for status in statuses]  # bytes
        values_per_tok = [
            len(s["capture"]["boundaries"]) * s["capture"]["hidden_size"] for s in statuses
        ]
        self.token_bytes = max(values_per_tok) * self.dtype.itemsize + 8  # in a spool, with the id
        self.stopped = threading.Event()
        # The prefix marks this store's files in a spool. The store's lock guarantees that no other
        # client uses them.
        self.prefix = xxhash.xxh3_64_hexdigest(str(config.store_dir).encode()) + "-"
        self._clients = [
            httpx.Client(base_url=s.url, timeout=config.request_timeout_s, limits=LIMITS)
            for s in servers
        ]
        self._in_flight = [0 for _ in servers]
        self._rests_until_s = [0.0 for _ in servers]
        self._lock = threading.Lock()

    def capture(self, sample: Sample, boundaries: tuple[int, ...]) -> dict[int, torch.Tensor]:
        """Return {boundary: [T, H]} of a sample.

        Raise SampleError if the sample cannot be captured, TransportError if it cannot be now.
        """
        for attempt in range(ATTEMPTS):
            n = self._take()
            try:
                return capture(self._clients[n], sample, boundaries, self.dtype, self.prefix)
            except TransportError as error:
                last = error
                died = self.servers[n].pid and self.servers[n].process() is None
                if died:
                    last = TransportError("the server has died")
                if self.stopped.is_set() or (died and len(self.servers) == 1):
                    break
                with self._lock:
                    self._rests_until_s[n] = time.monotonic() + BACK_OFF_S * 2**attempt
            finally:
                with self._lock:
                    self._in_flight[n] -= 1
        raise last

    def _take(self) -> int:
        """Choose a server for one request, wait while it rests, and return its number."""
        numbers = range(len(self.servers))
        with self._lock:
            now_s = time.monotonic()
            rested = [n for n in numbers if self._rests_until_s[n] <= now_s]
            if rested:
                n = min(rested, key=self._in_flight.__getitem__)
            else:
                n = min(numbers, key=self._rests_until_s.__getitem__)
            self._in_flight[n] += 1
            wait_s = self._rests_until_s[n] - now_s
        time.sleep(max(wait_s, 0.0))
        return n

    def spool_bytes(self, tok: int) -> dict[Path, int]:
        """Return the most bytes that wait in each spool while `tok` tokens are extracted."""
        wanted = tok * self.token_bytes
        return {spool: min(quota, wanted) for spool, quota in zip(self.spools, self.quotas)}

    def clear_spools(self) -> None:
        """Remove the files that an earlier client of this store requested and never took.

        A file that cannot be removed cannot be taken either; `take_file` reports that.
        """
        for spool in self.spools:
            with contextlib.suppress(OSError):
                leftovers = spool.glob(f"{self.prefix}*") if spool.is_dir() else ()
                for leftover in leftovers:
                    leftover.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.close()


def _run(
    fleet: Fleet, writer: StoreWriter, samples: list[Sample], progress: Progress, done: Counter
) -> None:
    """Capture the samples and add them to the store, in their order.

    The number of requests and the bytes in flight are bounded. `done` counts samples and tok.
    """
    per_token = writer.store.token_bytes
    waiting: deque[tuple[Sample, Future]] = deque()
    queue = deque(samples)
    failures = 0
    in_flight_tok = 0

    def has_room() -> bool:
        """Return whether the next sample may be requested now."""
        if not waiting:
            return True
        if len(waiting) >= 2 * fleet.width:
            return False
        next_tok = in_flight_tok + len(queue[0].input_ids)
        return next_tok * fleet.token_bytes <= sum(fleet.quotas)

    with ThreadPoolExecutor(fleet.width) as pool:
        try:
            while queue or waiting:
                while queue and has_room():
                    sample = queue.popleft()
                    in_flight_tok += len(sample.input_ids)
                    future = pool.submit(fleet.capture, sample, writer.store.boundaries)
                    waiting.append((sample, future))
                sample, future = waiting.popleft()
                tok = len(sample.input_ids)
                try:
                    writer.add(_rows(sample, future.result()))
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
                            "python -m eyas server status (down and up if it is dead),"
                            " then the same command again: it resumes",
                        ) from None
                in_flight_tok -= tok
            writer.flush()
        finally:
            fleet.stopped.set()
            for _, future in waiting:
                future.cancel()


def _rows(sample: Sample, states: dict[int, torch.Tensor]) -> Rows:
    """Return a captured sample as the store takes it."""
    return Rows(
        sample.id,
        sample.split,
        sample.category,
        torch.from_numpy(sample.input_ids),
        torch.from_numpy(sample.loss_mask),
        states,
        sample.truncated,
        sample.topic,
    )


def capture(
    client: httpx.Client,
    sample: Sample,
    boundaries: tuple[int, ...],
    dtype: torch.dtype,
    prefix: str = "",
) -> dict[int, torch.Tensor]:
    """Send one request; return {boundary: [T, H]} after a check of rows, ids, dtype and values.

    Raise SampleError or TransportError with the reason if the states cannot be captured.
    """
    name = prefix + uuid.uuid4().hex
    ids = sample.input_ids.tolist()
    path = _request_states(client, ids, name)
    content = take_file(client, path, name)
    try:
        tensors = load(content)
        captured_ids = tensors["input_ids"].tolist()
        captured = {b: tensors[tensor_name(b)] for b in boundaries}  # [T, H] each
    except Exception as error:
        raise TransportError(f"the server's file can't be read: {type(error).__name__}") from None
    if captured_ids != ids:
        raise SampleError("the rows belong to other token ids")
    for b, rows in captured.items():
        if rows.shape[0] != len(ids):
            raise SampleError(f"boundary {b} has {rows.shape[0]} rows for {len(ids)} tokens")
        if rows.dtype != dtype:
            raise SampleError(f"boundary {b} is {rows.dtype}, the server said {dtype}")
        if not torch.isfinite(rows).all():
            raise SampleError(f"boundary {b} holds NaN or Inf")
    return captured


def _request_states(client: httpx.Client, ids: list[int], name: str) -> Path:
    """Ask the server to prefill these token ids; return the path of the file it writes."""
    body = {
        "input_ids": ids,
        "sampling_params": {
            "max_new_tokens": 1,
            "temperature": 0.0,
            "custom_params": {"eyas_capture": name},
        },
    }
    no_file = [{"error": "the answer names no file: is the capture plugin on?"}]
    try:
        answer = client.post("/generate", json=body)
        if answer.status_code >= 500 or answer.status_code in (408, 429):
            raise TransportError(f"HTTP {answer.status_code} from the server")
        if answer.status_code != 200:
            raise SampleError(f"HTTP {answer.status_code}: {answer.text[:200]}")
        reply = (answer.json()["meta_info"].get("eyas_capture") or no_file)[0]
    except httpx.HTTPError as error:
        raise TransportError(f"{type(error).__name__} from the server") from None
    except (ValueError, KeyError, TypeError):
        raise TransportError("the server's answer is not one of SGLang's") from None
    if "error" in reply or "path" not in reply:
        kind = TransportError if reply.get("again") else SampleError
        raise kind(f"server: {reply.get('error', 'the answer names no file')}")
    return Path(reply["path"])


def take_file(client: httpx.Client, path: Path, name: str) -> bytes:
    """Wait for a spool file; return its bytes and remove it.

    The server writes the file in the background. If that takes long, the server is asked why.
    Raise TransportError if the file cannot be read or will not be written.
    """
    if not path.parent.is_dir():
        raise TransportError(
            f"the server's spool {path.parent.name!r} is not visible here:"
            " spool and client must share a file system"
        )
    pause_s = 0.001
    asked_s = time.monotonic()
    while True:
        try:
            content = path.read_bytes()
            path.unlink(missing_ok=True)
            return content
        except FileNotFoundError:
            pass
        except OSError as error:
            raise TransportError(f"the spool can't be used: {error.strerror}") from None
        if time.monotonic() - asked_s > ASK_AFTER_S:
            _check_writing(client, path, name)
            asked_s = time.monotonic()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def _check_writing(client: httpx.Client, path: Path, name: str) -> None:
    """Raise TransportError if the server reports that it will not write this file."""
    try:
        info = client.get("/server_info", timeout=30).json()
    except (httpx.HTTPError, ValueError) as error:
        raise TransportError(f"{type(error).__name__} while the server was writing") from None
    states = info.get("internal_states", [])
    spool = next((s["eyas_capture"] for s in states if "eyas_capture" in s), {})
    if name in spool.get("failures", {}):
        raise TransportError(f"server: {spool['failures'][name]}")
    if not spool.get("queued_bytes") and not path.exists():
        raise TransportError("the server's file did not arrive")


def _summarise(
    config: Config, asked: list[str], counts: Counter, have: set[str], seconds: float
) -> Summary:
    """Write data_config.json and return the summary.

    `have` are the samples that the store had before this run. `counts` are the samples and tok of
    this run, from which the rates are computed.
    """
    store = Store.open(config.store_dir)
    index = store.index
    stored = index[index["state"] == "extracted"]
    extracted = set(stored["id"]) & set(asked)
    failed = set(index.loc[index["state"] == "failed", "id"])
    reasons = dict(zip(index["id"], index["reason"]))
    missing = [id for id in asked if id not in extracted]
    summary = Summary(
        asked=len(asked),
        extracted=len(extracted - have),
        skipped=len(extracted & have),
        failed=len(missing),
        pending=sum(id not in failed for id in missing),
        total_samples=len(stored),
        total_tok=int(stored["length"].sum()),
        loss_tok=int(stored["loss_tok"].sum()),
        bytes=store.n_bytes,
        seconds=seconds,
        reasons={id: reasons.get(id, "") for id in missing},
    )
    rates = {
        "samples_per_s": counts["samples"] / max(seconds, 1e-9),
        "tok_per_s": counts["tok"] / max(seconds, 1e-9),
    }
    if not counts["tok"]:  # nothing was measured: keep the earlier rates
        earlier = last_run(config.store_dir)
        rates |= {name: rate for name, rate in earlier.items() if name in rates}
    recorded = ("asked", "extracted", "skipped", "failed", "pending", "seconds")
    fields = asdict(summary)
    write_data_config(store, {name: fields[name] for name in fields if name in recorded} | rates)
    return summary
