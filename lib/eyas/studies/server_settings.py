"""Search for server settings that are worth keeping: `python -m eyas study server --profile P`.

The search is bounded in time. Stopped or killed, the same command continues it.

It starts from the profile's own settings and tries one change at a time. A server with the change
and one without are measured in turns (A B, B A, ...), so that whatever else the machine does
affects both. Two rates are measured:

    prefill   prompt tokens per second, with every row captured and checked as in extraction and
              `concurrency` requests in flight
    decode    tokens per second of one streamed request, from its first token to its last

The ratio of a round is one draw. Intervals are Student's, for the mean of the rounds' logarithms.
What decides:

    noise      first, two servers with the same settings: the far end of that interval is what the
               machine and a new start alone may do
    kept       a change that gains more than the noise (interval above 1) in one of the two, and
               loses in neither (no interval below 1)
    refused    a change that makes rows missing or different, or a server that fails. What decides
               the rows (dtype, boundaries, ...) cannot be tried at all
    confirmed  all kept changes together against the profile, in two new servers, by the same rule.
               Only this is reported: the trials chose, and the best of many looks too good

"No setting helped" is an answer. A tuned profile is written only for a confirmed gain.
"""

import contextlib
import datetime
import fcntl
import importlib.metadata
import json
import math
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np
import pandas as pd
import torch
import yaml

from eyas.capture.extract import SampleError, capture
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import is_sealed, read_json, seal, sha256_json, write_json, write_text
from eyas.intervals import LEVEL, interval_text
from eyas.models.boundaries import boundaries_of
from eyas.models.target import Target
from eyas.parity.checks import FLOORS, distance
from eyas.passthrough import add_to, read_variables
from eyas.prompts.chat_template import Sample, encode
from eyas.prompts.prompt_set import PromptSet, chosen, usable
from eyas.server.serve import LIMITS, Server, check_for_capture, server_up

MEASURES = ("prefill", "decode")
LOOK_EARLY = 3  # rounds after which a change that loses is given up
ASK_AGAIN = 5  # times, where the tokens of an answer came in one piece
ROW_SAMPLES = 4  # whose rows are compared between settings
QUANTILES = (0.5, 0.9)  # of the tokens of those
TEXTS = ("server_args", "server_env")  # a change of these adds to what the text says already
TUNABLE = ("max_prefill_tok", "concurrency", "max_total_tok", *TEXTS)
SAME_SEARCH = (
    *TUNABLE,
    "device",
    "dtype",
    "tensor_parallel",
    "context_tok",
    "threads",
    "boundaries",
    "extra_boundaries",
    "seed",
    "prompt_set",
    "generate_responses",
    "train_samples",
    "heldout_samples",
    "max_length",
    "tune_rounds",
    "tune_samples",
    "tune_new_tok",
    "tune_together",
)


def options(config: Config) -> list[tuple[str, object]]:
    """Return the changes to try, in order: those of tune_try, or those that suit the device.

    Raise EyasError for a setting that cannot be tuned, or a wrong value.
    """
    found = []
    for name, value in _named(config.tune_try) or _usual(config):
        try:
            changed = _with_change(config, {}, name, value)
        except EyasError:
            if config.tune_try:
                raise
            continue  # a usual one that this profile has no room for
        change = (name, value if name in TEXTS else changed[name])
        if change not in found:
            found.append(change)
    return found


def _named(text: str) -> list[tuple[str, str]]:
    """Return (setting, value) of tune_try. Values with spaces are quoted, as in a shell."""
    example = "-p tune_try \"max_prefill_tok:2048,4096 server_args:'--stream-interval 8'\""
    try:
        parts = shlex.split(text)
    except ValueError:
        raise EyasError(f"tune_try = {text!r}", "closed quotation marks", example) from None
    wanted = []
    for part in parts:
        name, _, values = part.partition(":")
        if name not in TUNABLE:
            raise EyasError(
                f"tune_try names {name!r}",
                f"settings that leave what is captured as it is: {', '.join(TUNABLE)}",
                example,
            )
        for value in values.split(","):
            if value == "":
                raise EyasError(
                    f"tune_try gives no value for {name}",
                    f"{name}:VALUE, or several with commas between",
                    example,
                )
            wanted.append((name, value))
    return wanted


def _usual(config: Config) -> list[tuple[str, object]]:
    """Return the changes that may matter on the device."""
    if config.device == "cpu":
        cores = len(os.sched_getaffinity(0))
        own = read_variables(config.server_env).get("OMP_NUM_THREADS", str(config.threads))
        threads = [n for n in (cores, max(1, cores // 2)) if str(n) != own]
        return [
            ("server_args", "--stream-interval 8"),  # fewer messages leave the cores to computing
            ("max_prefill_tok", 2048),  # activations that stay in the caches
            ("server_env", "THP_MEM_ALLOC_ENABLE=1"),  # pages of 2 MiB: fewer address look-ups
            ("concurrency", 2 * config.concurrency),
            ("server_env", "GOMP_SPINCOUNT=3000000"),  # idle threads wait awake and answer sooner
            *(("server_env", f"OMP_NUM_THREADS={n}") for n in threads),
            ("server_env", "GOMP_SPINCOUNT=0"),  # idle threads leave the cores to others
            ("concurrency", max(1, config.concurrency // 2)),
            ("max_prefill_tok", 4096),
        ]
    usual: list[tuple[str, object]] = [
        ("server_args", "--stream-interval 8"),
        ("server_args", "--attention-backend flashinfer"),
        ("server_args", "--attention-backend fa3"),
        ("max_prefill_tok", 8192),
        ("max_prefill_tok", 32768),
        ("concurrency", 2 * config.concurrency),
    ]
    if config.tensor_parallel > 1:  # how the GPUs add up their parts; docs/kimi-k2.5.md says more
        usual = [
            ("server_args", "--enable-nccl-nvls"),
            ("server_env", "NCCL_PROTO=LL128"),
            ("server_env", "NCCL_PROTO=LL"),
            ("server_env", "NCCL_ALGO=Ring"),
            ("server_env", "NCCL_ALGO=Tree"),
            ("server_env", "NCCL_MIN_NCHANNELS=16"),
            ("server_env", "NCCL_MAX_NCHANNELS=8"),
            ("server_args", "--disable-custom-all-reduce"),
            *usual,
        ]
    return usual


def _with_change(config: Config, kept: dict, name: str, value: object) -> dict:
    """Return the settings `kept` and this change, coerced and checked.

    A flag or variable is added to those of the text; one that is there already is replaced.
    """
    if name in TEXTS:
        Config.create(**{name: value})  # alone, so that a message names what was asked for
        value = add_to(name, kept.get(name, getattr(config, name)), value)
    changed = Config.create(**{**config.__dict__, **kept, name: value})
    return kept | {name: getattr(changed, name)}


def paired_ratio(first: list[float], second: list[float]) -> dict:
    """Return the geometric mean of second / first over the rounds, with its interval.

    The interval is Student's (n - 1 degrees of freedom), for the mean of the logarithms.
    """
    from scipy.stats import t

    logs = np.log(second) - np.log(first)  # [rounds]
    half = (
        float(t.ppf((1 + LEVEL) / 2, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
        if len(logs) > 1
        else math.nan
    )
    ends = (
        (None, None)
        if math.isnan(half)
        else (math.exp(logs.mean() - half), math.exp(logs.mean() + half))
    )
    return {"value": math.exp(logs.mean()), "low": ends[0], "high": ends[1], "level": LEVEL}


def noise_bound(ratio: dict) -> float:
    """Return how far from 1 a ratio of equals may be: the far end of its interval, above 1."""
    return max(ratio["high"], 1 / ratio["low"])


def verdict(ratios: dict[str, dict], noise: dict[str, float]) -> tuple[bool, str]:
    """Return whether a change is kept, and why.

    ratios: measure -> `paired_ratio`; noise: measure -> `noise_bound`.
    """
    lost = [m for m in MEASURES if ratios[m]["high"] < 1]
    won = [m for m in MEASURES if ratios[m]["low"] > 1 and ratios[m]["value"] > noise[m]]
    if lost:
        return False, f"{' and '.join(lost)} slower"
    return (True, f"{' and '.join(won)} faster") if won else (False, "no more than noise")


@dataclass(frozen=True)
class Rows:
    """Hold captured rows of a few samples under some settings.

    `floor` says how far another batch alone moves the rows: a value per quantile over tokens.
    """

    states: list[dict[int, torch.Tensor]]  # of each sample, boundary -> [T, H]
    floor: tuple[float, ...]


def moved(
    states: list[dict[int, torch.Tensor]], others: list[dict[int, torch.Tensor]]
) -> tuple[float, ...]:
    """Return quantiles of the distance (`eyas.parity.checks`) between rows of the same tokens.

    The worst boundary counts.
    """
    by_boundary = [
        torch.cat([distance(a[b], o[b]) for a, o in zip(states, others, strict=True)])
        for b in states[0]
    ]  # [tokens] each
    return tuple(
        max(float(torch.quantile(d.nan_to_num(nan=math.inf), q)) for d in by_boundary)
        for q in QUANTILES
    )


class Bench:
    """Run at most two servers, tied to this process, and measure them.

    `side` 0 or 1 says which. A side keeps its server while its settings stay.
    """

    def __init__(self, config: Config, target: Target, samples: list[Sample]):
        self.config, self.target, self.samples = config, target, samples
        self.boundaries = boundaries_of(config, target.n_blocks).stored
        self.up: dict[int, tuple[Config, Server]] = {}
        # A tied server dies with the thread that started it; this one lives as long as the bench.
        self.pool = ThreadPoolExecutor(1)
        self.starting: Future | None = None

    def side_config(self, side: int, config: Config) -> Config:
        return replace(
            config,
            run_name=f"{self.config.run_name}-tune-{side}",
            server_url="",
            port=0,
            spool_dir="",
        )

    def server(self, side: int, config: Config) -> Server:
        """Return the server of this side with these settings, fit for capture and warm.

        It is started where it is not up. Raise EyasError where it failed, or would lose rows.
        """
        if side in self.up and self.up[side][0] == config and self.alive(side):
            return self.up[side][1]
        for other in (side,) if self.config.tune_together else (0, 1):
            self.down(other)
        server = server_up(self.side_config(side, config), tied=True)
        self.up[side] = (config, server)
        check_for_capture(server.status(), self.boundaries, self.target)
        self.prefill(server, config, self.samples[: max(1, len(self.samples) // 2)])
        self.decode(server)
        return server

    def ahead(self, side: int, config: Config) -> None:
        """Start the server of this side in the background, where both may be up.

        `ready` waits for it.
        """
        self.starting = (
            self.pool.submit(self.server, side, config) if self.config.tune_together else None
        )

    def ready(self) -> None:
        """Wait for the server that `ahead` starts. Raise EyasError where it failed."""
        if self.starting is not None:
            self.starting.result()

    def alive(self, side: int) -> bool:
        """Return False where the server of this side has died."""
        return side not in self.up or self.up[side][1].process() is not None

    def down(self, side: int) -> None:
        if side in self.up:
            self.up.pop(side)[1].down()

    def close(self) -> None:
        if self.starting is not None:
            self.starting.exception()  # waits
        for side in (0, 1):
            self.down(side)
            shutil.rmtree(self.side_config(side, self.config).run_dir, ignore_errors=True)

    def prefill(self, server: Server, config: Config, samples: list[Sample]) -> float:
        """Return prompt tokens per second, with capture.

        Raise SampleError where rows are missing or not finite.
        """
        with (
            httpx.Client(
                base_url=server.url, timeout=config.request_timeout_s, limits=LIMITS
            ) as client,
            ThreadPoolExecutor(config.concurrency) as pool,
        ):
            started_s = time.perf_counter()
            for _ in pool.map(
                lambda s: capture(client, s, self.boundaries, getattr(torch, config.dtype)), samples
            ):
                pass
            return sum(len(s.input_ids) for s in samples) / (time.perf_counter() - started_s)

    def decode(self, server: Server) -> float:
        """Return tokens per second of one request, without its first token (prefill).

        On a busy machine a few quick tokens may come in one piece, which says nothing. Then the
        request is repeated.
        """
        for _ in range(ASK_AGAIN):
            seen = self._stream(server)
            if len(seen) > 1:
                return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])
        raise SampleError(
            f"all {self.config.tune_new_tok} tokens came in one piece, {ASK_AGAIN} times; "
            "raise tune_new_tok"
        )

    def _stream(self, server: Server) -> list[tuple[float, int]]:
        """Return (seconds, tokens so far) of each piece of a streamed answer."""
        body = {
            "input_ids": self.samples[0].input_ids[:32].tolist(),
            "stream": True,
            "sampling_params": {
                "max_new_tokens": self.config.tune_new_tok,
                "temperature": 0.0,
                "ignore_eos": True,
            },
        }
        seen = []
        try:
            with (
                httpx.Client(base_url=server.url, timeout=self.config.request_timeout_s) as client,
                client.stream("POST", "/generate", json=body) as answer,
            ):
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        seen.append(
                            (
                                time.perf_counter(),
                                json.loads(line[6:])["meta_info"]["completion_tokens"],
                            )
                        )
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise SampleError(f"{type(error).__name__} while decoding") from None
        if not seen or seen[-1][1] != self.config.tune_new_tok:
            raise SampleError(
                f"{seen[-1][1] if seen else 0} of {self.config.tune_new_tok} tokens came"
            )
        return seen

    def rows(self, server: Server, config: Config) -> Rows:
        samples, dtype = self.samples[:ROW_SAMPLES], getattr(torch, config.dtype)
        with (
            httpx.Client(
                base_url=server.url, timeout=config.request_timeout_s, limits=LIMITS
            ) as client,
            ThreadPoolExecutor(len(samples)) as pool,
        ):
            together = list(pool.map(lambda s: capture(client, s, self.boundaries, dtype), samples))
            alone = [capture(client, s, self.boundaries, dtype) for s in samples]
        return Rows(together, moved(together, alone))


class Search:
    """Run one search. Each record is made once and kept on disk; the bench makes the others."""

    def __init__(self, config: Config, target: Target, samples: list[Sample]):
        self.config, self.folder = config, config.tune_dir
        self.bench = Bench(config, target, samples)
        self.records: list[dict] = []  # of this walk, in order
        self.side = 0  # where the incumbent's server is
        self.rows: tuple[Config, Rows] | None = None

    def known(self, kind: str, kept: dict, tried: dict) -> Path:
        return self.folder / f"{kind}-{sha256_json([kept, tried])[:16]}.json"

    def trial(
        self, kind: str, kept: dict, tried: dict, noise: dict[str, float] | None = None
    ) -> dict:
        """Return the record of `tried` against `kept`, read from disk or made.

        Both are settings that differ from the profile's. A trial that was cut short is repeated.
        """
        path = self.known(kind, kept, tried)
        if path.is_file():
            with contextlib.suppress(ValueError):
                record = read_json(path)
                if is_sealed(record):
                    self.records.append(record)
                    return record
        started_s = time.monotonic()
        record = {
            "kind": kind,
            "kept": kept,
            "tried": tried,
            "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "state": "",
            "reason": "",
        }
        first, second = (replace(self.config, **changes) for changes in (kept, tried))
        if kind != "change":
            self.bench.close()  # new servers for both
        try:
            self.bench.ahead(1 - self.side, second)
            reference = self._rows_of(first)
            try:
                self.bench.ready()
                measured, rows = self._measure(first, second, reference, early=kind == "change")
            except (SampleError, EyasError) as error:
                if kind != "change" or not self.bench.alive(self.side):
                    raise  # the fault is not the change's
                self.bench.down(1 - self.side)
                record |= {"state": "refused", "reason": getattr(error, "found", str(error))[:2000]}
            else:
                ratios = {m: paired_ratio(*measured[m]) for m in MEASURES}
                record |= {"rows": rows} | {
                    m: {"kept": measured[m][0], "tried": measured[m][1], "ratio": ratios[m]}
                    for m in MEASURES
                }
                if kind == "noise":
                    record["state"] = "noise"
                else:
                    good, why = verdict(ratios, noise)
                    record |= {"state": "kept" if good else "not kept", "reason": why}
        except SampleError as error:
            raise EyasError(
                f"a server with the settings {json.dumps(kept)} failed: {error}",
                "rows and tokens of every request",
                "python -m eyas server up, with the same settings, then the log",
            ) from None
        record["seconds"] = time.monotonic() - started_s
        write_json(path, seal(record))
        self.records.append(record)
        return record

    def _rows_of(self, config: Config) -> Rows:
        server = self.bench.server(self.side, config)
        if self.rows is None or self.rows[0] != config:
            self.rows = (config, self.bench.rows(server, config))
        return self.rows[1]

    def _measure(
        self, first: Config, second: Config, reference: Rows, early: bool
    ) -> tuple[dict, dict]:
        """Return measure -> (rates of the first, of the second), and how far apart their rows are.

        There is one rate per round. Raise SampleError where the rows differ.
        """
        bench, rates, rows = self.bench, {m: ([], []) for m in MEASURES}, None
        for n in range(self.config.tune_rounds):
            for which in (0, 1) if n % 2 == 0 else (1, 0):
                config, side = ((first, self.side), (second, 1 - self.side))[which]
                server = bench.server(side, config)
                if which == 1 and rows is None:
                    rows = _check_rows(reference, bench.rows(server, config), config)
                rates["prefill"][which].append(bench.prefill(server, config, bench.samples))
                rates["decode"][which].append(bench.decode(server))
            if (
                early
                and n + 1 == LOOK_EARLY
                and any(paired_ratio(*rates[m])["high"] < 1 for m in MEASURES)
            ):
                break
        return rates, rows

    def walk(self) -> tuple[dict, dict[str, float], str]:
        """Return what was kept, the noise bounds and why the search ended.

        It passes over the options until a pass keeps nothing, or the time is spent.
        """
        config = self.config
        first = self.trial("noise", {}, {})
        print(line(first), flush=True)
        noise, kept = {m: noise_bound(first[m]["ratio"]) for m in MEASURES}, {}
        walked = set()  # what was tried over what, in an earlier pass
        # Never back to what was left for something better: two settings that only noise tells
        # apart would alternate for ever.
        been = [{}]
        while True:
            before = dict(kept)
            for name, value in options(config):
                tried = _without_defaults(config, _with_change(config, kept, name, value))
                path = self.known("change", kept, tried)
                if tried in been or path in walked:
                    continue
                walked.add(path)
                if not path.is_file():  # one that was made costs nothing
                    seconds = [r["seconds"] for r in self.records]
                    to_come = 2 if kept else 1  # the next one, and the confirmation
                    if sum(seconds) + max(seconds) * to_come > 60 * config.tune_minutes:
                        return kept, noise, f"{config.tune_minutes:g} minutes spent (tune_minutes)"
                record = self.trial("change", kept, tried, noise)
                print(line(record), flush=True)
                if record["state"] == "kept":
                    kept, self.side = tried, 1 - self.side
                    been.append(kept)
            if kept == before:
                return kept, noise, "everything tried"


def _check_rows(reference: Rows, found: Rows, config: Config) -> dict:
    """Return how far rows under other settings are from the reference's.

    Raise SampleError where that is more than FLOORS times what another batch alone does (at least
    one step of the format).
    """
    step = torch.finfo(getattr(torch, config.dtype)).eps
    distances = moved(found.states, reference.states)
    limits = tuple(FLOORS * max(floor, step) for floor in reference.floor)
    if any(not d <= limit for d, limit in zip(distances, limits)):
        raise SampleError(
            f"captured rows differ: distance {distances[0]:.4f} (median), {distances[1]:.4f} "
            f"(90 % of tokens), where another batch allows {limits[0]:.4f}, {limits[1]:.4f}"
        )
    return {"distance": distances, "limit": limits}


def _without_defaults(config: Config, changes: dict) -> dict:
    """Return the changes that differ from the profile."""
    return {name: value for name, value in changes.items() if value != getattr(config, name)}


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to this search."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EyasError(
                f"run {folder.parent.name!r} is being tuned already",
                "one search at a time",
                "wait for it, or end it",
            ) from None
        yield


def tune(config: Config, target: Target, prompts: PromptSet) -> dict:
    """Search, confirm, and return the result.

    result.json and, for a confirmed gain, tuned.yaml are written into the run's tune folder.
    Raise EyasError where the profile's own server fails, the search in that folder was begun with
    other settings, or it is running elsewhere.
    """
    if config.server_url:
        raise EyasError(
            f"server_url = {config.server_url!r} names a server that runs already",
            "an empty one: tuning starts servers of its own",
            "-p server_url ''",
        )
    options(config)  # raises before a server starts
    tokenizer = target.tokenizer()
    samples = [
        encode(c, tokenizer, config.max_length)
        for c in usable(chosen(config, prompts))[: config.tune_samples]
    ]
    if not samples:
        raise EyasError(
            f"no conversation of {prompts.path.name} is asked for",
            "train_samples or heldout_samples to find some",
            "python -m eyas prompts show",
        )
    identity = {name: getattr(config, name) for name in SAME_SEARCH}
    identity |= {
        "boundaries": boundaries_of(config, target.n_blocks).feeding,
        "target": target.fingerprint,
        "sglang": importlib.metadata.version("sglang"),
        "cores": len(os.sched_getaffinity(0)),
    }
    identity = json.loads(json.dumps(identity))
    with _alone(config.tune_dir):
        path = config.tune_dir / "search.json"
        begun = (
            read_json(path)
            if path.is_file() and any(config.tune_dir.glob("noise-*.json"))
            else identity
        )  # without a trial nothing was begun
        different = [
            f"{name} = {begun.get(name)!r}, now {identity[name]!r}"
            for name in identity
            if begun.get(name) != identity[name]
        ]
        if different:
            raise EyasError(
                f"the search of run {config.run_name!r} was begun with {'; '.join(different)}",
                "the same again",
                f"python -m eyas data rm {config.run_name} --part tune --yes, then begin anew",
            )
        write_json(path, identity)
        search = Search(config, target, samples)
        try:
            kept, noise, ended = search.walk()
            confirmed = search.trial("confirmation", {}, kept, noise) if kept else None
        finally:
            search.bench.close()
            search.bench.pool.shutdown()
        result = _result(search, kept, noise, ended, confirmed)
        (config.tune_dir / "tuned.yaml").unlink(missing_ok=True)
        if result["helped"]:
            write_text(config.tune_dir / "tuned.yaml", profile_text(config, result))
        write_json(config.tune_dir / "result.json", seal(result))
    return result


def _result(
    search: Search, kept: dict, noise: dict[str, float], ended: str, confirmed: dict | None
) -> dict:
    changes = [r for r in search.records if r["kind"] == "change"]
    first = search.records[0]
    unchanged = [
        r
        for r in [*changes, *([confirmed] if confirmed else [])]
        if not r["kept"] and "prefill" in r
    ]
    last = unchanged[-1] if unchanged else None
    measured = {
        m: {
            "baseline": float(np.median((confirmed or first)[m]["kept"])),
            "tuned": float(np.median(confirmed[m]["tried"])) if confirmed else None,
            "ratio": confirmed[m]["ratio"] if confirmed else None,
            "noise": noise[m],
            "drift": float(np.median(last[m]["kept"]) / np.median(first[m]["kept"]))
            if last
            else None,  # of the profile's own settings, from start to end
        }
        for m in MEASURES
    }
    return {
        "run_name": search.config.run_name,
        "kept": kept,
        "helped": bool(confirmed) and confirmed["state"] == "kept",
        "measured": measured,
        "ended": ended,
        "trials": search.records,
        "seconds": sum(r["seconds"] for r in search.records),
        "device": search.config.device,
        "cores": len(os.sched_getaffinity(0)),
        "sglang": importlib.metadata.version("sglang"),
        "target": search.bench.target.name,
    }


def profile_text(config: Config, result: dict) -> str:
    """Return a profile with the settings that helped, and what was measured in its head."""
    changed = config.changed | result["kept"]
    values = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in changed.items()
        if not name.startswith("tune_")
    }
    head = [
        f"# Run {config.run_name} with the server settings that `python -m eyas study server`"
        f" kept, measured on {result['cores']} CPU cores, device {result['device']}, "
        f"SGLang {result['sglang']}:",
        *(f"# {sentence}" for sentence in _gains(result)),
        "# Changed: "
        + ", ".join(
            f"{name} {getattr(config, name)!r} -> {value!r}"
            for name, value in result["kept"].items()
        ),
    ]
    return "\n".join(head) + "\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def find_result(config: Config) -> dict | None:
    """Return the result of this run's search; None where there is none, or it was altered."""
    try:
        result = read_json(config.tune_dir / "result.json")
    except (OSError, ValueError):
        return None
    return result if is_sealed(result) else None


def line(record: dict) -> str:
    """Return one trial in a line."""
    ratios = "".join(f" {m} {interval_text(record[m]['ratio'])}," for m in MEASURES if m in record)
    return (
        f"{trial_name(record)}:{ratios}"
        + f" {record['state']}" * (record["kind"] != "noise")
        + f" ({why(record)})" * bool(record["reason"])
        + f" {record['seconds']:.0f} s"
    )


def why(record: dict) -> str:
    """Return the reason in a line: of a server's log, its last line."""
    lines = [text.strip() for text in record["reason"].splitlines() if text.strip()]
    return "".join(lines) if len(lines) < 2 else f"{lines[0].rstrip(':')} ... {lines[-1][:160]}"


def trial_name(record: dict) -> str:
    """Return what a trial changed over what was kept before it."""
    if record["kind"] != "change":
        return (
            "the same settings twice"
            if record["kind"] == "noise"
            else "all that was kept, in new servers"
        )
    changed = {
        name: value for name, value in record["tried"].items() if record["kept"].get(name) != value
    }
    changed |= {name: "as the profile" for name in record["kept"] if name not in record["tried"]}
    return ", ".join(
        f"{name} {str(value).lower() if isinstance(value, bool) else value}"
        for name, value in changed.items()
    )


def _gains(result: dict) -> list[str]:
    lines = []
    for m, r in result["measured"].items():
        drift = f"; drift of the baseline {r['drift']:.3f}" if r["drift"] else ""
        gain = (
            f"{r['baseline']:,.1f} tok/s"
            if r["ratio"] is None
            else f"{r['baseline']:,.1f} -> {r['tuned']:,.1f} tok/s, "
            f"ratio {interval_text(r['ratio'])}"
        )
        lines.append(f"{m}: {gain}; equals differ by up to a factor of {r['noise']:.3f}{drift}")
    return lines


def summary(result: dict) -> str:
    """Return the answer, for a terminal and for the notebook."""
    tried = [r for r in result["trials"] if r["kind"] == "change"]
    refused = sum(r["state"] == "refused" for r in tried)
    answer = (
        f"Kept: {', '.join(f'{name} {value}' for name, value in result['kept'].items())}."
        if result["helped"]
        else "No setting helped."
    )
    if result["kept"] and not result["helped"]:
        answer += (
            f" ({', '.join(result['kept'])} looked better in its trial and was not confirmed.)"
        )
    more = (
        ""
        if result["ended"] == "everything tried"
        else "; the same command with more minutes continues"
    )
    return "\n".join(
        [
            f"{answer} {len(tried)} changes tried{f', {refused} refused' if refused else ''}, "
            f"{result['seconds'] / 60:.1f} minutes; ended: {result['ended']}{more}.",
            *_gains(result),
        ]
    )


def how_to_tune(config: Config) -> str:
    """Return the line that says how to get a result."""
    return (
        f"Run {config.run_name} has no tuned settings: python -m eyas study server searches for "
        f"some within {config.tune_minutes:g} minutes (-p tune_minutes N for more); "
        "nothing else needs it."
    )


def tuned_profile(config: Config) -> str:
    """Return the path of tuned.yaml as a command takes it."""
    return os.path.relpath(config.tune_dir / "tuned.yaml")


def gains_table(result: dict) -> pd.DataFrame:
    """Return baseline against tuned, a row for each measure."""
    rows = [
        {
            "measure": m,
            "baseline, tok/s": f"{r['baseline']:,.1f}",
            "tuned, tok/s": f"{r['tuned']:,.1f}" if r["tuned"] else "-",
            "ratio": interval_text(r["ratio"]) if r["ratio"] else "-",
            "equals differ by up to": f"{r['noise']:.3f}",
            "baseline, end / begin": f"{r['drift']:.3f}" if r["drift"] else "-",
        }
        for m, r in result["measured"].items()
    ]
    return pd.DataFrame(rows)


def trials_table(result: dict) -> pd.DataFrame:
    """Return every trial: its change, the two ratios as intervals, and its outcome.

    A change is over what had been kept. The ratios of a refused trial are None.
    """
    return pd.DataFrame(
        [
            {
                "change": trial_name(r),
                **{m: r[m]["ratio"] if m in r else None for m in MEASURES},
                "outcome": r["state"],
                "why": why(r) if r["reason"] else "",
            }
            for r in result["trials"]
        ]
    )
