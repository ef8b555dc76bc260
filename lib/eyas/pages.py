"""HTML of the reports: one self-contained page per executed notebook, and the index. Strings in, strings out; no network, no files.

A page holds everything it needs: own style (light and dark), figures as data URLs, code folded in <details>. A code cell that starts
with the comment `# Figure: ...` gives its figures that caption and alternative text. A cell tagged `settings` has its output folded.
"""

import os
import re
import sys
import sysconfig
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from eyas.files import ROOT, data_dir
from eyas.progress import duration_text

_CSS = """
:root { color-scheme: light dark; --text: #1d2733; --muted: #5b6875; --back: #ffffff; --soft: #f3f5f8; --line: #d9dfe6; --link: #0a5ea8;
  --good: #0b6b3a; --bad: #b3261e; --bad-back: #fdecea; --mark: #fff0b8; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e9ee; --muted: #9aa7b4; --back: #14191f; --soft: #1e252d; --line: #35404b; --link: #7fbcf5;
  --good: #6fd19b; --bad: #ff8a80; --bad-back: #3a1f1e; --mark: #5a4a10; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem 1.25rem 4rem; background: var(--back); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: .6rem 0; } h2 { font-size: 1.25rem; margin: 2rem 0 .5rem; } h3 { font-size: 1.05rem; }
a { color: var(--link); } code, pre { font: .86em/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; }
p code, li code, td code { background: var(--soft); padding: .05em .3em; border-radius: 3px; }
pre { background: var(--soft); border-radius: 6px; padding: .6rem .8rem; margin: .4rem 0; overflow-x: auto; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; border-bottom: 1px solid var(--line); padding-bottom: .5rem; font-size: .9rem; color: var(--muted); }
nav .right { margin-left: auto; }
button { font: inherit; color: var(--link); background: none; border: 0; padding: 0; cursor: pointer; text-decoration: underline; }
details.code { margin: .35rem 0; } details > summary { cursor: pointer; color: var(--muted); font-size: .8rem; }
details.code > summary { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.scroll { overflow-x: auto; margin: .5rem 0; } .scroll pre { white-space: pre-wrap; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
table, th, td { border: 0; }
th, td { padding: .28rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { font-weight: 600; } thead th, .head tr:first-child th { border-bottom: 2px solid var(--line); } .number { text-align: right; white-space: nowrap; }
table.dataframe thead th:not(.number) { text-align: left; }
figure { margin: 1rem 0; } figure img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
figcaption { color: var(--muted); font-size: .88rem; max-width: 46rem; }
mark { background: var(--mark); color: inherit; }
.error pre { border-left: 4px solid var(--bad); }
.banner { border: 2px solid var(--bad); background: var(--bad-back); border-radius: 8px; padding: .7rem 1rem; margin: 1rem 0; }
.banner .message { display: block; white-space: pre-wrap; max-height: 16rem; overflow: auto; } .banner strong, .failed { color: var(--bad); } .banner p { margin: .3rem 0; }
.answer { font-size: 1.3rem; font-weight: 600; margin: .8rem 0; } .muted { color: var(--muted); font-size: .88rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .8rem; margin: 1rem 0; }
.tile { background: var(--soft); border-radius: 8px; padding: .7rem .9rem; } .tile b { display: block; font-size: 1.55rem; line-height: 1.2; }
.tile span { color: var(--muted); font-size: .85rem; } .tile .yes { color: var(--good); } .tile .no { color: var(--bad); }
section.run { border-top: 1px solid var(--line); margin-top: 2.5rem; padding-top: .3rem; }
section.run:first-of-type { border: 0; margin-top: 0; }
"""

_TEMPLATE = """{%- extends 'classic/base.html.j2' -%}
{% macro caption(cell) %}{% if cell.source.startswith('# Figure: ') %}{{ cell.source.split('\\n')[0][10:] | escape_html }}{% endif %}{% endmacro %}
{% block input_group %}<details class="code"><summary>{% if caption(cell) %}Code of the figure{% else %}Code: {{ cell.source.split('\\n')[0] | escape_html }}{% endif %}</summary>
{{ cell.source | highlight_code(metadata=cell.metadata) }}</details>{% endblock %}
{% block output_group %}{% if 'settings' in cell.metadata.get('tags', []) %}<details><summary>Settings of this notebook</summary>{{ super() }}</details>
{% else %}{{ super() }}{% endif %}{% endblock %}
{% block output %}<div class="scroll">{{ super() }}</div>{% endblock %}
{% block data_svg %}<figure><img alt="{{ caption(cell) or 'figure' }}" src="data:image/svg+xml;base64,{{ output.data['image/svg+xml'] | text_base64 }}">
<figcaption>{{ caption(cell) }}</figcaption></figure>{% endblock %}
{% block data_png %}<figure><img alt="{{ caption(cell) or 'figure' }}" src="data:image/png;base64,{{ output.data['image/png'] | escape_html }}">
<figcaption>{{ caption(cell) }}</figcaption></figure>{% endblock %}
{% block error %}<div class="error"><pre>{% for line in output.traceback %}{{ line | ansi2html }}
{% endfor %}</pre></div>{% endblock %}
"""


def without_machine_paths(value: Any) -> Any:
    """The same JSON-like value with this machine's folders written relative to the repository ('data' stands for the data folder).

    Strings are changed wherever they are, but for images and keys.
    """
    folders = _machine_folders()

    def clean(value):
        if isinstance(value, str):
            for pattern, replacement in folders:
                value = pattern.sub(replacement, value)
            return value
        if isinstance(value, dict):
            return {k: v if k.startswith("image/") else clean(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(v) for v in value]
        return value

    return clean(value)


def _machine_folders() -> list[tuple[re.Pattern, str]]:
    names = {}
    for path, name in ((data_dir(), "data"), (ROOT, ""), (Path(sys.prefix), ".venv"), (Path(sysconfig.get_path("stdlib")), "python"),
                       (Path(tempfile.gettempdir()), "tmp"), (Path.home(), "~")):
        for spelled in {os.path.abspath(path), os.path.realpath(path)}:
            if spelled != "/" and spelled not in names:
                names[spelled] = name
    pairs = []
    for folder in sorted(names, key=len, reverse=True):  # the innermost folder first
        # not in the middle of a longer path; "m" ends the escape sequence that colours a path in a traceback
        start, name = r"(?:(?<![\w.~/-])|(?<=\dm))" + re.escape(folder), names[folder]
        pairs.append((re.compile(start + "/"), name + "/" if name else ""))
        pairs.append((re.compile(start + r"(?![\w.-])"), name or "."))
    return pairs


def notebook_page(notebook, title: str, facts: str, banner: str, links: str) -> str:
    """An executed notebook (NotebookNode) as one page. `facts`, `banner` and `links` are HTML put above it."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="basic", raw_template=_TEMPLATE, exclude_input_prompt=True, exclude_output_prompt=True,
                            exclude_anchor_links=True)
    body, _ = exporter.from_notebook_node(notebook)
    body = _numbers_to_the_right(body)
    fold = ("<button onclick=\"const all=document.querySelectorAll('details.code'),open=[...all].some(d=>!d.open);all.forEach(d=>d.open=open)\">"
            "show or fold all code</button>")
    return _page(title, f'<nav>{links}<span class="right">{facts}</span>{fold}</nav>\n{banner}\n{body}', _code_css())


def _numbers_to_the_right(html: str) -> str:
    """Columns of tables that hold only numbers are aligned right, their heads too; text stays left."""
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(html, "html.parser")
    number = re.compile(r"[-+]?[\d,]*\.?\d+(e[-+]?\d+)?\s?%?|nan|", re.I)
    for table in soup.select("table"):
        rows = [row.find_all(["th", "td"], recursive=False) for row in table.find_all("tr")]
        for column in range(max(map(len, rows), default=0)):
            cells = [row[column] for row in rows if column < len(row)]
            texts = [cell.get_text().strip() for cell in cells if cell.name == "td"]
            if any(texts) and all(number.fullmatch(text) for text in texts):
                for cell in cells:
                    cell["class"] = [*cell.get("class", []), "number"]
    return str(soup)


def failure_banner(record: dict) -> str:
    """What failed, where and what to do; '' for a notebook that did not fail."""
    problem = record.get("exception")
    if not problem:
        return ""
    where = f" in cell {problem['cell']} of {problem['cells']}: <code>{escape(problem['source'])}</code>" if problem.get("cell") else ""
    message = f'<p><code class="message">{escape(problem["ename"])}: {escape(problem["evalue"])}</code></p>' if problem["ename"] else ""
    what_to_do = re.sub("`([^`]+)`", r"<code>\1</code>", escape(problem["what_to_do"]))
    return (f'<div class="banner" role="alert"><p><strong>{escape(record["name"])} failed: {escape(problem["kind"])}</strong>{where}</p>'
            f"{message}<p>What to do: {what_to_do}</p></div>")


def verdict(headline: dict) -> str:
    """The answer in one sentence, from the float32 speed ratio's interval and the identity of the output; bfloat16's ratio beside it."""
    ratio, again = headline["speed_ratio"], headline.get("speed_ratio_bfloat16") or {}
    numbers = f"{ratio['value']:.2f} times the speed of plain greedy decoding in float32{_interval(ratio)}"
    if again.get("value") is not None:
        numbers += f"; {again['value']:.2f} in bfloat16{_interval(again)}"
    if not headline["identical_float32"]:
        return f"Don't serve it: its output is not the target's own greedy output ({numbers})."
    return f"{answer(ratio)}: {numbers}."


def answer(ratio: dict) -> str:
    """The answer that a speed ratio and its interval give."""
    if ratio["low"] is None:
        return "Too few prompts for an answer"
    return "Serve it" if ratio["low"] > 1 else "Don't serve it" if ratio["high"] < 1 else "No clear gain"


def _interval(block: dict) -> str:
    return "" if block["low"] is None else f", 95 % interval {block['low']:.2f} to {block['high']:.2f}"


def index_page(runs: list[dict]) -> str:
    """The index of all runs (their run.json), newest first; each opens with its answer and headline numbers, or with what failed."""
    body = "\n".join(_run_section(run) for run in sorted(runs, key=lambda r: r["started"], reverse=True))
    return _page("Eyas: is my drafter worth serving?",
                 "<h1>Is my drafter worth serving?</h1>\n" + (body or "<p>No run yet: <code>python -m eyas report --profile demo</code></p>"))


def _run_section(run: dict) -> str:
    folder = escape(run["run_name"], quote=True)
    parts = [f'<section class="run"><h2>Run {folder} <span class="muted">{escape(_when(run["started"]))}</span></h2>']
    failed = [n for n in run["notebooks"] if n["state"] == "failed"]
    parts += [failure_banner(n) for n in failed]
    if run["state"] in ("interrupted", "died") or (run["state"] == "failed" and not failed):
        parts.append(f'<div class="banner" role="alert"><p><strong>This run { {"failed": "failed", "died": "was killed", "interrupted": "was interrupted"}[run["state"]]}.'
                     f'</strong> {escape(run.get("problem") or "")}</p><p>What to do: run <code>{escape(run["command"])}</code> again; '
                     "finished work is kept.</p></div>")
    if run["state"] == "running":
        parts.append('<p class="answer">Still running.</p>')
    headline = run.get("headline")
    if headline:
        parts.append(f'<p class="answer">{escape(verdict(headline))}</p>\n{_tiles(headline)}')
    if run.get("layer_choice"):
        parts.append(f'<p class="answer">Which layers?</p><p>{escape(run["layer_choice"])}</p>')
    elif run["state"] == "ok" and not headline:
        parts.append('<p class="muted">No acceptance was measured in this run.</p>')
    parts.append(_facts(run, headline or {}))
    rows = "\n".join(_notebook_row(folder, n) for n in run["notebooks"])
    parts.append(f'<div class="scroll"><table class="head"><tr><th>Notebook</th><th>Question</th><th>State</th><th>Time</th></tr>\n{rows}\n</table></div>')
    parts.append(f'<p class="muted"><a href="{folder}/run.json">run.json</a>: everything recorded of this run. '
                 f'<code>{escape(run["command"])}</code></p></section>')
    return "\n".join(parts)


def _tiles(headline: dict) -> str:
    length, ratio, estimate, identical = (headline[name] for name in ("acceptance_length", "speed_ratio", "offline_estimate", "identical_float32"))
    tiles = [("Acceptance length", length, "tokens per verify step, bonus token included")]
    if estimate:
        tiles.append(("Offline estimate", estimate, "acceptance length from stored states"))
    tiles.append(("Speed ratio", ratio, "times plain greedy decoding by the same code, float32"))
    html = [f'<div class="tile"><span>{name}</span><b>{block["value"]:.2f}</b><span>{note}{_interval(block)}; {block["prompts"]} prompts</span></div>'
            for name, block, note in tiles]
    word = "yes" if identical else "no"
    html.append(f'<div class="tile"><span>Same text</span><b class="{word}">{word}</b><span>output identical to greedy (float32): {word}, '
                f'token for token in {headline["identical_prompts"]} of {headline["decoded_prompts"]} prompts</span></div>')
    return '<div class="tiles">' + "\n".join(html) + "</div>"


def _facts(run: dict, headline: dict) -> str:
    git = run["git"]
    state = f"{git['commit'][:12]}{', with uncommitted changes' if git['dirty'] else ', clean'}" if git["commit"] else "not a git checkout"
    text = bfloat16 = None
    if headline:
        again, ratio = headline["bfloat16"], headline.get("speed_ratio_bfloat16")
        text = (f"{headline['repeated_bigrams']:.1%} of the decoded bigrams repeat an earlier one (a looping text is easy to draft); {headline['outside_vocab']:.1%} of "
                "the tokens are outside the draft vocabulary")
        bfloat16 = (f"{again['differing']} of {again['prompts']} outputs differ from greedy" + (f", {again['ties']} of them at a tie" if again["differing"] else "")
                    + (f"; speed ratio {ratio['value']:.2f}{_interval(ratio)}" if ratio and ratio["value"] is not None else ""))
    target = f"{headline['target']}, drafter fed from boundaries {', '.join(map(str, headline['boundaries']))}" if headline else run["settings"]["target"]
    facts = [("Target", target), ("Data", headline.get("data")), ("Parity", headline.get("parity")), ("Text", text), ("In bfloat16", bfloat16),
             ("Duration", duration_text(run["duration_s"]) + (", without the notebooks of earlier runs" if any(n.get("earlier") for n in run["notebooks"]) else "")),
             ("Git", state),
             ("Versions", ", ".join(f"{name} {version}" for name, version in run["versions"].items())),
             ("Machine", f"{run['machine']['cores']} cores{', ' + run['machine']['gpu'] if run['machine']['gpu'] else ', no GPU'}")]
    return '<div class="scroll"><table>' + "".join(f"<tr><td>{n}</td><td>{escape(str(v))}</td></tr>" for n, v in facts if v) + "</table></div>"


def _notebook_row(folder: str, record: dict) -> str:
    name, state = escape(record["name"]), record["state"]
    link = f'<a href="{folder}/{name}.html">{name}</a>' if record.get("page") else name
    time = duration_text(record["duration_s"]) if record.get("duration_s") is not None else ""
    if record.get("earlier"):
        state += f", run of {_when(record['started'])}"
    css = ' class="failed"' if record["state"] == "failed" else ""
    return f"<tr><td>{link}</td><td>{escape(record.get('title') or '')}</td><td{css}>{escape(state)}</td><td>{time}</td></tr>"


def _when(started: str) -> str:
    """2026-11-29T17:20:31+00:00 -> 2026-11-29 17:20 UTC."""
    return started[:16].replace("T", " ") + " UTC"


def _code_css() -> str:
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    keep = ".highlight, .highlight pre { background: var(--soft); }"
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{keep}"


def _page(title: str, body: str, css: str = "") -> str:
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<title>{escape(title)}</title>\n<style>{_CSS}{css}</style></head>\n<body>\n{body}\n</body></html>\n')
