"""What drafters are worth that ours, SpecForge's and speculators' trainers make of equal data:
`.venv/bin/python benchmarks/quality.py --out FOLDER`

About an hour on 2 cores, from the store of `make report P=reference`; EYAS_PEER_SPECFORGE and
EYAS_PEER_SPECULATORS as contestants.py says.

The same samples (about 36,000 response tokens, once), the same ones in each optimiser step and in
the same order; all else as each trainer has it by default: loss, mask, step weights, norms, first
weights, schedule, clipping. Each at a few learning rates with seed 0, then at its best one with
more seeds. A peer's drafter is converted to ours, which is checked (its logits are the peer's own,
to rounding), and all are judged by the same walk over all held-out samples of the store.

FOLDER holds one file of counts for each (trainer, learning rate, seed); what is there is not
trained again. The best learning rate is chosen on the held-out samples, for all alike.
"""

import argparse
import dataclasses
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file

from eyas.errors import EyasError
from eyas.evaluation.offline import walk
from eyas.files import read_json, sha256_json, write_json
from eyas.intervals import difference_interval, interval_text, ratio_interval
from eyas.models.drafter import DraftCache, Drafter, DrafterConfig, ImportedConfig, load_drafter
from eyas.models.vocab import DraftVocab
from eyas.training.preparation import SETTINGS, Ablation
from eyas.training.trainer import train

sys.path.insert(0, str(Path(__file__).parent))
from contestants import PEERS, Contestant, Data, add_arguments, available, choose, length, load

DRAFT_LENGTH = 3
TOLERANCE = 1e-4  # of logits, relative to the largest


@dataclass(frozen=True)
class Trainer:
    kind: str
    rates: tuple[float, ...]
    options: dict
    recipe: str


SHARED = (
    "linear schedule, warm-up 1 %, clipping at 1.0, KL over the mask's mean, step weights 1, "
    "embedding and head frozen copies of the target's, the rest random"
)
TRAINERS = {
    "ours": Trainer("ours", (1e-3, 2e-3, 4e-3), {}, "its defaults"),
    "specforge": Trainer(
        "specforge",
        (5e-4, 1e-3, 2e-3),
        {},
        "AdamW, cosine, warm-up 1.5 %, clipping at 0.5, soft cross-entropy, mean over the "
        "whole padded grid, "
        "step weights 0.8^i, random weights, embedding the target's; float32 weights "
        "under autocast instead of bf16 weights, which is finer",
    ),
    "speculators": Trainer(
        "speculators",
        (5e-4, 1e-3, 2e-3),
        {"optimizer": "muon"},
        f"its defaults: Muon, norm_before_residual, norm_before_fc, norm_output; {SHARED}",
    ),
    "speculators-adamw": Trainer(
        "speculators", (5e-4, 1e-3, 2e-3), {"optimizer": "adamw"}, f"the same with AdamW; {SHARED}"
    ),
    "speculators-plain": Trainer(
        "speculators",
        (5e-4, 1e-3, 2e-3),
        {"optimizer": "adamw", "norms": False},
        f"AdamW, the three norm flags off; {SHARED}",
    ),
}


def normed(config: DrafterConfig) -> ImportedConfig:
    """The shape with the norms that speculators has by default."""
    return ImportedConfig(
        **{field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        | {"norm_output": True, "norm_before_fc": True, "norm_before_residual": True}
    )


@torch.no_grad()
def converted(
    path: Path, config: DrafterConfig, vocab: DraftVocab, norms: bool, sample: dict
) -> tuple[Drafter, float]:
    """The drafter that peers.py saved, and how far its logits are from the peer's own on that
    sample; EyasError where that is more than rounding.
    """
    weights = load_file(path)
    theirs, d2t, _ = (
        weights.pop(name) for name in ("check.logits", "d2t", "t2d")
    )  # theirs: [K, slots, D]
    drafter = Drafter(normed(config) if norms else config, vocab)
    drafter.load_state_dict(weights)
    ids, apart = sample["input_ids"], 0.0
    hidden = drafter.fuse(
        torch.cat([sample["states"][b] for b in config.boundaries], dim=-1).float()
    )  # [T, H]
    slots = range(0, min(theirs.shape[1], len(ids) - 1 - len(theirs)), 5)
    # as serving would: all slots up to this one, then its own drafts, of the sample's own tokens
    for slot in slots:
        cache = DraftCache()
        out = drafter.extend(ids[1 : slot + 2], hidden[: slot + 1], cache)[-1:]
        for s in range(len(theirs)):
            if s:
                out = drafter.extend(
                    ids[slot + 1 + s : slot + 2 + s], drafter.feed_back(out), cache
                )
            apart = max(
                apart,
                float(
                    (drafter.logits(out)[0] - theirs[s, slot]).abs().max()
                    / theirs[s, slot].abs().max()
                ),
            )
    if not (torch.equal(d2t, vocab.d2t) and slots and apart < TOLERANCE):
        raise EyasError(
            f"the converted drafter's logits are {apart:.1e} from the peer's own",
            f"less than {TOLERANCE:.0e}",
            "compare `converted` with the peer's model file",
        )
    return drafter, apart


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--trainers", nargs="+", default=list(TRAINERS), choices=list(TRAINERS))
    parser.add_argument("--seeds", type=int, default=3, help="at the best learning rate")
    parser.add_argument("--response-tok", type=int, default=36_000)
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        help="learning rates for all, instead of each trainer's own list",
    )
    args = parser.parse_args()
    config, store, target = load(args, draft_vocab_size=4096, draft_steps=DRAFT_LENGTH)
    torch.set_num_threads(args.threads)
    kinds = available(sorted({TRAINERS[name].kind for name in args.trainers}))
    names = [name for name in args.trainers if TRAINERS[name].kind in kinds]
    with tempfile.TemporaryDirectory(prefix="eyas-", dir=os.environ.get("EYAS_DATA")) as folder:
        data = Data(
            config, store, target, choose(store, "loss_tok", args.response_tok), Path(folder), kinds
        )
        heldout = store.samples("heldout")
        print(
            f"{len(data.rows)} samples, {sum(data.loss_tok.values()):,} response tokens, "
            f"{len(data.steps(0))} optimiser steps, {args.dtype}; "
            f"{len(heldout)} held-out samples",
            flush=True,
        )
        results = {}
        for name in names:
            for rate in args.rates or TRAINERS[name].rates:
                results[name, rate, 0] = result(args, data, store, heldout, name, rate, 0)
        best = {
            name: max(
                (rate for n, rate, _ in results if n == name),
                key=lambda rate: length(results[name, rate, 0]),
            )
            for name in names
        }
        for seed in range(1, args.seeds):
            for name in names:
                results[name, best[name], seed] = result(
                    args, data, store, heldout, name, best[name], seed
                )
    print_table(results, best, our_settings(data.our_config(args.dtype, 1.0, 0)))


def result(
    args, data: Data, store, heldout: list[str], name: str, rate: float, seed: int
) -> pd.DataFrame:
    """Counts of the walk, one row a held-out sample: from its file, or by training."""
    trainer, path = TRAINERS[name], args.out / f"{name}-{rate:g}-{seed}.json"
    config = data.our_config(args.dtype, rate, seed)
    settings = {
        "data": data.store.identity,
        "heldout": sha256_json([store.identity, heldout]),
        "dtype": args.dtype,
        "options": trainer.options,
        "sizes": [
            config.draft_vocab_size,
            config.draft_steps,
            config.batch_tok,
            *config.boundaries,
        ],
        "ours": our_settings(config) if name == "ours" else {},
    }
    if path.is_file():
        found = read_json(path)
        if found["settings"] != settings:
            raise EyasError(
                f"{path.name} was made with other data or settings",
                "one folder for each",
                "--out ANOTHER",
            )
        return pd.DataFrame(found["counts"])
    started_s, apart = time.perf_counter(), None
    if trainer.kind in PEERS:
        with Contestant(
            data, trainer.kind, args.dtype, rate, seed, **trainer.options
        ) as contestant:
            train_s = contestant.ask(steps=len(data.steps(seed)))["seconds"]
            contestant.ask(save=str(contestant.folder / "drafter.safetensors"), row=0)
        shape = DrafterConfig.from_target(data.target, config.boundaries, config.draft_vocab_size)
        norms = contestant.options.get("norms", False)
        drafter, apart = converted(
            contestant.folder / "drafter.safetensors",
            shape,
            data.vocab,
            norms,
            data.store.read(next(iter(data.rows))),
        )
    else:
        drafter, train_s = ours(config, data)
    counts = walk(drafter, store, heldout, DRAFT_LENGTH)
    write_json(
        path,
        {
            "settings": settings,
            "train_s": train_s,
            "logits_apart": apart,
            "counts": counts.to_dict("list"),
        },
    )
    print(
        (
            f"{name}, learning rate {rate:g}, seed {seed}: acceptance length "
            f"{length(counts):.3f}; training {train_s:.0f} s, all "
            f"{time.perf_counter() - started_s:.0f} s"
        )
        + ("" if apart is None else f"; logits within {apart:.0e} of the peer's"),
        flush=True,
    )
    return counts


def our_settings(config) -> dict:
    """Those of training; the names are the trainer's own list."""
    return {
        name: list(value) if isinstance(value := getattr(config, name), tuple) else value
        for name in SETTINGS
        if name not in ("seed", "learning_rate")
    } | dataclasses.asdict(Ablation())


def ours(config, data: Data) -> tuple[Drafter, float]:
    """Trained by `eyas.training.trainer.train` in a data folder that is thrown away."""
    before, os.environ["EYAS_DATA"] = os.environ.get("EYAS_DATA"), str(data.folder / "ours")
    try:
        started_s = time.perf_counter()
        drafter = load_drafter(train(config, data.store, data.target), data.target)
        train_s = time.perf_counter() - started_s
        shutil.rmtree(config.run_dir)
    finally:
        os.environ.pop("EYAS_DATA") if before is None else os.environ.update(EYAS_DATA=before)
    return drafter, train_s


def pooled(results: dict, name: str, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """(committed tokens, verify steps) of each held-out sample, added up over the seeds."""
    tables = [counts for (n, r, _), counts in results.items() if (n, r) == (name, rate)]
    return sum((t["accepted"] + t["verify_steps"]).to_numpy() for t in tables), sum(
        t["verify_steps"].to_numpy() for t in tables
    )


def print_table(results: dict, best: dict[str, float], settings: dict) -> None:
    print(
        "\n| trainer | learning rate: acceptance length with seed 0 | best, by seed | "
        "acceptance length | ours - it, paired by sample |\n|---|---|---|---|---|"
    )
    for name, rate in best.items():
        rates = ", ".join(
            f"{r:g}: {length(counts):.3f}"
            for (n, r, seed), counts in results.items()
            if n == name and seed == 0
        )
        seeds = ", ".join(
            f"{length(counts):.3f}"
            for (n, r, _), counts in results.items()
            if (n, r) == (name, rate)
        )
        beside = name != "ours" and "ours" in best
        difference = (
            interval_text(
                difference_interval(
                    pooled(results, "ours", best["ours"]), pooled(results, name, rate), 0
                ).as_dict()
            )
            if beside
            else ""
        )
        print(
            f"| {name} | {rates} | {rate:g}: {seeds} | "
            f"{interval_text(ratio_interval(*pooled(results, name, rate), 0).as_dict())} "
            f"| {difference} |"
        )
    print("\nWhat each ran, beyond data and sizes:")
    for name in best:
        print(
            f"- {name}: {TRAINERS[name].recipe}"
            + (
                ": " + ", ".join(f"{key} {value}" for key, value in settings.items())
                if name == "ours"
                else ""
            )
        )


if __name__ == "__main__":
    try:
        main()
    except EyasError as error:
        sys.exit(str(error))
