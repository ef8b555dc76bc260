"""HTML of all runs in one page, and of one run's summary: strings out of run.json's, no files. The page is static, works from the disk, and without scripts too.

The index is a table, newest run first, and below it the details of each. With scripts (index.js) it can be sorted and filtered, and two runs stand side by
side, also at `index.html#compare=NAME,NAME`; for that the numbers and settings of all runs are in the page. A difference of two runs is shown only where
both measured the same thing in the same way (`verdict.Measure.needs`), and its interval takes them as independent.
"""

import json
import re
from html import escape
from pathlib import Path
from urllib.parse import quote

from eyas.config import SETTINGS
from eyas.evaluation import verdict
from eyas.progress import duration_text
from eyas.report import summary
from eyas.report.pages import failure_banner, page

_SCRIPT = (Path(__file__).parent / "index.js").read_text(encoding="utf-8")
STATES = {"ok": "ok", "running": "running"}  # every other state is bad


def index_page(runs: list[dict]) -> str:
    """The index of all runs, from their run.json."""
    runs = sorted(runs, key=lambda run: run.get("started") or "", reverse=True)
    head = "<h1>Is my drafter worth serving?</h1>"
    if not runs:
        return page(
            "Eyas: is my drafter worth serving?",
            f"{head}\n<p>No run yet: <code>python -m eyas report --profile demo</code></p>",
            kind="index",
        )
    newest = [runs[0]] + (
        [answered]
        if (answered := next((run for run in runs if run.get("headline")), runs[0])) is not runs[0]
        else []
    )
    body = "\n".join(
        [
            head,
            *map(_newest, newest),
            _table(runs),
            _COMPARE,
            "<h2>Each run</h2>",
            *map(_details, runs),
            f'<script type="application/json" id="data">{_data(runs)}</script>\n<script>\n{_SCRIPT}</script>',
        ]
    )
    return page("Eyas: is my drafter worth serving?", body, kind="index")


_COMPARE = """<section id="compare" hidden><h2>Side by side: <span id="compared"></span></h2>
<p class="muted">Numbers with 95 % intervals. The interval of a difference takes the two runs as independent, so it is too wide where they decoded the same prompts.
<button type="button" id="close">close</button></p>
<div class="scroll" id="compared-numbers"></div>
<p class="muted" id="paired">Paired by prompt, which tells smaller differences apart: <code></code></p>
<h3>Settings that differ</h3><div class="scroll" id="compared-settings"></div>
<h3>What else differs</h3><div class="scroll" id="compared-facts"></div></section>"""


def _newest(run: dict) -> str:
    """What the index opens with: the run's answer and main numbers, or how it failed and what to do."""
    bad = "" if run["state"] in STATES else " failed"
    return "\n".join(
        filter(
            None,
            [
                f'<p class="answer{bad}">{escape(summary.sentence(run))}</p>',
                f'<p class="muted">Run <a href="#{_id(run)}">{escape(run["run_name"])}</a>, {escape(summary.when(run.get("started")))}.</p>',
                _banners(run),
                _served(run),
                tiles(run),
                _warning(run),
            ],
        )
    )


def _table(runs: list[dict]) -> str:
    """The columns that some run has something for; a cell is (what to sort by, HTML)."""
    columns = {name: [cell(run) for run in runs] for name, cell in _COLUMNS.items()}
    columns = {name: cells for name, cells in columns.items() if any(html for _, html in cells)}
    heads = "".join(
        f'<th scope="col" aria-sort="{"descending" if name == "Started" else "none"}" data-first="{"descending" if name in _LARGEST_FIRST else "ascending"}">'
        f'<button type="button">{name}</button></th>'
        for name in columns
    )
    lines = []
    for i, run in enumerate(runs):
        name = escape(run["run_name"])
        tick = f'<td class="script"><label><input type="checkbox" value="{name}" aria-label="compare run {name}"> <span>compare</span></label></td>'
        cells = "".join(
            f'<td data-label="{column}" data-sort="{escape(str(cells[i][0]))}">{cells[i][1]}</td>'
            for column, cells in columns.items()
        )
        lines.append(f"<tr>{tick}{cells}</tr>\n")
    return (
        f'<div class="bar script"><label>Filter <input type="search" id="filter" placeholder="words, such as failed or a profile"></label><span id="count" class="muted" role="status"></span>'
        '<span class="muted">Tick two runs to compare them.</span></div>\n'
        f'<div class="scroll"><table class="runs" aria-label="all runs"><thead><tr><th class="script"></th>{heads}</tr></thead>\n<tbody>\n{"".join(lines)}</tbody></table></div>'
    )


def _run_cell(run: dict) -> tuple[str, str]:
    folder = quote(run["run_name"])
    links = [
        f'<a href="{folder}/{quote(n["page"])}" title="{escape(n.get("title") or n["name"])}">{escape(n["name"][:2])}</a>'
        for n in run.get("notebooks") or []
        if n.get("page")
    ]
    links += [
        f'<a href="{folder}/run.json">run.json</a>',
        f'<a href="{folder}/summary.html">summary</a>',
    ]
    copy = (
        f'<button type="button" data-copy="{escape(run["command"])}" title="{escape(run["command"])}">copy command</button>'
        if run.get("command")
        else ""
    )
    return (
        run["run_name"],
        f'<b><a href="#{_id(run)}">{escape(run["run_name"])}</a></b><div class="links">{"".join(links)}{copy}</div>',
    )


def _state_cell(run: dict) -> tuple[str, str]:
    failed = summary.failed_notebook(run)
    return (
        run["state"],
        f'<span class="state-{STATES.get(run["state"], "bad")}">{escape(run["state"])}</span>'
        + _small(f"in {failed['name']}" if failed else ""),
    )


def _number_cell(key: str):
    def cell(run: dict) -> tuple[float | str, str]:
        block = next((block for measure, block in summary.numbers(run) if measure.key == key), None)
        if not block:
            return "", ""
        between = (
            "too few prompts for an interval"
            if block.get("low") is None
            else f"{block['low']:.2f} to {block['high']:.2f}"
        )
        return block["value"], f"<b>{block['value']:.2f}</b>{_small(between)}"

    return cell


def _repeats_cell(run: dict) -> tuple[float | str, str]:
    share = (run.get("headline") or {}).get("repeated_bigrams")
    warned = (
        f'<small class="warning" title="{escape(summary.warning(run))}">WARNING: they explain part of it</small>'
        if summary.warning(run)
        else ""
    )
    return ("", "") if share is None else (share, f"{share:.0%}{warned}")


def _data_cell(run: dict) -> tuple[int | str, str]:
    text, settings = (run.get("headline") or {}).get("data"), run.get("settings") or {}
    if text:
        found = re.match(r"([\d,]+) training (conversations) \(.*?([\d,]+ supervised)\)", text)
        return (
            (int(found[1].replace(",", "")), f"{found[1]} {found[2]}{_small(f'{found[3]} tokens')}")
            if found
            else ("", escape(text))
        )
    return settings.get(
        "train_samples", ""
    ), f"up to {settings['train_samples']:,} conversations" if "train_samples" in settings else ""


def _small(text: str) -> str:
    return f"<small>{escape(text)}</small>" if text else ""


def _parity_cell(run: dict) -> tuple[str, str]:
    text = (run.get("headline") or {}).get("parity") or ""
    word = text.split(" (")[0]
    return (
        text,
        f'<span class="{"good" if word == "passed" else "failed"}" title="{escape(text)}">{escape(word)}</span>'
        if text
        else "",
    )


def _code_cell(run: dict) -> tuple[str, str]:
    commit, _, state = summary.code_state(run).partition(", ")
    return commit, (f"<code>{escape(commit[:8])}</code>" if state else escape(commit)) + _small(
        state
    )


_COLUMNS = {
    "Run": _run_cell,
    "Started": lambda run: (
        run.get("started") or "",
        escape((run.get("started") or "")[:10]) + _small(summary.when(run.get("started"))[11:]),
    ),
    "State": _state_cell,
    "Profile": lambda run: (run.get("profile") or "", escape(Path(run.get("profile") or "").name)),
    "Target": lambda run: (
        summary.target(run),
        escape(summary.target(run))
        + _small(f"boundaries {summary.boundaries(run)}" if summary.boundaries(run) else ""),
    ),
    "Data": _data_cell,
    "Acceptance": _number_cell("acceptance_length"),
    "Served": _number_cell("served"),
    "Speed-up float32": _number_cell("speed_ratio"),
    "Speed-up bfloat16": _number_cell("speed_ratio_bfloat16"),
    "Repeated bigrams": _repeats_cell,
    "Parity": _parity_cell,
    "Duration": lambda run: (
        run.get("duration_s") or "",
        duration_text(run["duration_s"]) if run.get("duration_s") is not None else "",
    ),
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


def _data(runs: list[dict]) -> str:
    """What index.js compares, as JSON that may stand inside a <script>."""
    known, shown = {name: setting.meaning for name, setting in SETTINGS.items()}, []
    for run in runs:
        facts = dict(summary.facts(run))
        conditions = (run.get("settings") or {}) | {
            "target": summary.target(run),
            "machine": summary.machine(run),
            "torch": (run.get("versions") or {}).get("torch"),
        }
        shown.append(
            {
                "name": run["run_name"],
                "profile": run.get("profile") or "",
                "numbers": {m.key: block for m, block in summary.numbers(run)},
                "settings": run.get("settings") or {},
                "given": list(run.get("given") or {}),
                "conditions": conditions,
                "facts": {
                    name: facts[name]
                    for name in facts
                    if name not in ("Text", "In bfloat16", "Decoding")
                }
                | dict(_same_text(run)),
            }
        )
    measures = [
        {"key": m.key, "label": m.label, "note": m.note, "needs": m.needs} for m in verdict.MEASURES
    ]
    return json.dumps(
        {"runs": shown, "measures": measures, "meanings": known}, ensure_ascii=False
    ).replace("<", "\\u003c")


def _same_text(run: dict) -> list[tuple[str, str]]:
    return [
        (f"Output identical to greedy, {dtype}", text)
        for dtype, text in summary.same_text(run.get("headline") or {})
    ]


def _details(run: dict) -> str:
    folder, state = quote(run["run_name"]), run["state"]
    mark = (
        ""
        if state == "ok"
        else f' <span class="state-{STATES.get(state, "bad")}">{escape(state)}</span>'
    )
    parts = [
        f'<details class="run" id="{_id(run)}"><summary><h2>Run {escape(run["run_name"])}</h2>{mark}'
        f'<span class="muted">{escape(summary.when(run.get("started")))}</span></summary>'
    ]
    parts.append(_banners(run))
    headline = run.get("headline")
    if headline or state == "running" or (state == "ok" and not run.get("layer_choice")):
        parts.append(
            f'<p class="answer">{escape(verdict.verdict(headline) if headline else summary.sentence(run))}</p>'
        )
    parts += [_served(run), tiles(run), _warning(run)]
    if run.get("layer_choice"):
        parts.append(f'<p class="answer">Which layers?</p><p>{escape(run["layer_choice"])}</p>')
    if run.get("command"):
        parts.append(
            f'<p class="command"><span>The command that makes it again:</span><code>{escape(run["command"])}</code>'
            f'<button type="button" data-copy="{escape(run["command"])}">copy</button></p>'
        )
    parts.append(facts_table(run))
    rows = "\n".join(_notebook_row(folder, n) for n in run.get("notebooks") or [])
    if rows:
        parts.append(
            f'<div class="scroll"><table class="head"><tr><th>Notebook</th><th>Question</th><th>State</th><th>Time</th></tr>\n{rows}\n</table></div>'
        )
    parts.append(
        f'<p class="muted"><a href="{folder}/run.json">run.json</a>: everything recorded of this run. To paste elsewhere: <a href="{folder}/summary.md">summary.md</a>, '
        f'<a href="{folder}/summary.html">summary.html</a>.</p></details>'
    )
    return "\n".join(filter(None, parts))


def _banners(run: dict) -> str:
    """What went wrong, where and what to do; '' for a run that goes on or ended well."""
    failed = [n for n in run.get("notebooks") or [] if n["state"] == "failed"]
    if failed or not summary.what_to_do(run):
        return "\n".join(map(failure_banner, failed))
    word = {"failed": "failed", "died": "was killed", "interrupted": "was interrupted"}.get(
        run["state"], f"is {run['state']}"
    )
    return (
        f'<div class="banner" role="alert"><p><strong>This run {word}.</strong> {escape(run.get("problem") or "")}</p>'
        f"<p>What to do: {_with_code(summary.what_to_do(run))}</p></div>"
    )


def _served(run: dict) -> str:
    return f"<p>{escape(summary.served_lead(run))}</p>" if summary.served_lead(run) else ""


def _warning(run: dict) -> str:
    return (
        f'<p class="warning"><b>WARNING:</b> {escape(summary.warning(run))}</p>'
        if summary.warning(run)
        else ""
    )


def _with_code(text: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def tiles(run: dict) -> str:
    """The main numbers, large; '' where none was measured."""
    headline = run.get("headline")
    if not headline:
        return ""
    html = [
        f'<div class="tile"><span>{m.label}</span><b>{b["value"]:.2f}</b><span>{", ".join(filter(None, (m.note, verdict.interval(b))))}; {b.get("prompts", "?")} prompts</span></div>'
        for m, b in summary.numbers(run)
    ]
    same = dict(summary.same_text(headline)).get("float32")
    if same:
        word = "yes" if headline.get("identical_float32") else "no"
        html.append(
            f'<div class="tile"><span>Same text</span><b class="{word}">{word}</b><span>output identical to greedy (float32): {word}, token for token in {same}</span></div>'
        )
    return '<div class="tiles">' + "\n".join(html) + "</div>"


def facts_table(run: dict) -> str:
    return (
        '<div class="scroll"><table>'
        + "".join(
            f"<tr><td>{name}</td><td>{escape(text)}</td></tr>"
            for name, text in summary.facts(run)
            if name != "Warning"
        )
        + "</table></div>"
    )


def _notebook_row(folder: str, record: dict) -> str:
    name, state = escape(record["name"]), record["state"]
    link = f'<a href="{folder}/{quote(record["page"])}">{name}</a>' if record.get("page") else name
    time = duration_text(record["duration_s"]) if record.get("duration_s") is not None else ""
    if record.get("earlier"):
        state += f", run of {summary.when(record['started'])}"
    css = ' class="failed"' if record["state"] == "failed" else ""
    return f"<tr><td>{link}</td><td>{escape(record.get('title') or '')}</td><td{css}>{escape(state)}</td><td>{time}</td></tr>"


def _id(run: dict) -> str:
    return "run-" + quote(run["run_name"], safe="")


# ---- one run, to be sent to somebody


def summary_page(run: dict) -> str:
    """summary.html: one file without links to others."""
    body = [
        f'<h1>Eyas run {escape(run["run_name"])} <span class="muted">{escape(summary.when(run.get("started")))}</span></h1>',
        _banners(run),
        f'<p class="answer">{escape(summary.sentence(run))}</p>',
        f"<p>{escape(summary.lead(run))}</p>" if summary.lead(run) else "",
        _served(run),
        _picture(run),
        _warning(run),
    ]
    if summary.more(run):
        body.append(f"<p>{escape(summary.more(run))}</p>")
    if summary.table(run):
        rows = "\n".join(
            "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>"
            for row in summary.table(run)
        )
        body.append(
            f'<div class="scroll"><table class="head"><tr><th></th><th>value</th><th>95 % interval</th><th>prompts</th></tr>\n{rows}</table></div>'
        )
    body += [
        facts_table(run),
        f'<p class="muted">{escape(summary.notebook_states(run))}</p>',
        f"<pre>{escape(run.get('command') or '')}</pre>",
    ]
    return page(f"Eyas: {run['run_name']}", "\n".join(filter(None, body)))


def _picture(run: dict) -> str:
    """Every number with its interval on one axis, where 1 is what plain decoding gives; '' where there is none."""
    numbers = summary.numbers(run)
    if not numbers:
        return ""
    ends = [1.0] + [
        b[end] for _, b in numbers for end in ("value", "low", "high") if b.get(end) is not None
    ]
    low, high, left, width, row = min(ends) - 0.1, max(ends) + 0.1, 230, 620, 34

    def x(value: float) -> float:
        return round(left + (value - low) / (high - low) * (width - left - 70), 1)

    height, lines = row * len(numbers) + 34, []
    for i, (m, b) in enumerate(numbers):
        y = row * i + 22
        lines.append(
            f'<text x="0" y="{y + 5}">{escape(m.label)}</text><text x="{width - 55}" y="{y + 5}" font-weight="600">{b["value"]:.2f}</text>'
        )
        if b.get("low") is not None:
            lines.append(
                f'<line x1="{x(b["low"])}" x2="{x(b["high"])}" y1="{y}" y2="{y}" stroke="var(--link)" stroke-width="3"/>'
            )
        lines.append(f'<circle cx="{x(b["value"])}" cy="{y}" r="6" fill="var(--link)"/>')
    said = "; ".join(
        f"{m.label} {b['value']:.2f}{', ' + verdict.interval(b) if verdict.interval(b) else ''}"
        for m, b in numbers
    )
    return (
        f'<figure><svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{escape(said)}" style="max-width: 100%; height: auto" font-size="15" fill="currentColor">'
        f'<line x1="{x(1)}" x2="{x(1)}" y1="6" y2="{height - 26}" stroke="var(--muted)" stroke-dasharray="4 4"/>{"".join(lines)}'
        f'<text x="{x(1)}" y="{height - 8}" text-anchor="middle" fill="var(--muted)">1: plain decoding</text></svg>'
        "<figcaption>Numbers with their 95 % intervals. At 1 nothing is gained: no draft accepted, or as fast as plain decoding.</figcaption></figure>"
    )
