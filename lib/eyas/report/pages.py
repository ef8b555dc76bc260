"""HTML of the reports: one self-contained page per executed notebook. Strings in, strings out; no network, no files (eyas.report.index is the page of all runs).

A page holds everything it needs: own style (light, dark, paper: pages.css), figures as data URLs, code folded in <details>. A code cell that starts
with the comment `# Figure: ...` gives its figures that caption and alternative text. A cell tagged `settings` has its output folded.

A page opens with its headline: what the cells tagged `headline` print, the first sentence large, and their first figure. Where no cell has the tag,
those of the section `## The answer`; a notebook with neither opens with its question.
"""

import os
import re
import sys
import sysconfig
import tempfile
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from eyas.files import ROOT, data_dir
from eyas.report.parameters import ANSWER

_CSS = (Path(__file__).parent / "pages.css").read_text(encoding="utf-8")

_TEMPLATE = """{%- extends 'classic/base.html.j2' -%}
{% macro caption(cell) %}{% if cell.source.startswith('# Figure: ') %}{{ cell.source.split('\\n')[0][10:] | escape_html }}{% endif %}{% endmacro %}
{% block input_group %}<details class="code"><summary>{% if caption(cell) %}Code of the figure{% else %}Code: {{ cell.source.split('\\n')[0] | escape_html }}{% endif %}</summary>
{{ cell.source | highlight_code(metadata=cell.metadata) }}</details>{% endblock %}
{% block codecell %}{% if cell.metadata.get('headline') %}<div class="of-headline">{{ super() }}</div>{% else %}{{ super() }}{% endif %}{% endblock %}
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
    for path, name in (
        (data_dir(), "data"),
        (ROOT, ""),
        (Path(sys.prefix), ".venv"),
        (Path(sysconfig.get_path("stdlib")), "python"),
        (Path(tempfile.gettempdir()), "tmp"),
        (Path.home(), "~"),
    ):
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


def notebook_page(notebook, title: str, facts: str, banner: str) -> str:
    """An executed notebook (NotebookNode) as one page. `facts` and `banner` are HTML put above it."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(
        template_name="basic",
        raw_template=_TEMPLATE,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    _mark_headline(notebook)
    _drop_answers(notebook)
    body, _ = exporter.from_notebook_node(notebook)
    body = _tidied(body)
    fold = (
        "<button onclick=\"const all=document.querySelectorAll('details.code'),open=[...all].some(d=>!d.open);all.forEach(d=>d.open=open)\">"
        "show or fold all code</button>"
    )
    return page(
        title,
        f'<nav>{_links(None, None)}<span class="right">{facts}</span>{fold}</nav>\n{banner}\n{body}',
        _code_css(),
    )


def with_links(html: str, before: str | None, after: str | None) -> str:
    """A notebook's page with links to the pages of the notebooks before and after it."""
    return re.sub(
        r'<nav>.*?<span class="right">',
        lambda _: f'<nav>{_links(before, after)}<span class="right">',
        html,
        count=1,
        flags=re.S,
    )


def _links(before: str | None, after: str | None) -> str:
    links = ['<a href="../index.html">All reports</a>']
    links += (
        [f'<a rel="prev" href="{quote(before)}.html">\u2190 {escape(before)}</a>'] if before else []
    )
    links += (
        [f'<a rel="next" href="{quote(after)}.html">{escape(after)} \u2192</a>'] if after else []
    )
    return "".join(links)


def _mark_headline(notebook) -> None:
    """Metadata `headline` on the code cells whose text and figure open the page: those with the tag, or those of the section `## The answer`."""
    code = [c for c in notebook.cells if c.cell_type == "code"]
    chosen = [c for c in code if "headline" in c.metadata.get("tags", [])]
    if not chosen:
        section = ""
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                section = (re.findall(r"^##? +(.+?) *$", cell.source, re.M) or [section])[-1]
            elif section == "The answer":
                chosen.append(cell)
    for cell in chosen:
        cell.metadata["headline"] = True


def _drop_answers(notebook) -> None:
    """Drop the answer that stands under the parameters: a page opens with it anyway."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [
                output
                for output in cell.outputs
                if not "".join(output.get("data", {}).get("text/html", "")).startswith(ANSWER)
            ]


def _tidied(html: str) -> str:
    """The body of a notebook with its headline first, under the title, and the columns of tables that hold only numbers aligned right; text stays left."""
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(html, "html.parser")
    title, marked = soup.find("h1"), soup.select(".of-headline")
    said = next(
        (text.get_text() for cell in marked for text in cell.select(".output_stdout pre")), ""
    )
    figure = next((found for cell in marked for found in cell.select("figure")), None)
    if title and said.strip():
        headline = soup.new_tag("div", attrs={"class": "headline", "id": "headline"})
        headline.append(BeautifulSoup(_headline(said), "html.parser"))
        if figure:
            figure.replace_with(
                BeautifulSoup(
                    '<p class="muted"><a href="#headline">The figure stands at the top of the page.</a></p>',
                    "html.parser",
                )
            )
            headline.append(figure)
        title.insert_after(headline)
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


def _headline(said: str) -> str:
    """The first sentence of a text as the answer, up to two lines more below it, numbers with their intervals in bold; a warning is marked as one."""
    first, *more = [line.strip() for line in said.strip().splitlines() if line.strip()]
    answer, rest = re.fullmatch(r"(.+?[.!?](?=\s+[A-Z]|$)|.+)\s*(.*)", first).groups()
    html = [f'<p class="answer">{escape(answer)}</p>']
    for line in filter(None, [rest, *more[:2]]):
        line_html = re.sub(r"[-+]?\d[\d.,]* \[[^\[\]]+\]", r"<b>\g<0></b>", escape(line))
        html.append(
            f'<p class="warning">{line_html}</p>'
            if line.startswith("WARNING")
            else f"<p>{line_html}</p>"
        )
    return "\n".join(html)


def failure_banner(record: dict) -> str:
    """What failed, where and what to do; '' for a notebook that did not fail."""
    problem = record.get("exception")
    if not problem:
        return ""
    where = (
        f" in cell {problem['cell']} of {problem['cells']}: <code>{escape(problem['source'])}</code>"
        if problem.get("cell")
        else ""
    )
    message = (
        f'<p><code class="message">{escape(problem["ename"])}: {escape(problem["evalue"])}</code></p>'
        if problem["ename"]
        else ""
    )
    what_to_do = re.sub("`([^`]+)`", r"<code>\1</code>", escape(problem["what_to_do"]))
    return (
        f'<div class="banner" role="alert"><p><strong>{escape(record["name"])} failed: {escape(problem["kind"])}</strong>{where}</p>'
        f"{message}<p>What to do: {what_to_do}</p></div>"
    )


def _code_css() -> str:
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    keep = ".highlight, .highlight pre { background: var(--soft); }"
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{keep}"


def page(title: str, body: str, css: str = "", kind: str = "") -> str:
    """A whole HTML document, everything that it needs inside; `kind` is the class of its body."""
    of_kind = f' class="{kind}"' if kind else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}{css}</style></head>\n<body{of_kind}>\n{body}\n</body></html>\n"
    )
