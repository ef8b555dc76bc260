"""Extraction through the real server under random kills: `.venv/bin/python benchmarks/soak.py`
(10,000 samples, 50 kills, about 20 minutes on 2 cores).

A tiny target, so that samples and kills are many and the model costs little. Client, scheduler and
whole server are killed with SIGKILL at random moments; each time the same extraction is started
again. At the end every byte is read back.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from eyas.capture.extract import extract
from eyas.capture.verify import verify
from eyas.config import Config
from eyas.errors import EyasError
from eyas.models.target import load_target
from eyas.progress import bytes_text
from eyas.prompts.prompt_set import load_prompts
from eyas.server.serve import need_servers, server_up
from eyas.store.reader import Store

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.tiny import make_tiny_target

WORDS = (
    "the young eagle leaves its nest before it can hunt and someone has to teach it what the "
    "old bird knows"
).split()


@dataclass(frozen=True)
class Soak:
    """`client_rss` and `server_rss`:

    (samples in the store, resident bytes) as time went by; of the client its smallest and largest
    settled value.
    """

    samples: int
    extracted: int
    doubled: int
    damaged: int
    kills: dict[str, int]
    seconds: float
    client_rss: list[tuple[int, int]]
    server_rss: list[tuple[int, int]]

    def __str__(self) -> str:
        def span(series):
            return (
                (
                    f"{bytes_text(series[0][1])} at {series[0][0]:,} samples, "
                    f"{bytes_text(series[-1][1])} at {series[-1][0]:,}"
                )
                if series
                else "not measured"
            )

        return (
            f"{self.samples:,} samples, kills {self.kills}, {self.seconds:.0f} s: lost "
            f"{self.samples - self.extracted}, doubled {self.doubled}, torn "
            f"{self.damaged}\n"
            f"client's memory: {span(self.client_rss)}\nserver's memory: {span(self.server_rss)}"
        )


def soak(samples: int, kills: int, server_kills: int, folder: Path, seed: int = 0) -> Soak:
    """Extract `samples` with that many kills, `server_kills` of them of the server (scheduler and
    whole in turn). EYAS_DATA is set to `folder`.
    """
    os.environ["EYAS_DATA"] = str(folder)
    target = load_target(str(make_tiny_target(folder / "tiny")))
    prompts = load_prompts(_write_prompts(folder / "prompts.jsonl", samples))
    config = Config.create(
        run_name="soak",
        target=str(target.folder),
        boundaries=(1, 2),
        train_samples=samples,
        heldout_samples=1,
        max_length=64,
        prompt_set=str(prompts.path),
        shard_mib=1,
    )
    rng, started = random.Random(seed), time.monotonic()
    plan = ["client"] * (kills - server_kills) + ["scheduler", "server"] * (server_kills // 2)
    rng.shuffle(plan)
    moments = sorted(
        (rng.uniform(0, 0.97 * samples) for _ in plan), reverse=True
    )  # how many samples the store has then
    counts, client_rss, server_rss = dict.fromkeys(("client", "scheduler", "server"), 0), [], []
    server = server_up(config, tied=True)
    try:
        while True:
            child = os.fork()
            if not child:
                os._exit(_client(config, target, prompts, folder / "client.log"))
            victim = plan.pop() if plan else None
            _watch(child, config, moments.pop() if victim else None, server, client_rss, server_rss)
            if victim:
                time.sleep(rng.uniform(0, 0.2))
                counts[victim] += 1
                if victim == "client":
                    os.kill(child, signal.SIGKILL)  # a zombie does not mind
                else:
                    family = server.process().children(recursive=True)
                    one = [
                        p
                        for p in family
                        if "scheduler" in p.name() or "scheduler" in " ".join(p.cmdline())
                    ]
                    for process in one if victim == "scheduler" else [server.process(), *family]:
                        process.kill()
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if server.process() is None or victim in ("scheduler", "server"):
                server.down()
                server = server_up(config, tied=True)
            if code == 0:
                break
    finally:
        server.down()
    report, store = (
        verify(config.store_dir, prompts, target.tokenizer()),
        Store.open(config.store_dir),
    )
    ids = store.samples()
    return Soak(
        samples,
        len(set(ids)),
        len(ids) - len(set(ids)),
        len(report.damaged) + (not report.ok),
        counts,
        time.monotonic() - started,
        client_rss,
        server_rss,
    )


def _client(config, target, prompts, log: Path) -> int:
    with open(log, "a") as file:
        os.dup2(file.fileno(), 2)
    try:
        return 1 if extract(config, need_servers(config), target, prompts).failed else 0
    except EyasError as error:
        print(error, file=sys.stderr, flush=True)
        return 2


def _watch(
    child: int, config, moment: float | None, server, client_rss: list, server_rss: list
) -> None:
    """Until the store has more samples than `moment` (None: for ever) or the child ends; notes
    memory.
    """
    process = psutil.Process(child)
    before = _count(config)
    while not _ended(child):
        time.sleep(0.05)
        count = _count(config)
        try:
            if count > before and (rss := process.memory_info().rss):
                client_rss.append((count, rss))
                server_rss.append(
                    (
                        count,
                        max(p.memory_info().rss for p in server.process().children(recursive=True)),
                    )
                )
        except (psutil.Error, AttributeError, ValueError):  # one of them has just ended
            pass
        if moment is not None and count > moment:
            return


def _count(config) -> int:
    try:
        return len(Store.open(config.store_dir).samples())
    except EyasError:
        return 0


def _ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _write_prompts(path: Path, count: int) -> Path:
    with open(path, "w") as file:
        for n in range(count):
            ask, answer = (
                " ".join(WORDS[(n * k + i * (1 + n % 5)) % len(WORDS)] for i in range(2 + n % m))
                for k, m in ((7, 5), (3, 9))
            )
            message = [
                {"role": "user", "content": f"{ask} {n}"},
                {"role": "assistant", "content": answer},
            ]
            file.write(
                json.dumps(
                    {
                        "id": f"p{n:05d}",
                        "category": "chat",
                        "topic": f"t{n % 7}",
                        "split": "train",
                        "messages": message,
                    }
                )
                + "\n"
            )
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--server-kills", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eyas-soak-") as place:
        print(soak(args.samples, args.kills, args.server_kills, Path(place)))
