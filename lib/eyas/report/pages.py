"""Render an executed notebook as one self-contained page.

Strings in, strings out: no network, no files. `eyas.report.index` renders the page of all runs. The
HTML is in the Jinja templates beside this module.

- A page contains everything that it needs: its style (light, dark, paper: pages.css), figures as
  data URLs, code folded in <details>.
- A code cell that starts with the comment `# Figure: ...` gives its figures that caption and
  alternative text. A cell tagged `settings` has its output folded.
- A page opens with its headline: what the cells tagged `headline` print, the first sentence large,
  and their first figure. Where no cell has the tag, the cells of the section `## The answer` count.
  A notebook with neither opens with its question.
"""

import os
import re
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from eyas.files import ROOT, data_dir
from eyas.report.parameters import ANSWER

_FOLDER = Path(__file__).parent
_CSS = (_FOLDER / "pages.css").read_text(encoding="utf-8")


def _parts() -> Any:
    """Return the macros of page_parts.html.jinja; they escape what is not Markup."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True)
    return environment.get_template("page_parts.html.jinja").module


def without_machine_paths(value: Any) -> Any:
    """Return a JSON-like value with this machine's folders written relative to the repository.

    'data' stands for the data folder. All strings change, but for images and keys.
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
        # Not in the middle of a longer path. "m" ends the escape sequence that colours a path in a
        # traceback.
        start, name = r"(?:(?<![\w.~/-])|(?<=\dm))" + re.escape(folder), names[folder]
        pairs.append((re.compile(start + "/"), name + "/" if name else ""))
        pairs.append((re.compile(start + r"(?![\w.-])"), name or "."))
    return pairs


def notebook_page(notebook, title: str, facts: str, banner: str) -> str:
    """Return the page of an executed notebook (NotebookNode).

    `facts` is a text for its upper right corner, `banner` HTML that stands above the notebook.
    """
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(
        template_name="basic",
        raw_template=(_FOLDER / "notebook.html.jinja").read_text(encoding="utf-8"),
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    _mark_headline(notebook)
    _drop_answers(notebook)
    body, _ = exporter.from_notebook_node(notebook)
    content = _parts().notebook(facts, Markup(banner), Markup(_tidied(body)))
    return page(title, content, _code_css())


def with_links(html: str, before: str | None, after: str | None) -> str:
    """Return a notebook's page with links to the pages of the notebooks before and after it."""
    links = _parts().links(before, after)
    return re.sub(
        r'<nav>.*?<span class="right">',
        lambda _: f'<nav>{links}<span class="right">',
        html,
        count=1,
        flags=re.S,
    )


def _mark_headline(notebook) -> None:
    """Set the metadata `headline` on the code cells whose text and figure open the page.

    They are the cells with that tag, or else those of the section `## The answer`.
    """
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
    """Drop the answer under the parameters and the line that promises it: a page opens with it."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"^\*\*Answer\.\*\* .*\n+", "", cell.source, flags=re.M)
        if cell.cell_type == "code":
            cell.outputs = [
                output
                for output in cell.outputs
                if not "".join(output.get("data", {}).get("text/html", "")).startswith(ANSWER)
            ]


def _tidied(html: str) -> str:
    """Return the body of a notebook with its headline under the title.

    Table columns that hold only numbers are aligned right; text stays left.
    """
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
            figure.replace_with(BeautifulSoup(_parts().figure_moved(), "html.parser"))
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
    """Return the HTML of a headline: the first sentence as the answer, and up to two lines more.

    Numbers with their intervals are bold. A warning is marked as one.
    """
    first, *more = [line.strip() for line in said.strip().splitlines() if line.strip()]
    answer, rest = re.fullmatch(r"(.+?[.!?](?=\s+[A-Z]|$)|.+)\s*(.*)", first).groups()
    lines = [
        {
            "is_warning": line.startswith("WARNING"),
            "parts": _split(line, r"[-+]?\d[\d.,]* \[[^\[\]]+\]"),
        }
        for line in (rest, *more[:2])
        if line
    ]
    return str(_parts().headline(answer, lines))


def _split(text: str, pattern: str) -> list[tuple[str, bool]]:
    """Return the pieces of a text in order, each with whether it matches the pattern."""
    pieces, end = [], 0
    for match in re.finditer(pattern, text):
        pieces += [(text[end : match.start()], False), (match.group(), True)]
        end = match.end()
    return [*pieces, (text[end:], False)]


def failure_banner(record: dict) -> str:
    """Return HTML that says what failed, where and what to do; "" where nothing failed."""
    problem = record.get("exception")
    if not problem:
        return ""
    steps = [
        (text.strip("`") if is_code else text, is_code)
        for text, is_code in _split(problem["what_to_do"], "`[^`]+`")
    ]
    return str(_parts().failure(record, problem, steps))


def _code_css() -> str:
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    keep = ".highlight, .highlight pre { background: var(--soft); }"
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{keep}"


def page(title: str, body: str, css: str = "", kind: str = "") -> str:
    """Return a whole HTML document with its style inside; `kind` is the class of its body."""
    return str(_parts().document(title, Markup(_CSS + css), Markup(body), kind))
