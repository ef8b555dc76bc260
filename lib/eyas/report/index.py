"""Render the page of all runs, and the summary page of one run, from their run.json.

Dictionaries in, HTML out; the Jinja templates beside this module hold the HTML. The pages are
static, and work from the disk and without scripts.

The index is a table, newest run first, and below it the details of each run. With scripts
(index.js) it can be sorted and filtered, and two runs stand side by side, also at
`index.html#compare=NAME,NAME`. For that the page contains the numbers and settings of all runs. A
difference of two runs is shown only where both measured the same thing in the same way
(`verdict.Measure.needs`). Its interval takes the runs as independent.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from eyas.config import SETTINGS
from eyas.evaluation.verdict import MEASURES, comma_interval, verdict
from eyas.progress import duration_text
from eyas.report import summary
from eyas.report.pages import failure_banner, page

TITLE = "Eyas: is my drafter worth serving?"
STATES = {"ok": "ok", "running": "running"}  # every other state is bad
ENDED_BADLY = {"failed": "failed", "died": "was killed", "interrupted": "was interrupted"}
_FOLDER = Path(__file__).parent
_SCRIPT = (_FOLDER / "index.js").read_text(encoding="utf-8")


def index_page(runs: list[dict]) -> str:
    """Return the index of all runs, from their run.json."""
    runs = sorted(runs, key=lambda run: run.get("started") or "", reverse=True)
    body = _render(
        "index.html.jinja",
        runs=runs,
        opening_runs=_opening_runs(runs),
        columns=_filled_columns(runs),
        largest_first=_LARGEST_FIRST,
        data=Markup(_comparison_data(runs)),
        script=Markup(_SCRIPT),
    )
    return page(TITLE, body, kind="index")


def summary_page(run: dict) -> str:
    """Return summary.html: one run in one file without links to others."""
    body = _render("summary.html.jinja", run=run, plot=_interval_plot(run))
    return page(f"Eyas: {run['run_name']}", body)


def _render(template: str, **values) -> str:
    """Return a template filled with values, which it escapes."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quote"] = quote
    environment.globals.update(
        summary=summary,
        verdict=verdict,
        comma_interval=comma_interval,
        states=STATES,
        run_id=_run_id,
        duration=_duration,
        failure_banners=_failure_banners,
        ended_badly=_ended_badly,
        has_answer=_has_answer,
        float32_text=_float32_text,
        with_code=_with_code,
    )
    html = environment.get_template(template).render(**values)
    # All pages write quotes as html.escape does; a browser shows both forms alike.
    return html.replace("&#39;", "&#x27;").replace("&#34;", "&quot;")


# ---- what the templates ask about a run


def _opening_runs(runs: list[dict]) -> list[dict]:
    """Return the newest run and, where it has no answer, the newest run that has one."""
    if not runs:
        return []
    newest = runs[0]
    answered = next((run for run in runs if run.get("headline")), newest)
    return [newest] if answered is newest else [newest, answered]


def _run_id(run: dict) -> str:
    return "run-" + quote(run["run_name"], safe="")


def _duration(record: dict) -> str:
    """Return the duration of a run or notebook; "" where it is unknown."""
    seconds = record.get("duration_s")
    return "" if seconds is None else duration_text(seconds)


def _failed_notebooks(run: dict) -> list[dict]:
    return [notebook for notebook in run.get("notebooks") or [] if notebook["state"] == "failed"]


def _failure_banners(run: dict) -> list[Markup]:
    """Return for each failed notebook what failed, where and what to do."""
    return [Markup(failure_banner(notebook)) for notebook in _failed_notebooks(run)]


def _ended_badly(run: dict) -> str:
    """Return how a run ended badly outside a notebook; "" where it did not."""
    if _failed_notebooks(run) or not summary.what_to_do(run):
        return ""
    return ENDED_BADLY.get(run["state"], f"is {run['state']}")


def _has_answer(run: dict) -> bool:
    """Return whether the details open with a sentence. A study of layers has its own."""
    if run.get("headline") or run["state"] == "running":
        return True
    return run["state"] == "ok" and not run.get("layer_choice")


def _float32_text(run: dict) -> str:
    """Return in how many prompts the float32 output is the greedy one; "" if not measured."""
    return dict(summary.same_text(run["headline"])).get("float32", "")


def _with_code(text: str) -> Markup:
    """Return text as HTML, with what stands in backticks as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", escape(text)))


# ---- the table of all runs


@dataclass(frozen=True)
class Cell:
    """Hold one cell of the table.

    sort: what the column is sorted by; "" stays at the end.
    text, small: what the cell shows, and a smaller line below it.
    tag, css, title: the HTML element around the text, its class and its tooltip.
    warning: the tooltip of a warning below the text.
    """

    sort: str | float = ""
    text: str = ""
    small: str = ""
    tag: str = ""
    css: str = ""
    title: str = ""
    warning: str = ""

    @property
    def empty(self) -> bool:
        """Return whether the cell shows nothing."""
        return not (self.text or self.small)


def _filled_columns(runs: list[dict]) -> dict[str, list[Cell]]:
    """Return the columns that have something for some run, one cell a run."""
    columns = {}
    for name, make_cell in _COLUMNS.items():
        cells = [make_cell(run) for run in runs]
        if not all(cell.empty for cell in cells):
            columns[name] = cells
    return columns


def _started_cell(run: dict) -> Cell:
    started = run.get("started") or ""
    return Cell(started, started[:10], small=summary.when(run.get("started"))[11:])


def _state_cell(run: dict) -> Cell:
    failed = summary.failed_notebook(run)
    state = run["state"]
    return Cell(
        state,
        state,
        small=f"in {failed['name']}" if failed else "",
        tag="span",
        css=f"state-{STATES.get(state, 'bad')}",
    )


def _profile_cell(run: dict) -> Cell:
    profile = run.get("profile") or ""
    return Cell(profile, Path(profile).name)


def _target_cell(run: dict) -> Cell:
    target = summary.target(run)
    boundaries = summary.boundaries(run)
    return Cell(target, target, small=f"boundaries {boundaries}" if boundaries else "")


def _data_cell(run: dict) -> Cell:
    """Return the number of training conversations, and of supervised tokens where it is known."""
    text = (run.get("headline") or {}).get("data")
    if text:
        numbers = re.match(r"([\d,]+) training (conversations) \(.*?([\d,]+ supervised)\)", text)
        if not numbers:
            return Cell(text=text)
        count, noun, supervised = numbers.groups()
        return Cell(int(count.replace(",", "")), f"{count} {noun}", small=f"{supervised} tokens")
    samples = (run.get("settings") or {}).get("train_samples")
    if samples is None:
        return Cell()
    return Cell(samples, f"up to {samples:,} conversations")


def _number_cell(key: str) -> Callable[[dict], Cell]:
    """Return the function that makes the cells of one measure."""

    def cell(run: dict) -> Cell:
        blocks = {measure.key: block for measure, block in summary.numbers(run)}
        block = blocks.get(key)
        if block is None:
            return Cell()
        interval = "too few prompts for an interval"
        if block.get("low") is not None:
            interval = f"{block['low']:.2f} to {block['high']:.2f}"
        return Cell(block["value"], f"{block['value']:.2f}", small=interval, tag="b")

    return cell


def _repeats_cell(run: dict) -> Cell:
    repeated = (run.get("headline") or {}).get("repeated_bigrams")
    if repeated is None:
        return Cell()
    return Cell(repeated, f"{repeated:.0%}", warning=summary.warning(run))


def _parity_cell(run: dict) -> Cell:
    text = (run.get("headline") or {}).get("parity") or ""
    if not text:
        return Cell()
    word = text.split(" (")[0]
    css = "good" if word == "passed" else "failed"
    return Cell(text, word, tag="span", css=css, title=text)


def _duration_cell(run: dict) -> Cell:
    return Cell(run.get("duration_s") or "", _duration(run))


def _code_cell(run: dict) -> Cell:
    commit, _, state = summary.code_state(run).partition(", ")
    if not state:
        return Cell(commit, commit)
    return Cell(commit, commit[:8], small=state, tag="code")


_COLUMNS: dict[str, Callable[[dict], Cell]] = {
    "Started": _started_cell,
    "State": _state_cell,
    "Profile": _profile_cell,
    "Target": _target_cell,
    "Data": _data_cell,
    "Acceptance": _number_cell("acceptance_length"),
    "Served": _number_cell("served"),
    "Speed-up float32": _number_cell("speed_ratio"),
    "Speed-up bfloat16": _number_cell("speed_ratio_bfloat16"),
    "Repeated bigrams": _repeats_cell,
    "Parity": _parity_cell,
    "Duration": _duration_cell,
    "Code": _code_cell,
}
_LARGEST_FIRST = {
    "Started",
    "Data",
    "Acceptance",
    "Served",
    "Speed-up float32",
    "Speed-up bfloat16",
    "Repeated bigrams",
    "Duration",
}


# ---- two runs side by side


def _comparison_data(runs: list[dict]) -> str:
    """Return what index.js compares, as JSON that may stand inside a <script>."""
    data = {
        "runs": [_comparison_record(run) for run in runs],
        "measures": [
            {"key": m.key, "label": m.label, "note": m.note, "needs": m.needs} for m in MEASURES
        ],
        "meanings": {name: setting.meaning for name, setting in SETTINGS.items()},
    }
    return json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")


def _comparison_record(run: dict) -> dict:
    """Return one run's numbers, settings, conditions and facts."""
    settings = run.get("settings") or {}
    facts = {
        name: text
        for name, text in summary.facts(run)
        if name not in ("Text", "In bfloat16", "Decoding")
    }
    for dtype, text in summary.same_text(run.get("headline") or {}):
        facts[f"Output identical to greedy, {dtype}"] = text
    return {
        "name": run["run_name"],
        "profile": run.get("profile") or "",
        "numbers": {measure.key: block for measure, block in summary.numbers(run)},
        "settings": settings,
        "given": list(run.get("given") or {}),
        "conditions": settings
        | {
            "target": summary.target(run),
            "machine": summary.machine(run),
            "torch": (run.get("versions") or {}).get("torch"),
        },
        "facts": facts,
    }


# ---- the figure of one run's summary


def _interval_plot(run: dict) -> dict | None:
    """Return the geometry of a plot of every number with its interval on one axis.

    1 is what plain decoding gives. Return None where there is no number. Lengths are in pixels.
    """
    numbers = summary.numbers(run)
    if not numbers:
        return None
    left = 230
    width = 620
    row_height = 34
    ends = [1.0]
    for _, block in numbers:
        values = (block.get(end) for end in ("value", "low", "high"))
        ends += [value for value in values if value is not None]
    lowest = min(ends) - 0.1
    highest = max(ends) + 0.1

    def x(value: float | None) -> float | None:
        if value is None:
            return None
        fraction = (value - lowest) / (highest - lowest)
        return round(left + fraction * (width - left - 70), 1)

    rows = [
        {
            "label": measure.label,
            "text": f"{block['value']:.2f}",
            "y": row_height * i + 22,
            "value": x(block["value"]),
            "low": x(block.get("low")),
            "high": x(block.get("high")),
        }
        for i, (measure, block) in enumerate(numbers)
    ]
    texts = [
        f"{measure.label} {block['value']:.2f}{comma_interval(block)}" for measure, block in numbers
    ]
    return {
        "width": width,
        "height": row_height * len(numbers) + 34,
        "one": x(1.0),
        "rows": rows,
        "text": "; ".join(texts),
    }
