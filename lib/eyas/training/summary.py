"""What a training run did, in a few lines of text."""

import pandas as pd

from eyas.config import Config
from eyas.files import read_parquet
from eyas.models.drafter import BEST, read_record


def summary(config: Config) -> str:
    """Return the last losses and accuracies of a run, by split and draft step, and its speed."""
    metrics = read_parquet(config.drafter_dir / "metrics.parquet")
    steps = metrics[metrics["split"] == "train"].drop_duplicates("step")
    tok, seconds = steps["tok"].sum(), steps["seconds"].sum()
    lines = [
        f"{len(steps)} optimiser steps, {tok:,} response tokens in {seconds:.0f} s: "
        f"{tok / seconds:,.0f} tok/s"
    ]
    for row in metrics[metrics["step"] == metrics["step"].max()].itertuples():
        lines.append(
            f"{row.split:8} draft step {row.draft_step + 1}: loss {row.loss:.3f}, "
            f"accuracy {row.accuracy:.3f} over {row.slots:,} supervised slots"
        )
    lengths = _judged(metrics)["acceptance_length"]
    if len(lengths):
        lines.append(
            "held-out acceptance length by the offline walk, bonus token included: "
            f"{lengths.iloc[-1]:.3f} (best {lengths.max():.3f})"
        )
    return "\n".join([*lines, *filter(None, [weights_text(config)])])


def weights_text(config: Config) -> str:
    """Return which step's weights are exported and evaluated, as `drafter_weights` decides.

    The text has the held-out acceptance length of the best and of the last step. It is empty where
    none was measured.
    """
    folder = config.drafter_dir
    if not (folder / BEST).is_file() or not (folder / "metrics.parquet").is_file():
        return ""
    judged = _judged(read_parquet(folder / "metrics.parquet"))
    best, used = read_record(folder, BEST), read_record(folder, config.drafter_file)
    if judged.empty or "steps" not in used:
        return ""
    last_step = int(judged["step"].iloc[-1])
    last_length = float(judged["acceptance_length"].iloc[-1])
    best_step, best_length = best["steps"], best["heldout_acceptance_length"]
    steps = {"best": best_step, "last": last_step}
    names = [name for name, step in steps.items() if step == used["steps"]]
    step = f"that of step {used['steps']}"
    which = f"the {' and the '.join(names)}" if names else step
    hint = "" if "best" in names else "; the best: -p drafter_weights best"
    return (
        f"held-out acceptance length: best at step {best_step} ({best_length:.3f}), "
        f"last at step {last_step} ({last_length:.3f}); this drafter is {which}{hint}"
    )


def _judged(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each evaluation on held-out samples."""
    return metrics.dropna(subset="acceptance_length").drop_duplicates("step")
