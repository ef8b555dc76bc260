"""What the choices are worth that the field disputes, each changed alone against one base:
`.venv/bin/python benchmarks/ablations.py --out FOLDER`

Half an hour on 2 cores, nothing else running, from the store of `make report P=reference`. Every
variant is a change of a few settings; all train on the same samples (about 30,000 response tokens,
once), in the same order for the same seed, and are judged by the same offline walk over all
held-out samples of the store, so that differences are paired. A variant that changes the size of
the gradient may want another learning rate: it has one at half or twice the rate beside it, and the
better one counts.

FOLDER holds one file of counts for each (variant, seed); what is there is not trained again. At the
end `reports/ablations.json` is written, which notebook 04 shows.
"""

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pandas as pd
import torch

from eyas.config import Config
from eyas.evaluation.offline import walk
from eyas.files import ROOT, code_version, read_json, sha256_json, write_json
from eyas.intervals import difference_interval, interval_text, ratio_interval
from eyas.models.drafter import load_drafter
from eyas.models.target import target_of
from eyas.store.reader import Store
from eyas.training.preparation import SETTINGS, Ablation
from eyas.training.trainer import train

sys.path.insert(0, str(Path(__file__).parent))
from contestants import add_arguments, choose, length, load, part

DRAFT_LENGTH = 5  # of the walk, for every variant: what K is worth shows in the later drafts
VARIANTS = {  # question -> variant -> settings; a list: each is tried, the best with seed 0 goes on
    "learning rate": {"1e-3": [{"learning_rate": 1e-3}], "4e-3": [{"learning_rate": 4e-3}]},
    "mask": {"unaligned": [{"mask_shift": 0}]},
    "mean of the loss": {"over the grid": [{"loss_mean": "grid"}]},
    "draft steps K": {f"{k}": [{"draft_steps": k}] for k in (1, 5, 7)},
    "weight of step i": {"0.8^i": [{"step_decay": 0.8}], "0.5^i": [{"step_decay": 0.5}]},
    "norm before fc": {
        "one a boundary": [{"fc_norm": True}, {"fc_norm": True, "learning_rate": 1e-3}]
    },
    "fed back": {
        "after the norm": [{"norm_output": True}, {"norm_output": True, "learning_rate": 1e-3}]
    },
    "both": {
        f"after the norm, {decay}^i": [{"norm_output": True, "step_decay": decay}]
        for decay in (0.8, 0.5)
    },
    "initial weights": {
        "random": [
            {"initial_weights": "random"},
            {"initial_weights": "random", "learning_rate": 4e-3},
        ]
    },
    "loss": {name: [{"loss": name}] for name in ("tv", "lk_alpha", "lk_lambda")},
    "draft vocabulary D": {
        "2,048": [{"draft_vocab_size": 2048}],
        "8,192": [{"draft_vocab_size": 8192}],
        "all, 49,152": [{"draft_vocab_size": 49152}],
    },
    "tokens a step": {
        "256": [{"batch_tok": 256}, {"batch_tok": 256, "learning_rate": 1e-3}],
        "1,024": [{"batch_tok": 1024}],
        "2,048": [{"batch_tok": 2048}, {"batch_tok": 2048, "learning_rate": 4e-3}],
    },
}
ONE_SEED = ("all, 49,152",)  # three times as slow
BASE = "the base"
# plain EAGLE-3 as the papers have it, small, for many trainings on little text; the defaults of
# Config were chosen from what came out
BASE_SETTINGS = {
    "draft_vocab_size": 4096,
    "batch_tok": 512,
    "learning_rate": 2.0e-3,
    "draft_steps": 3,
    "step_decay": 1.0,
    "loss": "kl",
    "fc_norm": False,
    "norm_output": False,
    "initial_weights": "target",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--jobs", type=int, default=2, help="trainings at a time, with --threads each"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--response-tok", type=int, default=30_000)
    parser.add_argument(
        "--fp8-run",
        help="a run whose store holds the same samples in fp8 (extract -p store_fp8 true)",
    )
    parser.add_argument("--only", nargs="+", help="questions, e.g. mask loss")
    args = parser.parse_args()
    config, store, _ = load(args, **BASE_SETTINGS)
    ids = choose(store, "loss_tok", args.response_tok)
    tried = {
        (question, name): settings
        for question, variants in VARIANTS.items()
        if not args.only or question in args.only
        for name, settings in variants.items()
    }
    if args.fp8_run and (not args.only or "stored states" in args.only):
        tried["stored states", "fp8"] = [{"store_run": args.fp8_run}]
    tried = {(BASE, ""): [{}]} | tried
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:

        def start(settings: dict, seed: int):
            return pool.submit(result, args.out, dataclasses.asdict(config), settings, seed, ids)

        first = {
            key: [start(settings, 0) for settings in options] for key, options in tried.items()
        }
        best = {
            key: max(range(len(runs)), key=lambda n: length(runs[n].result()))
            for key, runs in first.items()
        }
        later = {
            key: [
                start(tried[key][best[key]], seed)
                for seed in range(1, 1 if key[1] in ONE_SEED else args.seeds)
            ]
            for key in tried
        }
        tables = {
            key: [first[key][best[key]].result(), *(run.result() for run in later[key])]
            for key in tried
        }
    pairs = {
        key: (
            sum(t["accepted"] + t["verify_steps"] for t in found),
            sum(t["verify_steps"] for t in found),
        )
        for key, found in tables.items()
    }
    rows = [
        {
            "question": question,
            "variant": name,
            "settings": tried[question, name][best[question, name]],
            "by_seed": [float(length(t)) for t in tables[question, name]],
            "acceptance_length": ratio_interval(*pairs[question, name], 0).as_dict(),
            "difference": None
            if question == BASE
            else difference_interval(pairs[question, name], pairs[BASE, ""], 0).as_dict(),
        }
        for question, name in tried
    ]
    rows_seen = store.index[store.index["id"].isin(ids)]
    record = {
        "code": code_version(),
        "target": store.manifest["target"]["name"],
        "samples": len(ids),
        "response_tok": int(rows_seen["loss_tok"].sum()),
        "heldout_samples": len(store.samples("heldout")),
        "draft_length": DRAFT_LENGTH,
        "seeds": args.seeds,
        "base": {name: getattr(config, name) for name in SETTINGS if name != "seed"}
        | dataclasses.asdict(Ablation())
        | {"epochs": 1.0},
        "rows": rows,
    }
    write_json(ROOT / "reports" / "ablations.json", record)
    print(
        f"{record['samples']} samples, {record['response_tok']:,} response tokens, "
        f"{record['heldout_samples']} held-out samples, walk of {DRAFT_LENGTH} drafts, "
        f"{args.seeds} seeds\n"
    )
    print(
        "| question | variant | settings | acceptance length | by seed | against the base "
        "|\n|---|---|---|---|---|---|"
    )
    for row in rows:
        difference = interval_text(row["difference"]) if row["difference"] else ""
        print(
            f"| {row['question']} | {row['variant']} | "
            f"{', '.join(f'{k} {v}' for k, v in row['settings'].items())} | "
            f"{interval_text(row['acceptance_length'])} | "
            f"{', '.join(f'{value:.3f}' for value in row['by_seed'])} | {difference} |"
        )


def prepare(values: dict, settings: dict) -> tuple[Config, Ablation]:
    """Return the configuration and the ablation of a variant whose settings these are."""
    of_ablation = {field.name for field in dataclasses.fields(Ablation)}
    ablation = Ablation(**{k: v for k, v in settings.items() if k in of_ablation})
    others = {k: v for k, v in settings.items() if k not in of_ablation | {"store_run"}}
    return Config.create(**(values | others)), ablation


def result(out: Path, values: dict, settings: dict, seed: int, ids: list[str]) -> pd.DataFrame:
    """Counts of the walk, one row a held-out sample: from its file, or by training in a data folder
    that is thrown away.
    """
    config, ablation = prepare(
        values | {"epochs": 1.0, "seed": seed, "without_parity": True}, settings
    )
    store, target = (
        Store.open(config.store_dir_of(settings.get("store_run", config.run_name))),
        target_of(config),
    )
    described = {
        "data": store.identity,
        "ids": sha256_json(sorted(ids)),
        "draft_length": DRAFT_LENGTH,
        "settings": {k: str(getattr(config, k)) for k in SETTINGS}
        | {k: str(v) for k, v in dataclasses.asdict(ablation).items()},
    }
    path = out / f"{sha256_json(described)[:24]}.json"
    if path.is_file():
        return pd.DataFrame(read_json(path)["counts"])
    started_s = time.perf_counter()
    heldout = store.samples("heldout")
    before = os.environ.get("EYAS_DATA")
    with tempfile.TemporaryDirectory(prefix="eyas-") as folder:
        os.environ["EYAS_DATA"] = folder
        try:
            torch.set_num_threads(config.threads)
            drafter = load_drafter(
                train(config, part(store, ids), target, ablation=ablation), target
            )
        finally:
            os.environ.pop("EYAS_DATA") if before is None else os.environ.update(EYAS_DATA=before)
    train_s = time.perf_counter() - started_s
    counts = walk(drafter, store, heldout, DRAFT_LENGTH)
    write_json(path, described | {"train_s": train_s, "counts": counts.to_dict("list")})
    print(
        (
            f"{settings or BASE}, seed {seed}: {length(counts):.3f}; {train_s:.0f} s and "
            f"{time.perf_counter() - started_s - train_s:.0f} s"
        ),
        flush=True,
    )
    return counts


if __name__ == "__main__":
    main()
