"""Figures: `plot_*(data, ax=None) -> ax`. Nothing here reads or writes a file; the numbers come from the other modules.

One style for all of them (STYLE), colours that colour-blind readers can tell apart (Okabe and Ito), widths for a report page.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#6B7280"
COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)
STYLE = {
    "figure.figsize": (8.0, 4.2), "figure.constrained_layout.use": True, "font.size": 12, "axes.titlesize": 13, "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e3e6ea", "lines.linewidth": 1.8,
    "legend.frameon": False, "legend.fontsize": 11,
}


def _axes(ax: Axes | None, height: float = 4.2) -> Axes:
    if ax is None:
        with plt.rc_context(STYLE):
            _, ax = plt.subplots(figsize=(8.0, height))
    return ax


def _smooth(values: pd.Series) -> pd.Series:
    """Running mean over about a thirtieth of the curve, so that a batch's noise does not hide its course."""
    return values.rolling(max(1, len(values) // 30), min_periods=1, center=True).mean()


def plot_loss(metrics: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Loss by optimiser step, training and held-out. metrics: tidy table of `eyas.train` (step, split, draft_step, loss, slots)."""
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        for split, colour, name in (("train", BLUE, "training"), ("heldout", VERMILION, "held-out topics")):
            rows = metrics[metrics["split"] == split].dropna(subset=["loss"])
            # every draft step weighs as much as it has supervised slots
            loss = (rows["loss"] * rows["slots"]).groupby(rows["step"]).sum() / rows["slots"].groupby(rows["step"]).sum()
            if split == "train":
                ax.plot(loss.index, loss, color=colour, alpha=0.25, linewidth=1)
                ax.plot(loss.index, _smooth(loss), color=colour, label=name)
            else:
                ax.plot(loss.index, loss, color=colour, marker="o", label=name)
        ax.set(xlabel="optimiser step", ylabel="soft cross-entropy, nats", title="Loss")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.legend()
    return ax


def plot_draft_accuracy(metrics: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Share of slots where the drafter's first choice is the target's, by draft step. metrics as in plot_loss, with accuracy."""
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        for draft_step, colour in zip(sorted(metrics["draft_step"].unique()), COLOURS):
            rows = metrics[metrics["draft_step"] == draft_step].dropna(subset=["accuracy"])
            train, heldout = rows[rows["split"] == "train"], rows[rows["split"] == "heldout"]
            ax.plot(train["step"], _smooth(train["accuracy"]), color=colour, label=f"step {draft_step + 1}, training")
            ax.plot(heldout["step"], heldout["accuracy"], color=colour, marker="o", linestyle="--", label=f"step {draft_step + 1}, held out")
        ax.set(xlabel="optimiser step", ylabel="accuracy", title="Accuracy per draft step", ylim=(0, None))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))  # beside the curves, which fill the axes
    return ax


def plot_acceptance_by_position(by_position: list[dict], ax: Axes | None = None) -> Axes:
    """Acceptance of draft 1, 2, ... with 95 % intervals. by_position: that block of acceptance.json (position, unconditional, conditional)."""
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        series = (("unconditional", BLUE, "o", -0.05, "of all drafts at this position"), ("conditional", ORANGE, "s", 0.05, "of those whose drafts before were accepted"))
        for name, colour, marker, shift, label in series:
            rows = [(p["position"], p[name]) for p in by_position if p[name]["value"] is not None]
            x, values = np.array([position + shift for position, _ in rows]), np.array([interval["value"] for _, interval in rows])
            ax.errorbar(x, values, yerr=_error(values, [interval for _, interval in rows]), color=colour, marker=marker, markersize=8, capsize=5, label=label)
        highest = max([p["conditional"]["high"] or p["conditional"]["value"] or 0 for p in by_position], default=1)
        ax.set(xlabel="position of the draft", ylabel="accepted", title="Acceptance by position", ylim=(0, min(1, 1.35 * highest) or 1))
        ax.set_xlim(0.6, max([p["position"] for p in by_position], default=1) + 0.4)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        ax.legend()
    return ax


def plot_acceptance_by_category(by_category: list[dict], ax: Axes | None = None) -> Axes:
    """Acceptance length of each category of prompts, with intervals. by_category: that block of acceptance.json."""
    with plt.rc_context(STYLE):
        rows = sorted(by_category, key=lambda c: c["acceptance_length"]["value"])
        ax = _axes(ax, height=1.2 + 0.36 * len(rows))
        values = np.array([c["acceptance_length"]["value"] for c in rows])
        ax.barh(range(len(rows)), values - 1, left=1, color=SKY)
        ax.errorbar(values, range(len(rows)), xerr=_error(values, [c["acceptance_length"] for c in rows]), color=GREY, fmt="none", capsize=4)
        ax.set_yticks(range(len(rows)), [f"{c['category']} ({c['prompts']})" for c in rows])
        ax.set(xlabel="acceptance length (1 = nothing accepted)", title="Acceptance length by category (prompts)")
        ax.grid(axis="y", visible=False)
    return ax


def plot_state_norms(stats: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Norm per token by boundary, on a log scale; the first token apart. stats: table of `stats.state_stats`."""
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        x = np.arange(len(stats))
        spread = np.array([stats["norm_p50"] - stats["norm_p05"], stats["norm_p95"] - stats["norm_p50"]])
        ax.errorbar(x, stats["norm_p50"], yerr=spread, color=BLUE, marker="o", markersize=8, capsize=5, label="tokens after the first: median, 5 % to 95 %")
        ax.plot(x, stats["first_norm_p50"], color=VERMILION, marker="D", markersize=8, linestyle="--", label="first token: median")
        ax.set_yscale("log")
        ax.set_xticks(x, [str(b) for b in stats["boundary"]])
        ax.set(xlabel="boundary", ylabel="norm of the state", title="Norm of the states by boundary")
        ax.legend()
    return ax


def plot_coverage(counts: np.ndarray, chosen: int, ax: Axes | None = None) -> Axes:
    """Share of supervised tokens that the D most frequent ids cover, for every D. counts: [V]; `chosen` is the D of this run."""
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        ordered = np.sort(np.asarray(counts))[::-1]
        share = np.cumsum(ordered) / max(ordered.sum(), 1)  # [V]
        ax.plot(np.arange(1, len(share) + 1), share, color=BLUE)
        at = min(chosen, len(share))
        ax.plot([at], [share[at - 1]], color=VERMILION, marker="o", markersize=8)
        ax.annotate(f"D = {chosen:,}: {share[at - 1]:.1%}", (at, share[at - 1]), xytext=(0, -40), textcoords="offset points", ha="center", color=VERMILION)
        ax.set_xscale("log")
        ax.set(xlabel="draft vocabulary size D", ylabel="supervised tokens covered", title="Vocabulary coverage, training topics", ylim=(0, 1.02))
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return ax


def plot_categories(index: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Samples per category and split. index: a store's index."""
    with plt.rc_context(STYLE):
        table = index[index["state"] == "extracted"].pivot_table(index="category", columns="split", values="id", aggfunc="count", fill_value=0, observed=True)
        table = table.loc[table.sum(axis=1).sort_values().index]
        ax = _axes(ax, height=1.2 + 0.36 * len(table))
        left = np.zeros(len(table))
        for split, colour, name in (("train", BLUE, "training topics"), ("heldout", ORANGE, "held-out topics")):
            if split in table:
                ax.barh(table.index, table[split], left=left, color=colour, label=name)
                left += table[split].to_numpy()
        ax.set(xlabel="samples", title="Samples by category")
        ax.grid(axis="y", visible=False)
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return ax


def plot_lengths(index: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Histogram of the samples' lengths, all tokens and supervised ones. index: a store's index."""
    with plt.rc_context(STYLE):
        ax = _axes(ax, height=3.6)
        done = index[index["state"] == "extracted"]
        bins = np.linspace(0, max(done["length"].max(), 1), 33)
        ax.hist(done["length"], bins=bins, color=BLUE, alpha=0.75, label="tokens")
        ax.hist(done["loss_tok"], bins=bins, color=ORANGE, alpha=0.75, label="supervised tokens")
        ax.set(xlabel="tokens of a sample", ylabel="samples", title="Length of the samples")
        ax.legend()
    return ax


def _error(values: np.ndarray, intervals: list[dict]) -> np.ndarray:
    """[2, n] distances for errorbar; none where an interval could not be made."""
    low = [interval["low"] if interval["low"] is not None else value for value, interval in zip(values, intervals)]
    high = [interval["high"] if interval["high"] is not None else value for value, interval in zip(values, intervals)]
    return np.abs(np.array([values - low, high - values]))
