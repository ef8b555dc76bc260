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


def plot_heldout_acceptance(metrics: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Held-out acceptance length of the offline walk at each evaluation. metrics as in plot_loss, with acceptance_length."""
    with plt.rc_context(STYLE):
        ax = _axes(ax, height=3.2)
        judged = metrics.dropna(subset=["acceptance_length"]).drop_duplicates("step")
        ax.plot(judged["step"], judged["acceptance_length"], color=VERMILION, marker="o")
        ax.set(xlabel="optimiser step", ylabel="acceptance length", title="Held-out acceptance length (offline walk, bonus token included)", xlim=(0, None))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ax


def plot_ablations(rows: list[dict], ax: Axes | None = None) -> Axes:
    """What each variant of training gains or loses in acceptance length against the base, with intervals. rows: those of benchmarks/ablations.py."""
    with plt.rc_context(STYLE):
        rows = [row for row in rows if row["difference"]][::-1]
        ax = _axes(ax, height=1.4 + 0.33 * len(rows))
        values = np.array([row["difference"]["value"] for row in rows])
        clear = [row["difference"]["low"] > 0 or row["difference"]["high"] < 0 for row in rows]
        colours = [GREY if not sure else GREEN if value > 0 else VERMILION for value, sure in zip(values, clear)]
        for y, (value, row, colour) in enumerate(zip(values, rows, colours)):
            ax.errorbar([value], [y], xerr=_error(np.array([value]), [row["difference"]]), color=colour, fmt="o", capsize=4)
        ax.axvline(0, color="black", linewidth=1)
        ax.set_yticks(range(len(rows)), [f"{row['question']}: {row['variant']}" for row in rows])
        ax.set(xlabel="difference in held-out acceptance length, paired by prompt", title="Against the base (95 % intervals; grey: not clear of zero)", ylim=(-0.7, len(rows) - 0.3))
        ax.grid(axis="y", visible=False)
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


def panels(columns: int, height: float = 4.2, width: float = 10.0) -> list[Axes]:
    """Axes beside each other in one figure."""
    with plt.rc_context(STYLE):
        _, axes = plt.subplots(1, columns, figsize=(width, height))
    return list(axes)


def _boundary_axis(ax: Axes, boundaries) -> None:
    """Boundaries along x in their true distances; a tick at each while they are few."""
    if len(boundaries) <= 12:
        ax.set_xticks(list(boundaries))
    else:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("boundary (0: embedding output)")


def plot_state_norms(stats: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Norm per token by boundary, on a log scale; the first token apart. stats: table of `stats.boundary_stats`."""
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        x = stats["boundary"]
        for low, high, width, label in (("p01", "p99", 1.5, "1 % to 99 %"), ("p05", "p95", 4, "5 % to 95 %"), ("p25", "p75", 8, "25 % to 75 %")):
            ax.vlines(x, stats[f"norm_{low}"], stats[f"norm_{high}"], color=SKY, linewidth=width, label=label)
        ax.plot(x, stats["norm_p50"], color=BLUE, marker="o", linestyle="none", label="median, first tokens left out")
        ax.plot(x, stats["first_norm_p50"], color=VERMILION, marker="D", linestyle="none", label="first tokens: median")
        ax.set_yscale("log")
        _boundary_axis(ax, x)
        ax.set(ylabel="Euclidean norm of a token's state", title="Norm of the states")
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def plot_largest(stats: pd.DataFrame, large: float, ax: Axes | None = None) -> Axes:
    """Largest and median |x| by boundary, on a log scale. stats: table of `stats.boundary_stats`; `large` is drawn as a line."""
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        x = stats["boundary"]
        ax.plot(x, stats["first_largest"], color=VERMILION, marker="D", linestyle=":", label="first tokens: largest")
        ax.plot(x, stats["largest"], color=BLUE, marker="o", linestyle=":", label="later tokens: largest")
        ax.plot(x, stats["median"], color=GREY, marker="s", linestyle=":", label="all: median")
        ax.axhline(large, color=GREY, linewidth=1, label=f"{large:g}")
        ax.set_yscale("log")
        _boundary_axis(ax, x)
        ax.set(ylabel="|x| of a single value", title="Largest single values")
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def plot_effective_rank(stats: pd.DataFrame, hidden_size: int, ax: Axes | None = None) -> Axes:
    """Effective rank by boundary. stats: table of `stats.boundary_stats`."""
    with plt.rc_context(STYLE):
        ax = _axes(ax, height=3.6)
        ax.plot(stats["boundary"], stats["effective_rank"], color=BLUE, marker="o", linestyle=":")
        _boundary_axis(ax, stats["boundary"])
        ax.set(ylabel=f"directions, of {hidden_size:,}", title="Effective rank of the states", ylim=(0, None))
    return ax


def plot_boundary_map(matrix: np.ndarray, boundaries, name: str, ax: Axes | None = None) -> Axes:
    """A similarity of each boundary with each, as a map from 0 to 1; with numbers while they are few. matrix: [B, B]."""
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        few = len(boundaries) <= 8
        picture = ax.imshow(np.clip(matrix, 0, 1), vmin=0, vmax=1, cmap="cividis", origin="lower")
        shown = [i for i in range(len(boundaries)) if few or i % (len(boundaries) // 8) == 0]
        ax.set_xticks(shown, [str(boundaries[i]) for i in shown])
        ax.set_yticks(shown, [str(boundaries[i]) for i in shown])
        if few:
            for (i, j), value in np.ndenumerate(matrix):
                ax.text(j, i, f"{value:.2f}", ha="center", va="center", color="black" if value > 0.6 else "white")
        ax.set(xlabel="boundary", ylabel="boundary", title=name)
        ax.grid(visible=False)
        ax.figure.colorbar(picture, ax=ax, shrink=0.8)
    return ax


def plot_probes(probes: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """What a linear map reads off each boundary: R^2 of the last state, agreement on the next token. probes: table of `stats.probes`."""
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        x, agreement = probes["boundary"], probes["agreement"]
        error = np.array([agreement - probes["low"].fillna(agreement), probes["high"].fillna(agreement) - agreement])
        ax.errorbar(x, agreement, yerr=error, color=BLUE, marker="o", linestyle=":", capsize=3, label="next token: same first choice as the target's")
        ax.plot(x, probes["r2"], color=ORANGE, marker="s", linestyle=":", label="last state: R²")
        ax.axhline(probes["constant"].iloc[0], color=GREY, linewidth=1, label="next token: always the commonest choice")
        _boundary_axis(ax, x)
        ax.set(ylabel="share, other samples", title="What a linear map from one boundary foresees", ylim=(min(0, probes["r2"].min() - 0.03), 1.03))
        ax.legend(loc="upper left")
    return ax


def plot_histogram(values, label: str, counted: str, title: str, mark: float | None = None, ax: Axes | None = None) -> Axes:
    """Histogram of shares from 0 to 1, on a log scale of counts; a line at `mark`."""
    with plt.rc_context(STYLE):
        ax = _axes(ax, height=3.6)
        ax.hist(values, bins=np.linspace(0, 1, 41), color=BLUE, log=True)
        if mark is not None:
            ax.axvline(mark, color=VERMILION, linewidth=1.5)
        ax.set(xlabel=label, ylabel=f"{counted}, log scale", title=title, xlim=(0, 1))
        ax.set_ylim(bottom=0.7)
    return ax


def plot_heldout_coverage(ceilings: pd.DataFrame, chosen: int, ax: Axes | None = None) -> Axes:
    """Share of held-out response tokens inside a draft vocabulary of size D. ceilings: table of `stats.ceilings`; `chosen` is the run's D."""
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        ax.plot(ceilings["draft_vocab_size"], ceilings["coverage"], color=BLUE, marker="o")
        _mark_size(ax, ceilings, "coverage", chosen, "{:.1%}")
        ax.set(ylabel="response tokens covered", title="Coverage, held-out responses", ylim=(None, 1.02))
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return ax


def plot_ceiling(ceilings: pd.DataFrame, chosen: int, draft_length: int, ax: Axes | None = None) -> Axes:
    """The acceptance length that coverage alone allows. ceilings: table of `stats.ceilings`."""
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        x = ceilings["draft_vocab_size"]
        ax.fill_between(x, ceilings["low"], ceilings["high"], color=SKY, alpha=0.4, linewidth=0, label="95 % interval")
        ax.plot(x, ceilings["acceptance_length"], color=BLUE, marker="o", label="walked")
        ax.plot(x, ceilings["formula"], color=ORANGE, linestyle="--", label="1 + c + ... + c^K")
        ax.axhline(draft_length + 1, color=GREY, linewidth=1)
        _mark_size(ax, ceilings, "acceptance_length", chosen, "{:.2f}")
        ax.set(ylabel="acceptance length, with bonus token", title=f"Acceptance ceiling, drafts of {draft_length}", ylim=(None, draft_length + 1.1))
        ax.legend(loc="lower right")
    return ax


def _mark_size(ax: Axes, ceilings: pd.DataFrame, column: str, chosen: int, number: str) -> None:
    ax.set_xscale("log", base=2)
    ticks = [d for d in ceilings["draft_vocab_size"] if (d & (d - 1)) == 0][::2]
    ax.set_xticks(ticks, [f"{d:,}" for d in ticks])
    value = ceilings.set_index("draft_vocab_size")[column][chosen]
    ax.plot([chosen], [value], color=VERMILION, marker="o", markersize=9, linestyle="none")
    ax.annotate(f"D = {chosen:,}: {number.format(value)}", (chosen, value), xytext=(10, -16), textcoords="offset points", color=VERMILION)
    ax.set_xlabel("draft vocabulary size D, tokens")


def plot_drift(table: pd.DataFrame, rounding: float, ax: Axes | None = None) -> Axes:
    """Relative error per token between two stores, by boundary, on a log scale. table: that of `stats.Drift`; `rounding` is drawn as a line."""
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        x, floor = table["boundary"], rounding / 100  # for errors of 0, which a log scale does not have
        for low, high, width, label in (("p05", "p99", 1.5, "5 % to 99 %"), ("p05", "p95", 5, "5 % to 95 %")):
            ax.vlines(x, table[f"error_{low}"].clip(lower=floor), table[f"error_{high}"].clip(lower=floor), color=SKY, linewidth=width, label=label)
        ax.plot(x, table["error_p50"].clip(lower=floor), color=BLUE, marker="o", linestyle="none", label="median")
        ax.plot(x, table["first_error_p50"].clip(lower=floor), color=VERMILION, marker="D", linestyle="none", label="first tokens: median")
        ax.axhline(rounding, color=GREY, linewidth=1, label="one rounding")
        ax.set_yscale("log")
        _boundary_axis(ax, x)
        ax.set(ylabel="|difference| / |state|, per token", title="How far the states of the two stores lie apart")
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def plot_drift_cosine(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """1 - cosine per token between two stores, by boundary, on a log scale. table: that of `stats.Drift`."""
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        x, floor = table["boundary"], 1e-8  # for cosines of 1
        for column, colour, marker, label in (("cosine_p50", BLUE, "o", "median"), ("cosine_p05", ORANGE, "s", "worst 5 %"), ("cosine_p01", VERMILION, "^", "worst 1 %")):
            ax.plot(x, (1 - table[column]).clip(lower=floor), color=colour, marker=marker, linestyle=":", label=label)
        ax.set_yscale("log")
        _boundary_axis(ax, x)
        ax.set(ylabel="1 - cosine, per token", title="How far their directions turn")
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
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


def plot_parity(tests: list[dict], ax: Axes | None = None) -> Axes:
    """How far states are from what they should be, by boundary: median and 90th percentile over tokens, beside the limit. tests: those of parity.json."""
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        rows = {test["name"]: test["rows"] for test in tests}
        series = {"stored, against float32": rows["boundary"]}
        for row in rows["serving"]:
            series.setdefault(f"stored, against {row['how']}", []).append(row)
        x = {row["boundary"]: n for n, row in enumerate(rows["boundary"])}
        width = 0.8 / len(series)
        for n, (name, found) in enumerate(series.items()):
            at = np.array([x[row["boundary"]] for row in found]) + (n - (len(series) - 1) / 2) * width
            low, high = (np.array([row[f"error_{q}"] for row in found]) for q in ("p50", "p90"))
            ax.errorbar(at, low, yerr=[np.zeros_like(low), high - low], color=COLOURS[n], marker="os^Dv"[n % 5], markersize=8, capsize=4, linestyle="none", label=name)
            limits = np.array([row["limit_p50"] for row in found])
            ax.hlines(limits, at - width / 2, at + width / 2, color=VERMILION, linewidth=2, label="limit of the median: two floors" if n == 0 else None)
        ax.set_xticks(list(x.values()), [str(b) for b in x])
        ax.set_ylim(0, None)
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=1))
        ax.set(xlabel="boundary", ylabel="distance, % of the state's own size", title="Median distance of the states (whisker: 90th percentile)")
        ax.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2)
    return ax


def _error(values: np.ndarray, intervals: list[dict]) -> np.ndarray:
    """[2, n] distances for errorbar; NaN, which draws nothing, where an interval could not be made."""
    low, high = (np.array([np.nan if interval[end] is None else interval[end] for interval in intervals], dtype=float) for end in ("low", "high"))
    return np.abs(np.array([values - low, high - values]))
