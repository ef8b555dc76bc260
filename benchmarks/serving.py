"""What a drafter does to the server's throughput, as ratios measured side by side:
`.venv/bin/python benchmarks/serving.py --profile reference` (about 10 minutes on 2 cores, nothing
else running; after `train`).

Two servers of the same profile, one drafting and one not, in the profile's own dtype. In each round
both answer the same prompts of the evaluation set, greedily, at 1, 4 and 16 parallel requests; they
take turns and the first turn, and the one that waits sleeps. A ratio is output tokens per second
with the drafter over those without, its interval by bootstrap over rounds. More requests at a time
fill the device, and a draft that is thrown away costs more: where the ratio falls below 1 is what
one wants to know.

Writes throughput.json into the run's acceptance folder, with the hash of the drafter's file:
notebook 05 and the run's verdict take it from there (`python -m eyas report` again). Both servers
have the same flags but for drafting (`eyas.server.serve.server_command` says which a CPU goes
without).
"""

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

from eyas.config import Config
from eyas.evaluation.acceptance import eval_prompts
from eyas.evaluation.served_client import Asker
from eyas.evaluation.served_throughput import THROUGHPUT, throughput_of
from eyas.files import write_json
from eyas.intervals import interval_text, ratio_interval
from eyas.models.drafter import load_drafter
from eyas.models.export import export_sglang
from eyas.models.target import target_of
from eyas.progress import Progress
from eyas.server.serve import serving_up


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", default="demo")
    parser.add_argument(
        "-p",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="override one setting of the profile",
    )
    parser.add_argument("--parallel", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--prompts",
        type=int,
        default=16,
        help="answered in each round; at 1 request at a time a quarter of them, others each round",
    )
    parser.add_argument(
        "--out", type=Path, help="a JSON file for the numbers, beside the run's own"
    )
    args = parser.parse_args()
    config = Config.load(args.profile, **dict(args.p))
    config = dataclasses.replace(config, port=0, decode_prompts=args.prompts)
    target = target_of(config)
    prompts = eval_prompts(config, target)
    with tempfile.TemporaryDirectory(prefix="eyas-") as folder:
        export = export_sglang(
            load_drafter(config.judged.drafter_dir, target, config.drafter_file),
            target,
            Path(folder) / "export",
        )
        with (
            serving_up(config, None, Path(folder) / "plain", tied=True) as plain,
            serving_up(config, export, Path(folder) / "drafting", tied=True) as drafting,
        ):
            askers = {"plain": Asker(plain, config), "drafting": Asker(drafting, config)}
            rows = measure(askers, prompts, args.parallel, args.rounds)
            overlap = plain.status()["overlap"] and drafting.status()["overlap"]
    found = record(args.profile, config, rows, len(prompts), overlap)
    for row in found["ratios"]:
        print(
            f"{row['parallel']:3} at a time: {interval_text(row['ratio'])} times the "
            f"tokens per second of the server without a drafter, acceptance length "
            f"{row['acceptance_length']:.3f}; "
            f"{row['rounds']} rounds, {row['plain_tok']:,} tokens, {row['plain_s']:.1f} s "
            f"plain, {row['drafting_s']:.1f} s drafting; {config.dtype}, {config.threads} "
            f"threads"
        )
    for path in filter(None, (config.acceptance_dir / THROUGHPUT, args.out)):
        write_json(path, found)


def record(profile: str, config: Config, rows: list[dict], n_prompts: int, overlap: bool) -> dict:
    """throughput.json:

    `settings`, which `eyas.evaluation.served_throughput.read_throughput` compares with the drafter
    and the draft settings at hand, rounds and ratios. `overlap`: both servers had SGLang's overlap
    scheduler.
    """
    settings = throughput_of(config) | {
        "profile": profile,
        "eval_set": config.eval_set,
        "dtype": config.dtype,
        "threads": config.threads,
        "max_new_tok": config.decode_new_tok,
    }
    return {
        "settings": settings,
        "prompts": n_prompts,
        "overlap": overlap,
        "rows": rows,
        "ratios": [
            summary(rows, parallel) for parallel in sorted({row["parallel"] for row in rows})
        ],
    }


def measure(
    askers: dict[str, Asker], prompts: list, parallels: list[int], rounds: int
) -> list[dict]:
    """A row a round and number of parallel requests: seconds and output tokens of both, and what
    the drafting one's steps accepted.
    """
    rows = []
    for asker in askers.values():
        asker.ask_all(
            prompts, max(parallels)
        )  # warm: prefixes cached, so that what is timed is decoding
    with Progress(rounds * len(parallels), "rounds") as progress:
        for n in range(rounds):
            for parallel in parallels:
                few = prompts if parallel > 1 else prompts[n % 4 :: 4] or prompts
                row = {"round": n, "parallel": parallel}
                for name in list(askers)[:: 1 if (n + parallel) % 2 else -1]:
                    start = time.perf_counter()
                    answers = askers[name].ask_all(few, parallel)
                    row[f"{name}_s"] = time.perf_counter() - start
                    row[f"{name}_tok"] = sum(len(a.output_ids) for a in answers)
                    row[f"{name}_steps"], row[f"{name}_accepted"] = (
                        sum(len(a.accepted) for a in answers),
                        sum(sum(a.accepted) for a in answers),
                    )
                rows.append(row)
                progress.update(samples=1, tok=row["plain_tok"] + row["drafting_tok"])
    return rows


def summary(rows: list[dict], parallel: int) -> dict:
    """Tokens per second drafting / plain: plain seconds, scaled to as many tokens, over drafting
    seconds; and the counts behind it.
    """
    mine = [row for row in rows if row["parallel"] == parallel]
    ratio = ratio_interval(
        [row["plain_s"] * row["drafting_tok"] / row["plain_tok"] for row in mine],
        [row["drafting_s"] for row in mine],
        0,
    )
    total = {
        name: sum(row[name] for row in mine)
        for name in (
            "plain_s",
            "plain_tok",
            "drafting_s",
            "drafting_tok",
            "drafting_steps",
            "drafting_accepted",
        )
    }
    return {
        "parallel": parallel,
        "rounds": len(mine),
        "ratio": ratio.as_dict(),
        "acceptance_length": 1 + total["drafting_accepted"] / max(total["drafting_steps"], 1),
    } | total


if __name__ == "__main__":
    main()
