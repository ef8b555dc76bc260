"""What trainer.py and quality.py share: equal data for every trainer, and a process for each of
them that takes steps on command.

`python benchmarks/contestants.py JOB.json` is our own process; the peers' is peers.py, run by the
Python that EYAS_PEER_SPECFORGE or EYAS_PEER_SPECULATORS names
(one of an environment that has specforge 0.2.0 or speculators 0.9.0, see tests/test_formats.py). A
peer without its variable is left out, and said to be.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import torch

from eyas.config import Config
from eyas.models.boundaries import boundaries_of
from eyas.models.drafter import Drafter, DrafterConfig
from eyas.models.target import Target, target_of
from eyas.models.vocab import DraftVocab, choose_vocab, count_tokens
from eyas.store.formats.exporting import export_store
from eyas.store.reader import Store
from eyas.training.schedule import plan
from eyas.training.trainer import train

sys.path.insert(0, str(Path(__file__).parent))
from peers import Commands, memory_bytes, status_bytes

HERE = Path(__file__).parent
PEERS = {  # name -> variable, what pip installs
    "specforge": (
        "EYAS_PEER_SPECFORGE",
        "--no-deps -r requirements/cpu.txt && PEER/bin/pip install --no-deps specforge==0.2.0",
    ),
    "speculators": ("EYAS_PEER_SPECULATORS", "speculators==0.9.0"),
}
# options of peers.py; heap: the allocator keeps what is freed, which saves a CPU the page faults of
# large temporary tensors
DEFAULTS = {
    "ours": {"heap": False},
    "specforge": {
        "heap": True,
        "compile": False,
        "compact": False,
        "batching": "padded",
        "weights": "float32",
        "pad": False,
    },
    "speculators": {
        "heap": True,
        "attention": "sdpa",
        "optimizer": "adamw",
        "norms": True,
        "pad": False,
    },
}
HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}  # glibc's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", default="reference", help="of which run the store is")
    parser.add_argument(
        "-p",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="another setting of the run, e.g. -p run_name NAME",
    )
    parser.add_argument("--threads", type=int, default=2)


def load(args, **defaults) -> tuple[Config, Store, Target]:
    """The run's configuration (defaults, then what was given with -p), its store and its target."""
    config = Config.load(
        args.profile,
        **(defaults | dict(args.p) | {"threads": args.threads, "without_parity": True}),
    )
    target = target_of(config)
    return (
        dataclasses.replace(config, target=str(target.folder)),
        Store.open(config.store_dir),
        target,
    )


def part(store: Store, ids: list[str]) -> Store:
    """The same files, of which only these samples are seen."""
    return Store(
        store.folder,
        store.manifest,
        store.index[store.index["id"].isin(ids)].reset_index(drop=True),
    )


def choose(store: Store, column: str, tok: int, seed: int = 0) -> list[str]:
    """Training samples in random order until their `column` ("length" or "loss_tok") adds up to
    `tok`; all of them if it never does.
    """
    rows = store.index[
        (store.index["state"] == "extracted")
        & (store.index["split"] == "train")
        & (store.index["loss_tok"] > 0)
    ]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).numpy()
    rows = rows.iloc[order]
    return list(rows["id"][rows[column].cumsum() - rows[column] < tok])


def length(counts: pd.DataFrame) -> float:
    """Acceptance length, bonus token included, of a table of the walk."""
    return 1 + counts["accepted"].sum() / counts["verify_steps"].sum()


def available(kinds: list[str]) -> list[str]:
    """Those whose environment is known; says how to have the others."""
    for kind in kinds:
        if kind in PEERS and not os.environ.get(PEERS[kind][0]):
            print(
                f"{kind} is left out: {PEERS[kind][0]} names no Python; python3.11 -m "
                f"venv PEER && PEER/bin/pip install {PEERS[kind][1]}; "
                f"{PEERS[kind][0]}=PEER/bin/python"
            )
    return [kind for kind in kinds if kind not in PEERS or os.environ.get(PEERS[kind][0])]


class Data:
    """A part of a store for all trainers: ours reads the store, the peers read files that
    `export_store` wrote of it into `folder`.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        target: Target,
        ids: list[str],
        folder: Path,
        kinds: list[str],
    ):
        config = dataclasses.replace(
            config, boundaries=boundaries_of(config, target.n_blocks).feeding
        )
        self.config, self.store, self.target, self.folder = config, part(store, ids), target, folder
        rows = self.store.index
        self.lengths, self.loss_tok = (
            dict(zip(rows["id"], rows["length"].astype(int))),
            dict(zip(rows["id"], rows["loss_tok"].astype(int))),
        )
        self.rows = {id: row for row, id in enumerate(self.store.samples())}
        self.vocab = choose_vocab(
            count_tokens(self.store, list(self.rows)), config.draft_vocab_size
        )
        for kind in set(kinds) & set(PEERS):
            export_store(self.store, kind, folder / kind, config.boundaries)

    def steps(self, seed: int) -> list[list[str]]:
        """Sample ids of each optimiser step of one epoch, the same for all."""
        return [ids for _, ids in plan(self.lengths, 1.0, self.config.batch_tok, seed)]

    def job(self, kind: str, dtype: str, learning_rate: float, seed: int, options: dict) -> dict:
        return {
            "kind": kind,
            "target": str(self.target.folder),
            "files": str(self.folder / kind),
            "vocab": self.vocab.ids.tolist(),
            "boundaries": list(self.config.boundaries),
            "draft_steps": self.config.draft_steps,
            "steps": [[self.rows[id] for id in ids] for ids in self.steps(seed)],
            "max_length": max(self.lengths.values()),
            "batch_tok": self.config.batch_tok,
            "learning_rate": learning_rate,
            "dtype": dtype,
            "threads": self.config.threads,
            "seed": seed,
            "options": DEFAULTS[kind] | options,
        }

    def our_config(self, dtype: str, learning_rate: float, seed: int) -> Config:
        return dataclasses.replace(
            self.config,
            run_name="benchmark",
            epochs=1.0,
            train_dtype=dtype,
            learning_rate=learning_rate,
            seed=seed,
        )


class Contestant:
    """A process that trains on command.

    Its standard error goes to a file, whose end is shown when it dies.
    """

    def __init__(
        self, data: Data, kind: str, dtype: str, learning_rate: float, seed: int = 0, **options
    ):
        self.kind, self.folder = kind, Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=data.folder))
        job = data.job(kind, dtype, learning_rate, seed, options)
        if kind == "ours":
            job |= {
                "store": str(data.store.folder),
                "ids": list(data.rows),
                "config": dataclasses.asdict(data.our_config(dtype, learning_rate, seed)),
            }
        (self.folder / "job.json").write_text(json.dumps(job))
        self.options = job["options"]
        command = (
            [os.environ[PEERS[kind][0]], HERE / "peers.py"]
            if kind in PEERS
            else [sys.executable, HERE / "contestants.py"]
        )
        environment = {
            name: value
            for name, value in os.environ.items()
            if name != "PYTHONPATH" or kind == "ours"
        }
        environment |= {
            "OMP_NUM_THREADS": str(job["threads"]),
            "HF_HUB_OFFLINE": "1",
            "EYAS_DATA": str(self.folder),
        } | (HEAP if self.options["heap"] else {})
        with open(self.folder / "stderr", "wb") as log:
            self.process = subprocess.Popen(
                [*command, self.folder / "job.json"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )
        self._answer()

    def ask(self, **command) -> dict:
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{self.kind} {self.options} ended: "
                + "\n".join((self.folder / "stderr").read_text().splitlines()[-12:])
            )
        return json.loads(line)

    def __enter__(self) -> "Contestant":
        return self

    def __exit__(self, *_) -> None:
        self.process.stdin.close()
        self.process.wait(60)


class Ended(Exception):
    """No more commands."""


def main() -> None:
    """Ours: `train` itself, held back between its optimiser steps."""
    commands, job = Commands(), json.loads(Path(sys.argv[1]).read_text())
    config, store = Config.create(**job["config"]), part(Store.open(Path(job["store"])), job["ids"])
    target = target_of(config)
    torch.set_num_threads(config.threads)
    drafter = Drafter(
        DrafterConfig.from_target(target, config.boundaries, config.draft_vocab_size),
        DraftVocab(torch.tensor(job["vocab"]), target.vocab_size),
    )
    base, clock, left, losses, watching = memory_bytes("VmRSS"), 0.0, 0, [], None
    del drafter

    def obey() -> None:
        """Answer commands until there are steps to take."""
        nonlocal clock, left, losses, watching
        while command := commands.next():
            if "memory" in command:
                commands.answer(base=base, held=0, peak=team_peak_bytes())
                continue
            left, losses = command["steps"], []
            watching = (
                {"profile": Profile, "flops": Flops}[command["watch"]]()
                if "watch" in command
                else None
            )
            clock = time.perf_counter()
            return
        raise Ended

    def on_step(done: dict) -> None:
        nonlocal left
        left -= 1
        losses.append(done["loss"])
        if not left:
            seconds = time.perf_counter() - clock
            commands.answer(
                seconds=seconds, losses=losses, **(watching.found() if watching else {})
            )
            obey()

    commands.answer(ready=True)
    try:
        obey()
        train(config, store, target, on_step)
    except Ended:
        pass


def team_peak_bytes() -> int:
    """This process's largest resident set, and of each process that shares its steps the largest
    too, without the pages that others have mapped as well. Their peaks may be at different moments.
    """
    total = memory_bytes("VmHWM")
    for pid in Path("/proc/self/task", str(os.getpid()), "children").read_text().split():
        rollup = Path("/proc", pid, "smaps_rollup").read_text()
        total += status_bytes(Path("/proc", pid, "status").read_text(), "VmHWM") - sum(
            status_bytes(rollup, name) for name in ("Shared_Clean", "Shared_Dirty")
        )
    return total


class Profile:
    """Seconds of each operator by itself, in the first process; `found` ends it."""

    def __init__(self):
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.profiler.__enter__()

    def found(self) -> dict:
        self.profiler.__exit__(None, None, None)
        return {
            "operators": {
                event.key: (event.self_cpu_time_total / 1e6, event.count)
                for event in self.profiler.key_averages()
            }
        }


class Flops:
    """Floating-point operations of the matrix products, forward and backward, in the first process;
    `found` ends it.
    """

    def __init__(self):
        from torch.utils.flop_counter import FlopCounterMode

        aten = torch.ops.aten  # the counter knows the fused attention of GPUs alone
        more = {
            aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
        }
        self.counter = FlopCounterMode(display=False, custom_mapping=more)
        self.counter.__enter__()

    def found(self) -> dict:
        self.counter.__exit__(None, None, None)
        return {"flops": self.counter.get_total_flops()}


def attention_flops(
    query, key, value, dropout_p=0.0, is_causal=False, *, out_val=None, **more
) -> int:
    """Two products over all pairs of a query and a key, half of them where causal.

    Arguments are shapes [batch, heads, tokens, head_dim].
    """
    return (
        2
        * query[0]
        * query[1]
        * query[2]
        * key[2]
        * (query[3] + value[3])
        // (2 if is_causal else 1)
    )


def attention_backward_flops(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    dropout_p=0.0,
    is_causal=False,
    *,
    out_val=None,
    **more,
) -> int:
    """Five products: the scores again, and the gradients of weights, values, queries and keys."""
    return attention_flops(query, key, value, dropout_p, is_causal) * 5 // 2


if __name__ == "__main__":
    main()
