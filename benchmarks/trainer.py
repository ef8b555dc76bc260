"""Our trainer's speed and memory beside SpecForge's and speculators', measured together:
`.venv/bin/python benchmarks/trainer.py`

15 minutes on 2 cores, nothing else running, from the store of `make report P=reference`;
EYAS_PEER_SPECFORGE and EYAS_PEER_SPECULATORS as contestants.py says.

All train a drafter of the same sizes on the same samples, the same ones in each optimiser step,
each in its own process with the same threads, in turns of a few steps,
so that noise hits all alike; ours has a process for each thread, whose memory counts as one. Each
peer first tries its own options on a few steps and keeps the faster. A step is everything from
samples to changed weights; ours also
reads its samples from the store, while the peers' wait in memory, as their own readers gave them,
and their step begins with their own collator.
Then: where our time goes, and how far it is from what the machine's matrix products would allow.
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from eyas.files import write_json
from eyas.intervals import interval_text, ratio_interval

sys.path.insert(0, str(Path(__file__).parent))
from contestants import DEFAULTS, Contestant, Data, add_arguments, available, choose, load

LEARNING_RATE = 1.0e-3
CHOICES = {  # peer -> option -> what it may be
    "specforge": {
        "heap": (True, False),
        "pad": (True, False),
        "batching": ("padded", "accumulated"),
        "compact": (False, True),
        "compile": (False, True),
        "weights": ("float32", "bfloat16"),
    },
    "speculators": {"heap": (True, False), "attention": ("eager", "sdpa"), "pad": (True, False)},
}
WHY = {
    "specforge": "OnlineEagle3Model, attention_backend sdpa "
    "(flex attention has no backward on a CPU, "
    "fa and usp need flash_attn); its Triton loss is replaced by "
    "core.loss._compute_loss of the same file; BF16Optimizer (AdamW, clipping at 0.5); "
    "target head in bf16, as its TargetHead is",
    "speculators": (
        "Eagle3DraftModel with its default norms, loss kl_div eager (the fused one is Triton; "
        "flex attention has no backward on a CPU); AdamW, clipping at 1.0"
    ),
    "ours": "eyas.training.trainer.train as it is, reading from the store",
}
PARTS = {  # of our step: operators by name, the first that fits
    "matrix products, attention": r"::(mm|addmm|bmm|baddbmm|mkldnn|_scaled_dot|linear)",
    "optimiser and clipping": r"adam|_foreach|vector_norm|^Optimizer",
    "Python inside of autograd functions": r"^[A-Z]",
    "softmax, exp, log": r"softmax|::exp|::log",
    "copies, casts, concatenation": (
        r"::(copy_|cat|clone|_to_copy|to|fill_|zero_|empty"
        r"|contiguous|narrow|split)"
    ),
    "gather, scatter, masks": r"index|gather|embedding|scatter|searchsorted|nonzero|mask|where",
    "other arithmetic": r"",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"]
    )
    parser.add_argument(
        "--trainers",
        nargs="+",
        default=["specforge", "speculators"],
        choices=["specforge", "speculators"],
        help="beside ours",
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--steps",
        type=int,
        default=10,
        help="optimiser steps of a round; the first ones after a pause are slower",
    )
    parser.add_argument("--warm", type=int, default=6, help="steps before the first round")
    parser.add_argument(
        "--no-trials",
        action="store_true",
        help="take the options of contestants.DEFAULTS, and those of --options",
    )
    parser.add_argument(
        "--options",
        type=json.loads,
        default={},
        help=(
            'what trials found, or where they begin: \'{"specforge": {"batching": "accumulated"}}\''
        ),
    )
    parser.add_argument("--out", type=Path, help="a JSON file for all that was measured")
    args = parser.parse_args()
    config, store, target = load(args)
    torch.set_num_threads(args.threads)
    n_steps = args.warm + (args.rounds + 2) * args.steps
    with tempfile.TemporaryDirectory(prefix="eyas-", dir=os.environ.get("EYAS_DATA")) as folder:
        kinds = ["ours", *available(args.trainers)]
        data = Data(
            config,
            store,
            target,
            choose(store, "length", n_steps * config.batch_tok),
            Path(folder),
            kinds,
        )
        steps = data.steps(0)
        if len(steps) < n_steps:
            parser.error(
                f"the store has {len(steps)} optimiser steps, {n_steps} are needed: fewer "
                f"--rounds or --steps, or a smaller -p batch_tok"
            )
        print(
            f"{len(data.rows)} samples, {config.batch_tok} tokens a step, {target.name}, "
            f"boundaries {list(data.config.boundaries)}, D = {config.draft_vocab_size:,}, "
            f"K = {config.draft_steps}, {args.threads} threads, AdamW, {args.rounds} "
            f"rounds of {args.steps} steps"
        )
        found = {dtype: race(data, kinds, dtype, args) for dtype in args.dtypes}
    print(
        (
            "\n| dtype | trainer | response tok/s | all tok/s | ours is faster by | peak "
            "memory | at the start | samples held | least peak in trials |\n"
        )
        + 9 * "|---"
        + "|"
    )
    for dtype, race_found in found.items():
        print_race(dtype, race_found)
    for dtype, race_found in found.items():
        print_time(dtype, race_found, args.steps)
    print("\nWhat ran:")
    for dtype, race_found in found.items():
        for kind in kinds:
            print(f"- {dtype}, {kind}: {race_found['options'][kind] or ''} {WHY[kind]}")
    print(
        "Peak memory is a process's largest resident set, of ours that of all its "
        "processes, pages in common counted once; at the start is the one with imports "
        "and model; samples held are the peers' copies in memory, part of their peak. "
        "The peers' options are those of the fastest trial; the least peak of any trial "
        "is beside it."
    )
    if args.out:
        write_json(args.out, found)


def race(data: Data, kinds: list[str], dtype: str, args) -> dict:
    """One dtype: seconds of each contestant in each round [rounds], tokens of the rounds, memory,
    and what is to be known about our step.
    """
    options, trials = {}, {}
    for kind in kinds:
        begin = DEFAULTS[kind] | args.options.get(kind, {})
        options[kind], trials[kind] = (
            best_options(data, kind, dtype, begin, args)
            if kind in CHOICES and not args.no_trials
            else (begin, [])
        )
    contestants = {
        kind: Contestant(data, kind, dtype, LEARNING_RATE, **options[kind]) for kind in kinds
    }
    for contestant in contestants.values():
        contestant.ask(steps=args.warm)
    seconds, gflops = {kind: [] for kind in kinds}, []
    for n in range(args.rounds):
        gflops.append(product_gflops(getattr(torch, dtype)))
        for kind in kinds[:: 1 if n % 2 else -1]:
            seconds[kind].append(contestants[kind].ask(steps=args.steps)["seconds"])
    taken = data.steps(0)[args.warm : args.warm + args.rounds * args.steps]
    memory = {kind: contestant.ask(memory=True) for kind, contestant in contestants.items()}
    profile = contestants["ours"].ask(steps=args.steps, watch="profile")
    flops = (
        contestants["ours"].ask(steps=args.steps, watch="flops")["flops"] * args.threads
    )  # counted in the first process; all have about the same work
    for contestant in contestants.values():
        contestant.__exit__()
    return {
        "seconds": seconds,
        "response_tok": sum(data.loss_tok[id] for ids in taken for id in ids),
        "all_tok": sum(data.lengths[id] for ids in taken for id in ids),
        "memory": memory,
        "options": options,
        "trials": trials,
        "gflops": gflops,
        "flops": flops,
        "profile": profile,
    }


def best_options(data: Data, kind: str, dtype: str, best: dict, args) -> tuple[dict, list]:
    """One option after another is changed and kept if that is faster; gives it and (options,
    seconds a step, peak bytes) of all. What does not run here is said to.
    """
    trials = []

    def trial(options: dict) -> float:
        try:
            with Contestant(data, kind, dtype, LEARNING_RATE, **options) as contestant:
                contestant.ask(steps=args.warm)
                seconds, peak = (
                    contestant.ask(steps=args.steps + 1)["seconds"] / (args.steps + 1),
                    contestant.ask(memory=True)["peak"],
                )
        except RuntimeError as error:
            print(f"{kind} does not run with {options}: {str(error)[-300:]}")
            return float("inf")
        trials.append((options, seconds, peak))
        print(
            (
                f"{dtype}, {kind} {options}: {seconds:.2f} s a step, peak memory "
                f"{peak / 2**30:.2f} GiB"
            ),
            flush=True,
        )
        return seconds

    best_s = trial(best)
    for name, values in CHOICES[kind].items():
        if name == "weights" and dtype == "float32":
            continue
        for value in set(values) - {best[name]}:
            if (seconds := trial(best | {name: value})) < best_s:
                best, best_s = best | {name: value}, seconds
    return best, trials


def product_gflops(dtype: torch.dtype, size: int = 2048, times: int = 3) -> float:
    """Of the best of a few large matrix products."""
    a, b, best_s = (
        torch.randn(size, size).to(dtype),
        torch.randn(size, size).to(dtype),
        float("inf"),
    )
    a @ b
    for _ in range(times):
        started = time.perf_counter()
        a @ b
        best_s = min(best_s, time.perf_counter() - started)
    return 2 * size**3 / best_s / 1e9


def print_race(dtype: str, found: dict) -> None:
    for kind, seconds in found["seconds"].items():
        ratio = (
            ""
            if kind == "ours"
            else interval_text(ratio_interval(seconds, found["seconds"]["ours"], 0).as_dict())
        )
        memory, least = (
            found["memory"][kind],
            min((peak for _, _, peak in found["trials"][kind]), default=None),
        )
        print(
            f"| {dtype} | {kind} | {found['response_tok'] / sum(seconds):,.0f} | "
            f"{found['all_tok'] / sum(seconds):,.0f} | {ratio} | "
            f"{memory['peak'] / 2**30:.2f} GiB | {memory['base'] / 2**30:.2f} GiB | "
            f"{memory['held'] / 2**30:.2f} GiB | "
            + ("" if least is None else f"{least / 2**30:.2f} GiB")
            + " |"
        )


def print_time(dtype: str, found: dict, steps: int) -> None:
    """Of the profiled steps, the operators' own seconds by part; of the rounds, the distance from
    the matrix products' bound.
    """
    operators, wall_s = found["profile"]["operators"], found["profile"]["seconds"]
    print(
        f"\n{dtype}: where our {1000 * wall_s / steps:,.0f} ms a step go (with the "
        f"profiler on, the first process)\n\n| part | share | its largest |\n|---|---|---|"
    )
    for part, (part_s, largest) in by_part(operators).items():
        print(
            f"| {part} | {part_s / wall_s:.0%} | "
            f"{', '.join(f'{name} {s / wall_s:.0%}' for name, s in largest)} |"
        )
    print(
        f"| outside of operators: Python, waiting for the other process | "
        f"{1 - sum(s for s, _ in operators.values()) / wall_s:.0%} | |"
    )
    step_s, gflop, gflops = (
        statistics.mean(found["seconds"]["ours"]) / steps,
        found["flops"] / steps / 1e9,
        statistics.median(found["gflops"]),
    )
    bound_s = gflop / gflops
    print(
        f"\n{dtype}: about {gflop:,.0f} GFLOP a step in matrix products, {gflops:,.0f} "
        f"GFLOPS in large {dtype} products here: "
        f"{1000 * bound_s:,.0f} ms of the {1000 * step_s:,.0f} ms that a step takes "
        f"({bound_s / step_s:.0%} of the bound)"
    )


def by_part(
    operators: dict[str, tuple[float, int]],
) -> dict[str, tuple[float, list[tuple[str, float]]]]:
    """part -> (seconds, its three largest operators with theirs), largest part first. operators:
    name -> (seconds by itself, calls).
    """
    parts = {part: [] for part in PARTS}
    for name, (seconds, _) in operators.items():
        parts[next(part for part, pattern in PARTS.items() if re.search(pattern, name))].append(
            (name, seconds)
        )
    found = {
        part: (sum(s for _, s in inside), sorted(inside, key=lambda pair: -pair[1])[:3])
        for part, inside in parts.items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


if __name__ == "__main__":
    main()
