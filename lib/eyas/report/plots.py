"""Draw figures: `plot_*(data, ax=None) -> ax`.

Nothing here reads or writes a file; the numbers come from the other modules. All figures share one
style (STYLE), colours that colour-blind readers can tell apart (Okabe and Ito), and widths for a
report page.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
GREY = "#6B7280"
COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)
STYLE = {
    "figure.figsize": (8.0, 4.2),
    "figure.constrained_layout.use": True,
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 11,
}


def _axes(ax: Axes | None, height: float = 4.2) -> Axes:
    """Return `ax`, or new axes of this height in inches."""
    if ax is None:
        with plt.rc_context(STYLE):
            _, ax = plt.subplots(figsize=(8.0, height))
    return ax


def _smooth(values: pd.Series) -> pd.Series:
    """Return the running mean over about a thirtieth of the curve.

    The noise of a batch then does not hide the curve's course.
    """
    return values.rolling(max(1, len(values) // 30), min_periods=1, center=True).mean()


def plot_loss(metrics: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Plot the loss by optimizer step, training and held-out.

    metrics: table of `eyas.training.trainer` with step, split, draft_step, loss and slots.
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        for split, colour, name in (
            ("train", BLUE, "training"),
            ("heldout", VERMILION, "held-out topics"),
        ):
            rows = metrics[metrics["split"] == split].dropna(subset=["loss"])
            # Each draft step weighs as much as it has supervised slots.
            total = (rows["loss"] * rows["slots"]).groupby(rows["step"]).sum()
            loss = total / rows["slots"].groupby(rows["step"]).sum()
            if split == "train":
                ax.plot(loss.index, loss, color=colour, alpha=0.25, linewidth=1)
                ax.plot(loss.index, _smooth(loss), color=colour, label=name)
            else:
                ax.plot(loss.index, loss, color=colour, marker="o", label=name)
        ax.set(xlabel="optimizer step", ylabel="soft cross-entropy, nats", title="Loss")
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        ax.legend()
    return ax


def plot_draft_accuracy(metrics: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Plot how often the drafter's first choice is the target's, by draft step.

    The share is of slots. metrics: as in plot_loss, with accuracy.
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        for draft_step, colour in zip(sorted(metrics["draft_step"].unique()), COLOURS):
            rows = metrics[metrics["draft_step"] == draft_step].dropna(subset=["accuracy"])
            train = rows[rows["split"] == "train"]
            heldout = rows[rows["split"] == "heldout"]
            ax.plot(
                train["step"],
                _smooth(train["accuracy"]),
                color=colour,
                label=f"step {draft_step + 1}, training",
            )
            ax.plot(
                heldout["step"],
                heldout["accuracy"],
                color=colour,
                marker="o",
                linestyle="--",
                label=f"step {draft_step + 1}, held out",
            )
        ax.set(
            xlabel="optimizer step",
            ylabel="accuracy",
            title="Accuracy per draft step",
            ylim=(0, None),
        )
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        # The curves fill the axes, so the legend stands beside them.
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def plot_heldout_acceptance(metrics: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Plot the held-out acceptance length of the offline walk at each evaluation.

    metrics: as in plot_loss, with acceptance_length.
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax, height=3.2)
        judged = metrics.dropna(subset=["acceptance_length"]).drop_duplicates("step")
        ax.plot(judged["step"], judged["acceptance_length"], color=VERMILION, marker="o")
        ax.set(
            xlabel="optimizer step",
            ylabel="acceptance length",
            title="Held-out acceptance length (offline walk, bonus token included)",
            xlim=(0, None),
        )
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return ax


def plot_ablations(rows: list[dict], ax: Axes | None = None) -> Axes:
    """Plot how each variant of training changes the acceptance length, with intervals.

    rows: those of benchmarks/ablations.py.
    """
    with plt.rc_context(STYLE):
        rows = [row for row in rows if row["difference"]][::-1]
        ax = _axes(ax, height=1.4 + 0.33 * len(rows))
        values = np.array([row["difference"]["value"] for row in rows])
        for y, (value, row) in enumerate(zip(values, rows)):
            difference = row["difference"]
            ax.errorbar(
                [value],
                [y],
                xerr=_error(np.array([value]), [difference]),
                color=_difference_colour(value, difference["low"], difference["high"]),
                fmt="o",
                capsize=4,
            )
        ax.axvline(0, color="black", linewidth=1)
        ax.set_yticks(range(len(rows)), [f"{row['question']}: {row['variant']}" for row in rows])
        ax.set(
            xlabel="difference in held-out acceptance length, paired by prompt",
            title="Against the base (95 % intervals; grey: not clear of zero)",
            ylim=(-0.7, len(rows) - 0.3),
        )
        ax.grid(axis="y", visible=False)
    return ax


def _difference_colour(value: float, low: float, high: float) -> str:
    """Return grey for an interval that contains 0, else green for a gain, red for a loss."""
    excludes_zero = low > 0 or high < 0  # False where there is no interval (NaN)
    if not excludes_zero:
        return GREY
    return GREEN if value > 0 else VERMILION


def plot_acceptance_by_position(by_position: list[dict], ax: Axes | None = None) -> Axes:
    """Plot the acceptance of draft token 1, 2, ... with 95 % intervals.

    by_position: that block of acceptance.json (position, unconditional, conditional).
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        series = (
            ("unconditional", BLUE, "o", -0.05, "of all drafts at this position"),
            ("conditional", ORANGE, "s", 0.05, "of those whose drafts before were accepted"),
        )
        for name, colour, marker, shift, label in series:
            rows = [(p["position"], p[name]) for p in by_position if p[name]["value"] is not None]
            x = np.array([position + shift for position, _ in rows])
            values = np.array([interval["value"] for _, interval in rows])
            ax.errorbar(
                x,
                values,
                yerr=_error(values, [interval for _, interval in rows]),
                color=colour,
                marker=marker,
                markersize=8,
                capsize=5,
                label=label,
            )
        highest = max(
            [p["conditional"]["high"] or p["conditional"]["value"] or 0 for p in by_position],
            default=1,
        )
        ax.set(
            xlabel="position of the draft",
            ylabel="accepted",
            title="Acceptance by position",
            ylim=(0, min(1, 1.35 * highest) or 1),
        )
        ax.set_xlim(0.6, max([p["position"] for p in by_position], default=1) + 0.4)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        ax.legend()
    return ax


def plot_acceptance_by_category(by_category: list[dict], ax: Axes | None = None) -> Axes:
    """Plot the acceptance length of each category of prompts, with intervals.

    by_category: that block of acceptance.json.
    """
    with plt.rc_context(STYLE):
        rows = sorted(by_category, key=lambda c: c["acceptance_length"]["value"])
        ax = _axes(ax, height=1.2 + 0.36 * len(rows))
        values = np.array([c["acceptance_length"]["value"] for c in rows])
        ax.barh(range(len(rows)), values - 1, left=1, color=SKY)
        ax.errorbar(
            values,
            range(len(rows)),
            xerr=_error(values, [c["acceptance_length"] for c in rows]),
            color=GREY,
            fmt="none",
            capsize=4,
        )
        ax.set_yticks(range(len(rows)), [f"{c['category']} ({c['prompts']})" for c in rows])
        ax.set(
            xlabel="acceptance length (1 = nothing accepted)",
            title="Acceptance length by category (prompts)",
        )
        ax.grid(axis="y", visible=False)
    return ax


def panels(
    columns: int,
    height: float = 4.2,
    width: float = 10.0,
    ratios: tuple[float, ...] | None = None,
    sharey: bool = False,
) -> list[Axes]:
    """Return axes beside each other in one figure.

    They are equally wide, or as wide as `ratios` say; with `sharey` they share one y axis.
    height, width: of the figure, in inches.
    """
    with plt.rc_context(STYLE):
        _, axes = plt.subplots(
            1, columns, figsize=(width, height), width_ratios=ratios, sharey=sharey
        )
    return list(axes)


def _boundary_axis(ax: Axes, boundaries) -> None:
    """Show boundaries along x in their true distances, with a tick at each while they are few."""
    if len(boundaries) <= 12:
        ax.set_xticks(list(boundaries))
    else:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("boundary (0: embedding output)")


def plot_state_norms(stats: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Plot the norm per token by boundary on a log scale, the first token apart.

    stats: table of `stats.boundary_stats`.
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        x = stats["boundary"]
        for low, high, width, label in (
            ("p01", "p99", 1.5, "1 % to 99 %"),
            ("p05", "p95", 4, "5 % to 95 %"),
            ("p25", "p75", 8, "25 % to 75 %"),
        ):
            ax.vlines(
                x,
                stats[f"norm_{low}"],
                stats[f"norm_{high}"],
                color=SKY,
                linewidth=width,
                label=label,
            )
        ax.plot(
            x,
            stats["norm_p50"],
            color=BLUE,
            marker="o",
            linestyle="none",
            label="median, first tokens left out",
        )
        ax.plot(
            x,
            stats["first_norm_p50"],
            color=VERMILION,
            marker="D",
            linestyle="none",
            label="first tokens: median",
        )
        ax.set_yscale("log")
        _boundary_axis(ax, x)
        ax.set(ylabel="Euclidean norm of a token's state", title="Norm of the states")
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def plot_largest(stats: pd.DataFrame, large: float, ax: Axes | None = None) -> Axes:
    """Plot the largest and the median |x| by boundary on a log scale.

    stats: table of `stats.boundary_stats`. large: a value that is drawn as a line.
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        x = stats["boundary"]
        ax.plot(
            x,
            stats["first_largest"],
            color=VERMILION,
            marker="D",
            linestyle=":",
            label="first tokens: largest",
        )
        ax.plot(
            x,
            stats["largest"],
            color=BLUE,
            marker="o",
            linestyle=":",
            label="later tokens: largest",
        )
        ax.plot(x, stats["median"], color=GREY, marker="s", linestyle=":", label="all: median")
        ax.axhline(large, color=GREY, linewidth=1, label=f"{large:g}")
        ax.set_yscale("log")
        _boundary_axis(ax, x)
        ax.set(ylabel="|x| of a single value", title="Largest single values")
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def plot_effective_rank(stats: pd.DataFrame, hidden_size: int, ax: Axes | None = None) -> Axes:
    """Plot the effective rank by boundary. stats: table of `stats.boundary_stats`."""
    with plt.rc_context(STYLE):
        ax = _axes(ax, height=3.6)
        ax.plot(stats["boundary"], stats["effective_rank"], color=BLUE, marker="o", linestyle=":")
        _boundary_axis(ax, stats["boundary"])
        ax.set(
            ylabel=f"directions, of {hidden_size:,}",
            title="Effective rank of the states",
            ylim=(0, None),
        )
    return ax


def plot_boundary_map(matrix: np.ndarray, boundaries, name: str, ax: Axes | None = None) -> Axes:
    """Plot a similarity of each boundary with each, as a map from 0 to 1.

    The map has numbers while the boundaries are few. matrix: [B, B].
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        few = len(boundaries) <= 8
        picture = ax.imshow(np.clip(matrix, 0, 1), vmin=0, vmax=1, cmap="cividis", origin="lower")
        shown = [i for i in range(len(boundaries)) if few or i % (len(boundaries) // 8) == 0]
        ax.set_xticks(shown, [str(boundaries[i]) for i in shown])
        ax.set_yticks(shown, [str(boundaries[i]) for i in shown])
        if few:
            for (i, j), value in np.ndenumerate(matrix):
                ax.text(
                    j,
                    i,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    color="black" if value > 0.6 else "white",
                )
        ax.set(xlabel="boundary", ylabel="boundary", title=name)
        ax.grid(visible=False)
        ax.figure.colorbar(picture, ax=ax, shrink=0.8)
    return ax


def plot_probes(probes: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Plot what a linear map reads off each boundary.

    These are R^2 of the last state and agreement on the next token.
    probes: table of `stats.probes`.
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        x = probes["boundary"]
        agreement = probes["agreement"]
        error = np.array(
            [
                agreement - probes["low"].fillna(agreement),
                probes["high"].fillna(agreement) - agreement,
            ]
        )
        ax.errorbar(
            x,
            agreement,
            yerr=error,
            color=BLUE,
            marker="o",
            linestyle=":",
            capsize=3,
            label="next token: same first choice as the target's",
        )
        ax.plot(x, probes["r2"], color=ORANGE, marker="s", linestyle=":", label="last state: R²")
        ax.axhline(
            probes["constant"].iloc[0],
            color=GREY,
            linewidth=1,
            label="next token: always the commonest choice",
        )
        _boundary_axis(ax, x)
        ax.set(
            ylabel="share, other samples",
            title="What a linear map from one boundary foresees",
            ylim=(min(0, probes["r2"].min() - 0.03), 1.03),
        )
        ax.legend(loc="upper left")
    return ax


def plot_histogram(
    values, label: str, counted: str, title: str, mark: float | None = None, ax: Axes | None = None
) -> Axes:
    """Plot a histogram of shares from 0 to 1, counts on a log scale, with a line at `mark`."""
    with plt.rc_context(STYLE):
        ax = _axes(ax, height=3.6)
        ax.hist(values, bins=np.linspace(0, 1, 41), color=BLUE, log=True)
        if mark is not None:
            ax.axvline(mark, color=VERMILION, linewidth=1.5)
        ax.set(xlabel=label, ylabel=f"{counted}, log scale", title=title, xlim=(0, 1))
        ax.set_ylim(bottom=0.7)
    return ax


def plot_heldout_coverage(ceilings: pd.DataFrame, chosen: int, ax: Axes | None = None) -> Axes:
    """Plot the share of held-out response tokens in a draft vocabulary of size D.

    ceilings: table of `stats.ceilings`. chosen: the run's D.
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        ax.plot(ceilings["draft_vocab_size"], ceilings["coverage"], color=BLUE, marker="o")
        _mark_size(ax, ceilings, "coverage", chosen, "{:.1%}")
        ax.set(
            ylabel="response tokens covered",
            title="Coverage, held-out responses",
            ylim=(None, 1.02),
        )
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return ax


def plot_ceiling(
    ceilings: pd.DataFrame, chosen: int, draft_length: int, ax: Axes | None = None
) -> Axes:
    """Plot the acceptance length that coverage alone allows.

    ceilings: table of `stats.ceilings`. chosen: the run's D. draft_length: draft tokens of a step.
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        x = ceilings["draft_vocab_size"]
        ax.fill_between(
            x,
            ceilings["low"],
            ceilings["high"],
            color=SKY,
            alpha=0.4,
            linewidth=0,
            label="95 % interval",
        )
        ax.plot(x, ceilings["acceptance_length"], color=BLUE, marker="o", label="walked")
        ax.plot(x, ceilings["formula"], color=ORANGE, linestyle="--", label="1 + c + ... + c^K")
        ax.axhline(draft_length + 1, color=GREY, linewidth=1)
        _mark_size(ax, ceilings, "acceptance_length", chosen, "{:.2f}")
        ax.set(
            ylabel="acceptance length, with bonus token",
            title=f"Acceptance ceiling, drafts of {draft_length}",
            ylim=(None, draft_length + 1.1),
        )
        ax.legend(loc="lower right")
    return ax


def _mark_size(ax: Axes, ceilings: pd.DataFrame, column: str, chosen: int, number: str) -> None:
    """Show sizes of the draft vocabulary along x and mark the chosen one with its value."""
    ax.set_xscale("log", base=2)
    ticks = [d for d in ceilings["draft_vocab_size"] if (d & (d - 1)) == 0][::2]
    ax.set_xticks(ticks, [f"{d:,}" for d in ticks])
    value = ceilings.set_index("draft_vocab_size")[column][chosen]
    ax.plot([chosen], [value], color=VERMILION, marker="o", markersize=9, linestyle="none")
    ax.annotate(
        f"D = {chosen:,}: {number.format(value)}",
        (chosen, value),
        xytext=(10, -16),
        textcoords="offset points",
        color=VERMILION,
    )
    ax.set_xlabel("draft vocabulary size D, tokens")


def plot_drift(table: pd.DataFrame, rounding: float, ax: Axes | None = None) -> Axes:
    """Plot the relative error per token between two stores by boundary, on a log scale.

    table: that of `stats.Drift`. rounding: the error of one rounding, drawn as a line.
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        x = table["boundary"]
        floor = rounding / 100  # for errors of 0, which a log scale cannot show
        for low, high, width, label in (
            ("p05", "p99", 1.5, "5 % to 99 %"),
            ("p05", "p95", 5, "5 % to 95 %"),
        ):
            ax.vlines(
                x,
                table[f"error_{low}"].clip(lower=floor),
                table[f"error_{high}"].clip(lower=floor),
                color=SKY,
                linewidth=width,
                label=label,
            )
        ax.plot(
            x,
            table["error_p50"].clip(lower=floor),
            color=BLUE,
            marker="o",
            linestyle="none",
            label="median",
        )
        ax.plot(
            x,
            table["first_error_p50"].clip(lower=floor),
            color=VERMILION,
            marker="D",
            linestyle="none",
            label="first tokens: median",
        )
        ax.axhline(rounding, color=GREY, linewidth=1, label="one rounding")
        ax.set_yscale("log")
        _boundary_axis(ax, x)
        ax.set(
            ylabel="|difference| / |state|, per token",
            title="How far the states of the two stores are apart",
        )
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def plot_drift_cosine(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Plot 1 - cosine per token between two stores by boundary, on a log scale.

    table: that of `stats.Drift`.
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        x = table["boundary"]
        floor = 1e-8  # for cosines of 1, which a log scale cannot show
        for column, colour, marker, label in (
            ("cosine_p50", BLUE, "o", "median"),
            ("cosine_p05", ORANGE, "s", "worst 5 %"),
            ("cosine_p01", VERMILION, "^", "worst 1 %"),
        ):
            ax.plot(
                x,
                (1 - table[column]).clip(lower=floor),
                color=colour,
                marker=marker,
                linestyle=":",
                label=label,
            )
        ax.set_yscale("log")
        _boundary_axis(ax, x)
        ax.set(ylabel="1 - cosine, per token", title="How far their directions turn")
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def plot_coverage(counts: np.ndarray, chosen: int, ax: Axes | None = None) -> Axes:
    """Plot the share of supervised tokens that the D most frequent ids cover, for every D.

    counts: [V]. chosen: the D of this run.
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        ordered = np.sort(np.asarray(counts))[::-1]
        share = np.cumsum(ordered) / max(ordered.sum(), 1)  # [V]
        ax.plot(np.arange(1, len(share) + 1), share, color=BLUE)
        size = min(chosen, len(share))
        covered = share[size - 1]
        ax.plot([size], [covered], color=VERMILION, marker="o", markersize=8)
        ax.annotate(
            f"D = {chosen:,}: {covered:.1%}",
            (size, covered),
            xytext=(0, -40),
            textcoords="offset points",
            ha="center",
            color=VERMILION,
        )
        ax.set_xscale("log")
        ax.set(
            xlabel="draft vocabulary size D",
            ylabel="supervised tokens covered",
            title="Vocabulary coverage, training topics",
            ylim=(0, 1.02),
        )
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return ax


def plot_categories(index: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Plot the samples per category and split. index: a store's index."""
    with plt.rc_context(STYLE):
        table = index[index["state"] == "extracted"].pivot_table(
            index="category",
            columns="split",
            values="id",
            aggfunc="count",
            fill_value=0,
            observed=True,
        )
        table = table.loc[table.sum(axis=1).sort_values().index]
        ax = _axes(ax, height=1.2 + 0.36 * len(table))
        left = np.zeros(len(table))
        for split, colour, name in (
            ("train", BLUE, "training topics"),
            ("heldout", ORANGE, "held-out topics"),
        ):
            if split in table:
                ax.barh(table.index, table[split], left=left, color=colour, label=name)
                left += table[split].to_numpy()
        ax.set(xlabel="samples", title="Samples by category")
        ax.grid(axis="y", visible=False)
        ax.legend(loc="upper right", bbox_to_anchor=(1, -1.7 / len(table)), ncols=2)
    return ax


def plot_lengths(index: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Plot a histogram of the samples' lengths: all tokens, and supervised ones.

    index: a store's index.
    """
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
    """Plot how far states are from what they should be, by boundary.

    Median and 90th percentile over tokens stand beside the limit. tests: those of parity.json.
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        rows = {test["name"]: test["rows"] for test in tests}
        series = {"stored, against float32": rows["boundary"]}
        for row in rows["serving"]:
            series.setdefault(f"stored, against {row['how']}", []).append(row)
        x = {row["boundary"]: n for n, row in enumerate(rows["boundary"])}
        width = 0.8 / len(series)
        for n, (name, boundary_rows) in enumerate(series.items()):
            shift = (n - (len(series) - 1) / 2) * width
            positions = np.array([x[row["boundary"]] for row in boundary_rows]) + shift
            median = np.array([row["error_p50"] for row in boundary_rows])
            high = np.array([row["error_p90"] for row in boundary_rows])
            ax.errorbar(
                positions,
                median,
                yerr=[np.zeros_like(median), high - median],
                color=COLOURS[n],
                marker="os^Dv"[n % 5],
                markersize=8,
                capsize=4,
                linestyle="none",
                label=name,
            )
            limits = np.array([row["limit_p50"] for row in boundary_rows])
            ax.hlines(
                limits,
                positions - width / 2,
                positions + width / 2,
                color=VERMILION,
                linewidth=2,
                label="limit of the median: two floors" if n == 0 else None,
            )
        ax.set_xticks(list(x.values()), [str(b) for b in x])
        ax.set_ylim(0, None)
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=1))
        ax.set(
            xlabel="boundary",
            ylabel="distance, % of the state's own size",
            title="Median distance of the states (whisker: 90th percentile)",
        )
        ax.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2)
    return ax


def _error(values: np.ndarray, intervals: list[dict]) -> np.ndarray:
    """Return the distances to both ends of each interval for errorbar, [2, n].

    An interval that could not be made gives NaN, which draws nothing.
    """
    low = _interval_ends(intervals, "low")
    high = _interval_ends(intervals, "high")
    return np.abs(np.array([values - low, high - values]))


def _interval_ends(intervals: list[dict], end: str) -> np.ndarray:
    values = [interval[end] for interval in intervals]
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def plot_tuning(table: pd.DataFrame, noise: dict[str, float], ax: Axes | None = None) -> Axes:
    """Plot the speed of each trial's settings divided by those it was measured beside.

    Intervals are of 95 %. Shaded: how much two servers with the same settings differ.
    table: `server_settings.trials_table`. noise: by measure, the factor by which equals may differ.
    """
    with plt.rc_context(STYLE):
        table = table[::-1].reset_index(drop=True)
        ax = _axes(ax, height=1.6 + 0.42 * len(table))
        for measure, colour, shift in (("prefill", BLUE, 0.13), ("decode", ORANGE, -0.13)):
            rows = table[[isinstance(ratio, dict) for ratio in table[measure]]]
            values = np.array([ratio["value"] for ratio in rows[measure]])
            ax.axvspan(1 / noise[measure], noise[measure], color=colour, alpha=0.1, linewidth=0)
            ax.errorbar(
                values,
                rows.index + shift,
                xerr=_error(values, list(rows[measure])),
                color=colour,
                fmt="o",
                capsize=4,
                label=measure,
            )
        ax.axvline(1, color="black", linewidth=1)
        names = []
        for change, outcome in zip(table["change"], table["outcome"]):
            decided = outcome in ("kept", "refused")
            names.append(f"{change}: {outcome}" if decided else f"{change}")
        ax.set_yticks(range(len(table)), names)
        ax.set(
            xlabel="tokens per second, divided by those of the settings beside it",
            title="Server settings, each beside those kept before",
            ylim=(-0.6, len(table) - 0.4),
        )
        ax.grid(axis="y", visible=False)
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def plot_choices(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Plot the acceptance length of each choice of boundaries with 95 % intervals.

    Single seeds are dots; the default is marked. table: that of `boundaries.choices_table`.
    """
    with plt.rc_context(STYLE):
        rows = table.iloc[::-1].reset_index(drop=True)
        ax = _axes(ax, height=1.6 + 0.3 * len(rows))
        for y, row in rows.iterrows():
            colour = _choice_colour(row)
            length = np.array([row["acceptance_length"]])
            ax.errorbar(
                length,
                [y],
                xerr=_error(length, [{"low": row["low"], "high": row["high"]}]),
                color=colour,
                fmt="o",
                markersize=7,
                markerfacecolor="white" if row["not_servable"] else colour,
                capsize=3,
            )
            if row["seeds"] > 1:
                ax.plot(
                    row["by_seed"],
                    np.full(row["seeds"], y + 0.28),
                    color=colour,
                    marker=".",
                    markersize=5,
                    linestyle="none",
                )
            if row["kind"] == "default":
                ax.axvline(row["acceptance_length"], color=VERMILION, linewidth=1, linestyle=":")
        _choice_names(ax, rows)
        ax.set(xlabel="acceptance length, bonus token included", title="Held-out acceptance length")
    return ax


def plot_choice_bytes(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Plot the bytes of a token in a store, by choice in the order of `plot_choices`.

    The states fed to the drafter stand in front of everything stored, which adds those of the
    teacher, ids and mask. table: that of `boundaries.choices_table`.
    """
    with plt.rc_context(STYLE):
        rows = table.iloc[::-1].reset_index(drop=True)
        ax = _axes(ax, height=1.6 + 0.3 * len(rows))
        ax.barh(
            rows.index, rows["stored_bytes"] / 1024, color=SKY, label="stored, with the last state"
        )
        ax.barh(
            rows.index, rows["fed_bytes"] / 1024, color=BLUE, height=0.4, label="fed to the drafter"
        )
        _choice_names(ax, rows)
        ax.set(xlabel="bytes of a token, KiB")
        ax.legend(loc="lower left", bbox_to_anchor=(-0.05, 1), fontsize=10)
    return ax


def plot_choice_differences(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Plot the difference of each choice to the default, with 95 % intervals.

    It is paired by sample; single seeds are dots. table: that of `boundaries.choices_table`.
    """
    with plt.rc_context(STYLE):
        rows = table[table["kind"] != "default"].sort_values("difference").reset_index(drop=True)
        ax = _axes(ax, height=1.6 + 0.3 * len(rows))
        for y, row in rows.iterrows():
            low = row["difference_low"]
            high = row["difference_high"]
            difference = np.array([row["difference"]])
            colour = _difference_colour(row["difference"], low, high)
            ax.errorbar(
                difference,
                [y],
                xerr=_error(difference, [{"low": low, "high": high}]),
                color=colour,
                fmt="o",
                markersize=7,
                markerfacecolor="white" if row["not_servable"] else colour,
                capsize=3,
            )
            if row["seeds"] > 1:
                ax.plot(
                    row["difference_by_seed"],
                    np.full(len(row["difference_by_seed"]), y + 0.28),
                    color=colour,
                    marker=".",
                    markersize=5,
                    linestyle="none",
                )
        ax.axvline(0, color="black", linewidth=1)
        _choice_names(ax, rows)
        ax.set(
            xlabel="difference in held-out acceptance length, paired by sample",
            title="Against the default",
        )
    return ax


def plot_choice_positions(
    positions: pd.DataFrame, kinds: dict[str, str], ax: Axes | None = None
) -> Axes:
    """Plot the conditional acceptance by draft position, one line a choice.

    positions: table of `boundaries.by_position`. kinds: choice -> kind; the default is red.
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        names = list(positions["name"].unique())
        colours = iter([c for c in COLOURS if c != VERMILION] * len(names))
        for n, name in enumerate(names):
            rows = positions[positions["name"] == name].dropna(subset=["value"])
            default = kinds[name] == "default"
            ax.errorbar(
                rows["position"] + 0.06 * (n - (len(names) - 1) / 2),
                rows["value"],
                yerr=_error(rows["value"].to_numpy(), rows[["low", "high"]].to_dict("records")),
                color=VERMILION if default else next(colours),
                marker="os^Dvp"[n % 6],
                capsize=3,
                linewidth=1.2,
                label=f"{name} ({kinds[name]})",
            )
        ax.set(
            xlabel="position of the draft",
            ylabel="accepted, of those reached",
            title="Acceptance by position",
            ylim=(0, None),
        )
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def plot_pairs(boundaries: list[int], lengths: np.ndarray, ax: Axes | None = None) -> Axes:
    """Plot a heat map of the acceptance length of pairs of boundaries.

    Single boundaries are on the diagonal; what was not trained is hatched.
    boundaries, lengths [n, n]: those of `boundaries.pair_map`.
    """
    with plt.rc_context(STYLE):
        n = len(boundaries)
        ax = _axes(ax, height=2.0 + 0.42 * n)
        ax.set_facecolor("#eef0f2")
        ax.add_patch(
            plt.Rectangle(
                (-0.5, -0.5),
                n,
                n,
                fill=False,
                hatch="////",
                edgecolor="#c3c8ce",
                linewidth=0,
                zorder=1,
            )
        )
        picture = ax.imshow(np.ma.masked_invalid(lengths), cmap="cividis", origin="lower", zorder=2)
        middle = (np.nanmin(lengths) + np.nanmax(lengths)) / 2
        for (i, j), value in np.ndenumerate(lengths):
            if not np.isnan(value):
                ax.text(
                    j,
                    i,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    fontsize=10 if n > 8 else 12,
                    color="black" if value > middle else "white",
                )
        ax.set_xticks(range(n), [str(b) for b in boundaries])
        ax.set_yticks(range(n), [str(b) for b in boundaries])
        ax.set(xlabel="boundary", ylabel="boundary", title="Pairs; diagonal: one alone")
        ax.grid(visible=False)
        ax.figure.colorbar(picture, ax=ax, shrink=0.8, label="acceptance length")
    return ax


def plot_forward(forward: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Plot the greedy forward selection round by round.

    forward: table of `boundaries.forward_selection` with acceptance lengths as values.
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        for asked, colour, marker, name in (
            (True, BLUE, "o", "put forward by the probe"),
            (False, GREY, "x", "trained anyway"),
        ):
            rows = forward[forward["asked"] == asked]
            ax.plot(
                rows["round"],
                rows["value"],
                color=colour,
                marker=marker,
                linestyle="none",
                label=name,
            )
        chosen = forward[forward["chosen"]]
        ax.plot(chosen["round"], chosen["value"], color=VERMILION, marker="D", label="chosen")
        for row in chosen.itertuples():
            ax.annotate(
                " ".join(map(str, row.boundaries)),
                (row.round, row.value),
                xytext=(8, 6),
                textcoords="offset points",
                color=VERMILION,
            )
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlim(0.7, forward["round"].max() + 0.7)
        ax.margins(y=0.12)
        ax.set(
            xlabel="boundaries in the set",
            ylabel="acceptance length, one seed",
            title="Greedy forward selection",
        )
        ax.legend(loc="lower right")
    return ax


def plot_foresight(probes: pd.DataFrame, table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Plot probes of each boundary alone and, on the right axis, drafters fed from one.

    probes: that of a `boundaries.Study`. table: that of `boundaries.choices_table`.
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        ax.plot(
            probes["boundary"],
            probes["agreement"],
            color=BLUE,
            marker="o",
            markersize=4,
            linestyle=":",
            label="probe: next token, agreement (notebook 03)",
        )
        ax.plot(
            probes["boundary"],
            probes["foresight"],
            color=ORANGE,
            marker="s",
            markersize=4,
            linestyle=":",
            label="probe that guides: the token after, R²",
        )
        singles = table[table["boundaries"] == 1]
        right = ax.twinx()
        right.errorbar(
            singles["name"].astype(int),
            singles["acceptance_length"],
            yerr=_error(
                singles["acceptance_length"].to_numpy(), singles[["low", "high"]].to_dict("records")
            ),
            color=VERMILION,
            marker="D",
            capsize=4,
            linestyle="none",
            label="trained: acceptance length, right axis",
        )
        right.set_ylabel("acceptance length", color=VERMILION)
        right.spines["right"].set_visible(True)
        right.grid(visible=False)
        _boundary_axis(ax, probes["boundary"])
        ax.set(ylabel="share", title="Probes and training, one boundary alone")
        handles, labels = ax.get_legend_handles_labels()
        right_handles, right_labels = right.get_legend_handles_labels()
        ax.legend(
            handles + right_handles,
            labels + right_labels,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16),
            ncols=1,
        )
    return ax


def _choice_colour(row: pd.Series) -> str:
    return {"default": VERMILION, "forward": GREEN}.get(row["kind"], BLUE)


def _choice_names(ax: Axes, rows: pd.DataFrame) -> None:
    """Show the choices along y; those that a person named also show their name."""
    labels = []
    for name, kind in zip(rows["name"], rows["kind"]):
        found_by_search = kind in ("single", "pair", "forward")
        labels.append(name if found_by_search else f"{name} ({kind})")
    ax.set_yticks(rows.index, labels)
    ax.set_ylim(-0.7, len(rows) - 0.3)
    ax.grid(axis="y", visible=False)


# ---- page 05


def plot_methods(baselines: list[dict], ax: Axes | None = None) -> Axes:
    """Plot the acceptance length of each drafting method on the same prompts.

    Intervals are of 95 %; the speed ratio stands beside each. baselines: that block of
    acceptance.json.
    """
    with plt.rc_context(STYLE):
        rows = baselines[::-1]
        ax = _axes(ax, height=1.4 + 0.45 * len(rows))
        for y, row in enumerate(rows):
            value = np.array([row["acceptance_length"]["value"]])
            ax.errorbar(
                value,
                [y],
                xerr=_error(value, [row["acceptance_length"]]),
                color=BLUE if row["method"] == "drafter" else GREY,
                fmt="o",
                markersize=8,
                capsize=4,
            )
            ax.text(
                1.02,
                y,
                f"{row['speed_ratio']['value']:.2f} times",
                transform=ax.get_yaxis_transform(),
                va="center",
            )
        ax.text(
            1.02,
            len(rows) - 0.4,
            "speed",
            transform=ax.get_yaxis_transform(),
            va="bottom",
            fontweight="bold",
        )
        ax.axvline(1, color="black", linewidth=1)
        ax.set_yticks(range(len(rows)), [row["method"] for row in rows])
        ax.set(
            xlabel="acceptance length, bonus token included (1 = nothing accepted)",
            title=f"The same {rows[0]['prompts']} prompts",
            ylim=(-0.6, len(rows) - 0.4),
        )
        ax.grid(axis="y", visible=False)
    return ax


def plot_survival(by_position: list[dict], ax: Axes | None = None) -> Axes:
    """Plot the share of verify steps that accept at least i draft tokens, with intervals.

    by_position: that block of acceptance.json (survival).
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax, height=3.6)
        values = np.array([1.0, *(p["survival"]["value"] for p in by_position)])
        ax.bar(range(len(values)), values, color=SKY, width=0.7)
        ax.errorbar(
            range(1, len(values)),
            values[1:],
            yerr=_error(values[1:], [p["survival"] for p in by_position]),
            color=GREY,
            fmt="none",
            capsize=5,
        )
        for i, value in enumerate(values[1:], 1):
            ax.annotate(
                f"{value:.0%}",
                (i, by_position[i - 1]["survival"]["high"] or value),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
            )
        ax.set(
            xlabel="accepted drafts, at least",
            ylabel="verify steps",
            title="How far verify steps get",
            ylim=(0, 1.08),
        )
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return ax


def plot_calibration(calibration: dict, ax: Axes | None = None) -> Axes:
    """Plot the acceptance against the drafter's probability, by bins.

    Each bin has its interval and count. calibration: that block of acceptance.json.
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        rows = [b for b in calibration["bins"] if b["judged"]]
        x = np.array([b["confidence"] for b in rows])
        values = np.array([b["acceptance"]["value"] for b in rows])
        ax.plot(
            [0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", label="as often as it says"
        )
        ax.errorbar(
            x,
            values,
            yerr=_error(values, [b["acceptance"] for b in rows]),
            color=BLUE,
            marker="o",
            markersize=7,
            capsize=4,
            label="accepted",
        )
        highest = max(b["judged"] for b in rows) if rows else 1
        ax.bar(
            [(b["low"] + b["high"]) / 2 for b in rows],
            [0.18 * b["judged"] / highest for b in rows],
            width=0.09,
            color=ORANGE,
            alpha=0.5,
            label="first choices judged",
        )
        for b in rows:
            ax.annotate(
                f"{b['judged']:,}",
                ((b["low"] + b["high"]) / 2, 0.18 * b["judged"] / highest),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color="#7a5200",
            )
        ax.set(
            xlabel="the drafter's probability of its first choice",
            ylabel="accepted",
            title="Calibration",
            xlim=(0, 1),
            ylim=(0, 1.03),
        )
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.legend(loc="upper left")
    return ax


def plot_speed_grid(
    grid: list[dict], measured: list[dict], name: str, ax: Axes | None = None
) -> Axes:
    """Plot the predicted speed-up by draft steps, top-k and draft tokens, as a map.

    Settings that were measured are framed. grid, measured: those of a dtype in speed.json.
    """
    with plt.rc_context(STYLE):
        table = pd.DataFrame(grid)
        # All chains share one column: a chain's draft tokens follow from its steps.
        tree_tok = np.where(table["topk"] == 1, 0, table["draft_tokens"])
        table["column"] = list(zip(table["topk"], tree_tok))
        columns = sorted(table["column"].unique())
        steps = sorted(table["steps"].unique())
        ax = _axes(ax, height=1.8 + 0.5 * len(steps))
        values = (
            table.pivot(index="steps", columns="column", values="predicted")
            .reindex(index=steps, columns=columns)
            .to_numpy(dtype=float)
        )
        reach = max(np.nanmax(np.abs(np.log(values))), 0.05)
        ax.imshow(
            np.log(values), cmap="RdBu", vmin=-reach, vmax=reach, origin="lower", aspect="auto"
        )
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                ax.text(
                    column,
                    row,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    fontsize=10,
                    color="white" if abs(np.log(value)) > 0.65 * reach else "black",
                )
        for row in measured:
            tree_tok = 0 if row["topk"] == 1 else row["draft_tokens"]
            column = columns.index((row["topk"], tree_tok))
            ax.add_patch(
                plt.Rectangle(
                    (column - 0.5, steps.index(row["steps"]) - 0.5),
                    1,
                    1,
                    fill=False,
                    edgecolor="black",
                    linewidth=2.5,
                    zorder=3,
                    clip_on=False,
                )
            )
        ax.set_xticks(
            range(len(columns)), ["chain" if topk == 1 else str(n) for topk, n in columns]
        )
        ax.set_yticks(range(len(steps)), steps)
        for topk in sorted({k for k, _ in columns} - {1}):
            group = [i for i, (k, _) in enumerate(columns) if k == topk]
            ax.text(np.mean(group), len(steps) - 0.4, f"top-k {topk}", ha="center", va="bottom")
            ax.axvline(group[0] - 0.5, color="white", linewidth=4)
        ax.set(xlabel="draft tokens of a verify step", ylabel="draft steps")
        ax.set_title(f"Predicted speed-up over plain decoding, {name}", pad=24)
        ax.grid(visible=False)
    return ax


def plot_predicted(dtypes: dict[str, list[dict]], ax: Axes | None = None) -> Axes:
    """Plot the predicted and measured speed-up of the decoded settings, with intervals.

    dtypes: name -> `measured` of speed.json.
    """
    with plt.rc_context(STYLE):
        rows = [(dtype, row) for dtype, measured in dtypes.items() for row in measured][::-1]
        ax = _axes(ax, height=1.6 + 0.5 * len(rows))
        measured = np.array([row["measured"]["value"] for _, row in rows])
        ax.errorbar(
            measured,
            range(len(rows)),
            xerr=_error(measured, [row["measured"] for _, row in rows]),
            color=BLUE,
            fmt="o",
            markersize=8,
            capsize=4,
            label="measured",
        )
        ax.plot(
            [row["predicted"] for _, row in rows],
            range(len(rows)),
            color=VERMILION,
            marker="D",
            linestyle="none",
            label="predicted",
        )
        ax.axvline(1, color="black", linewidth=1)
        labels = []
        for dtype, row in rows:
            is_chain = row["topk"] == 1
            shape = "chain" if is_chain else f"top-k {row['topk']}, {row['draft_tokens']} tokens"
            labels.append(f"{dtype}, {row['what']}:\n{row['steps']} steps, {shape}")
        ax.set_yticks(range(len(rows)), labels)
        ax.set(
            xlabel="times plain decoding, prefill left out",
            title="Predicted and measured",
            ylim=(-0.6, len(rows) - 0.4),
        )
        ax.grid(axis="y", visible=False)
        ax.legend(loc="upper right", bbox_to_anchor=(1, -0.7 / len(rows)), ncols=2)
    return ax


def plot_offline(record: dict, ax: Axes | None = None) -> Axes:
    """Plot the acceptance length offline, over all slots, and decoded, with intervals.

    All are on the same prompts. record: offline.json.
    """
    with plt.rc_context(STYLE):
        names = {
            "greedy": "greedy",
            "sampled": "sampled, stored texts",
            "sampled_texts": "sampled, its own texts",
        }
        parts = [(name, record[key]) for key, name in names.items() if record[key]]
        series = (
            ("decoded", BLUE, "real decoding"),
            ("offline", GREEN, "offline walk"),
            ("all_slots", GREY, "offline, mean over all slots"),
        )
        ax = _axes(ax, height=1.4 + 0.9 * max(len(parts), 1))
        for n, (key, colour, label) in enumerate(series):
            values = np.array([part[key]["value"] for _, part in parts])
            ax.errorbar(
                values,
                [-i + 0.22 * (1 - n) for i in range(len(parts))],
                xerr=_error(values, [part[key] for _, part in parts]),
                color=colour,
                fmt="os^"[n],
                markersize=8,
                capsize=4,
                label=label,
            )
        ax.set_yticks(
            [-i for i in range(len(parts))],
            [f"{name} ({part['prompts']} prompts)" for name, part in parts],
        )
        ax.set(
            xlabel="acceptance length, bonus token included",
            title="Offline against real decoding, same prompts",
            ylim=(-len(parts) + 0.4, 0.6),
        )
        ax.grid(axis="y", visible=False)
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def plot_sides(columns: list[dict], ax: Axes | None = None) -> Axes:
    """Plot the share of verify steps that accept at least i draft tokens, with intervals.

    The sides are the offline estimate, our decoding and, where it was served, the server. The
    legend gives their acceptance lengths. columns: `eyas.evaluation.served.sides`.
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax)
        for n, (side, colour) in enumerate(zip(columns, (GREEN, BLUE, VERMILION))):
            length = side["acceptance_length"]
            values = np.array([interval["value"] for interval in side["survival"]])
            interval_text = ""
            if length["low"] is not None:
                interval_text = f" [{length['low']:.2f}, {length['high']:.2f}]"
            ax.errorbar(
                np.arange(1, len(values) + 1) + 0.14 * (n - 1),
                values,
                yerr=_error(values, side["survival"]),
                color=colour,
                fmt="s^o"[n],
                markersize=8,
                capsize=4,
                label=f"{side['name']}: acceptance length {length['value']:.2f}{interval_text}",
            )
        ax.set(
            xlabel="accepted drafts, at least",
            ylabel="verify steps",
            title=f"The same number from {'three' if len(columns) == 3 else 'two'} sides",
        )
        ax.set_ylim(bottom=0)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.legend(loc="upper left", bbox_to_anchor=(0, -0.16))
    return ax


def plot_throughput(ratios: list[dict], ax: Axes | None = None) -> Axes:
    """Plot the throughput of the server with the drafter divided by that without it.

    It is by requests at a time, with intervals. ratios: that block of throughput.json.
    """
    with plt.rc_context(STYLE):
        ax = _axes(ax, height=3.2)
        values = np.array([row["ratio"]["value"] for row in ratios])
        ax.axhline(1, color="black", linewidth=1)
        ax.errorbar(
            range(len(values)),
            values,
            yerr=_error(values, [row["ratio"] for row in ratios]),
            color=BLUE,
            fmt="o",
            markersize=8,
            capsize=5,
        )
        for i, value in enumerate(values):
            ax.annotate(
                f"{value:.2f}", (i, value), xytext=(9, 0), textcoords="offset points", va="center"
            )
        ax.set_xticks(range(len(values)), [row["parallel"] for row in ratios])
        ax.set(
            xlabel="requests at a time",
            ylabel="times the tokens per second",
            title="The server with the drafter against the server without it",
            xlim=(-0.5, len(values) - 0.5),
        )
        ax.set_ylim(bottom=0)
    return ax
