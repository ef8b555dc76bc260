"""What extraction costs, as ratios measured side by side: `.venv/bin/python
benchmarks/extraction.py` (about 10 minutes on 2 cores, nothing else running).

1. the same server without and with capture, in interleaved rounds: prompt tokens per second, and
their ratio with its interval over rounds; 2. writing a store against writing the same bytes to one
file, both with fsync; 3. the stock way, hidden states as JSON in the answer, of one boundary where
ours stores all that were asked for; 4. peak memory of client and server, for a few samples and for
four times as many.

1, 3 and 4 for the embedded target, whose prefill takes nearly all the time on a CPU, and for a
small random one (4 blocks of 1,024), whose prefill takes little: that is nearer to a GPU's case,
and what capture costs shows there.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import torch

from eyas.capture.extract import Fleet, _run, make_manifest
from eyas.config import Config
from eyas.intervals import interval_text, ratio_interval
from eyas.models.boundaries import boundaries_of
from eyas.models.target import load_target
from eyas.progress import Progress, bytes_text
from eyas.prompts.chat_template import encode
from eyas.prompts.prompt_set import chosen, load_prompts
from eyas.server.serve import LIMITS, Server, _free_port, server_command, started_ticks
from eyas.store.reader import Planned, Rows
from eyas.store.writer import StoreWriter

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.tiny import make_tiny_target


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--store-mib", type=int, default=1024)
    args = parser.parse_args()
    embedded = load_target("embedded")
    with tempfile.TemporaryDirectory(prefix="eyas-", dir=os.environ.get("EYAS_DATA")) as folder:
        os.environ["EYAS_DATA"] = folder
        small = make_tiny_target(Path(folder) / "small", hidden=1024)
        config = Config.load(
            "demo", run_name="benchmark", train_samples=args.samples, heldout_samples=1
        )
        writing(embedded, config, Path(folder), args.rounds, args.store_mib)
        for target, boundaries in ((embedded, ()), (load_target(str(small)), (1, 2))):
            config = dataclasses.replace(config, target=str(target.folder), boundaries=boundaries)
            print(
                f"-- {target.n_blocks} blocks of {target.hidden_size}, boundaries "
                f"{list(boundaries_of(config, target.n_blocks).stored)}"
            )
            with start(config, target, Path(folder)) as server:
                serving(target, config, server, args.rounds, args.samples)


def start(config: Config, target, folder: Path) -> Server:
    spool = folder / "spool"
    port = _free_port()
    command, environment = server_command(
        config, target.folder, boundaries_of(config, target.n_blocks).stored, port, spool
    )
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(
            [*command, "--enable-return-hidden-states"],
            stdout=log,
            stderr=log,
            env=os.environ | environment,
            start_new_session=True,
        )
    (folder / "server.json").write_text("{}")
    return Server(f"http://127.0.0.1:{port}", process.pid, started_ticks(process.pid), folder).wait(
        300
    )


def serving(target, config: Config, server: Server, rounds: int, n_samples: int) -> None:
    prompts, tokenizer = load_prompts(config.prompt_path), target.tokenizer()
    samples = [encode(c, tokenizer, config.max_length) for c in chosen(config, prompts)][:n_samples]
    tok = sum(len(s.input_ids) for s in samples)
    manifest = make_manifest(config, server.status(), target, prompts, tokenizer)

    def plain() -> float:
        with (
            httpx.Client(base_url=server.url, timeout=600, limits=LIMITS) as client,
            ThreadPoolExecutor(config.concurrency) as pool,
        ):
            started = time.perf_counter()
            list(pool.map(lambda s: ask(client, s), samples))
            return tok / (time.perf_counter() - started)

    def captured(times: int = 1) -> float:
        many = [dataclasses.replace(s, id=f"{s.id}-{n}") for n in range(times) for s in samples]
        with tempfile.TemporaryDirectory() as folder:
            fleet = Fleet(config, [server], [server.status()])
            writer = StoreWriter(
                Path(folder) / "store", manifest, target.head(), config.shard_mib * 2**20
            )
            started = time.perf_counter()
            writer.plan([Planned(s.id, s.split, s.category, len(s.input_ids)) for s in many])
            with Progress(len(many)) as progress:
                _run(fleet, writer, many, progress, Counter())
            writer.close()
            elapsed_s = time.perf_counter() - started
            fleet.close()
            return times * tok / elapsed_s

    def stock(few) -> float:
        with (
            httpx.Client(base_url=server.url, timeout=600, limits=LIMITS) as client,
            ThreadPoolExecutor(config.concurrency) as pool,
        ):
            started = time.perf_counter()
            for answer in pool.map(lambda s: ask(client, s, return_hidden_states=True), few):
                torch.tensor(answer["meta_info"]["hidden_states"][0])  # [T, H], of one boundary
            return sum(len(s.input_ids) for s in few) / (time.perf_counter() - started)

    plain(), captured()  # warm
    rates = {"plain": [], "captured": []}
    for n in range(rounds):
        for name, measure in (("plain", plain), ("captured", captured))[:: 1 if n % 2 else -1]:
            rates[name].append(measure())
    ratio = interval_text(ratio_interval(rates["captured"], rates["plain"], 0).as_dict())
    print(
        f"prefill: {np.median(rates['plain']):,.0f} tok/s plain, "
        f"{np.median(rates['captured']):,.0f} tok/s into a store; ratio {ratio} over "
        f"{rounds} rounds"
    )
    few = samples[: n_samples // 4]
    triples = [(stock(few), captured(), plain()) for _ in range(3)]
    ours, theirs = (np.median([1 / t[i] - 1 / t[2] for t in triples]) for i in (1, 0))
    print(
        f"JSON in the answer, one boundary: {np.median([t[0] for t in triples]):,.0f} "
        f"tok/s; ours, {len(manifest['boundaries'])} boundaries: "
        f"{np.median([t[1] / t[0] for t in triples]):.1f} times as fast; on top of "
        f"prefill {1e6 * theirs:,.0f} and {1e6 * ours:,.0f} microseconds a token"
    )
    for times in (1, 4):
        captured(times)
        print(
            f"peak memory after {times * n_samples} more samples: client "
            f"{bytes_text(peak(os.getpid()))}, server's scheduler "
            f"{bytes_text(max(peak(p.pid) for p in server.process().children(recursive=True)))}"
        )


def ask(client: httpx.Client, sample, **more) -> dict:
    answer = client.post(
        "/generate",
        json={
            "input_ids": sample.input_ids.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            **more,
        },
    )
    answer.raise_for_status()
    return answer.json()


def peak(pid: int) -> int:
    """Largest resident set so far, bytes."""
    line = next(
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def writing(target, config: Config, folder: Path, rounds: int, mib: int) -> None:
    length, boundaries = 256, boundaries_of(config, target.n_blocks).stored
    states = {b: torch.randn(length, target.hidden_size).bfloat16() for b in boundaries}
    ids, mask = torch.arange(length), torch.ones(length, dtype=torch.bool)
    n = mib * 2**20 // sum(t.nbytes for t in states.values())
    manifest = {
        "target": {
            "name": target.name,
            "fingerprint": target.fingerprint,
            "rms_norm_eps": target.rms_norm_eps,
        },
        "boundaries": list(boundaries),
        "dtype": "bfloat16",
        "hidden_size": target.hidden_size,
        "prompts": {"hash": None},
    }
    block = b"".join(t.view(torch.uint8).numpy().tobytes() for t in states.values())

    def store(path: Path) -> float:
        writer = StoreWriter(path, manifest, target.head(), 64 * 2**20)
        started = time.perf_counter()
        writer.plan([Planned(f"s{i}", "train", "x", length) for i in range(n)])
        for i in range(n):
            writer.add(Rows(f"s{i}", "train", "x", ids, mask, states))
        writer.close()
        return n * len(block) / (time.perf_counter() - started)

    def plain(path: Path) -> float:
        started = time.perf_counter()
        with open(path, "wb", buffering=0) as file:
            for _ in range(n):
                file.write(block)
            os.fsync(file.fileno())
        return n * len(block) / (time.perf_counter() - started)

    rates = {"plain": [], "store": []}
    for r in range(rounds):
        for name, measure in (("plain", plain), ("store", store))[:: 1 if r % 2 else -1]:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                rates[name].append(measure(Path(place) / "x"))
    ratio = interval_text(ratio_interval(rates["store"], rates["plain"], 0).as_dict())
    print(
        f"writing {mib} MiB with fsync: {bytes_text(int(np.median(rates['plain'])))}/s "
        f"plain, {bytes_text(int(np.median(rates['store'])))}/s as a store; "
        f"ratio {ratio} over {rounds} rounds"
    )


if __name__ == "__main__":
    main()
