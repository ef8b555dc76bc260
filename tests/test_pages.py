"""What the index, the pages and the summaries say, from run.json: numbers as they are, failures
first, older runs too; no browser (tests/test_browser.py has one).
"""

import copy
import json
import os
import re
import subprocess
import sys

import nbformat
import pytest
from bs4 import BeautifulSoup

from eyas.cli import EXIT_BROKEN_PIPE, main
from eyas.config import SETTINGS, Config
from eyas.errors import EyasError
from eyas.evaluation import verdict
from eyas.files import ROOT, read_json, write_json
from eyas.report import index, pages, summary
from eyas.report import run as report
from eyas.report.parameters import ANSWER

COMMITTED = {
    name: read_json(ROOT / "reports" / name / "run.json") for name in ("reference", "layers")
}
CONDITIONS = {"machine", "torch"}  # what a difference needs beside settings
WORDS = (
    "repeats explain part of it: at the 10 of 20 verify steps that begin at no repeated "
    "bigram the acceptance length is 1.2 [1.1, 1.3]"
)


def committed(name: str = "reference", **changes) -> dict:
    return copy.deepcopy(COMMITTED[name]) | changes


def failed_run() -> dict:
    run = committed(
        run_name="broken",
        state="failed",
        return_code=1,
        headline=None,
        started="2026-12-01T00:00:00+00:00",
    )
    run["notebooks"][2] |= {
        "state": "failed",
        "exception": {
            "kind": "exception",
            "ename": "EyasError",
            "evalue": "no <store> | here; expected one",
            "lines": [],
            "cell": 4,
            "cells": 9,
            "source": "open(store)",
            "what_to_do": (
                "what the message says; then `python -m eyas report --profile demo --from 03`"
            ),
        },
    }
    return run


def shown(run: dict) -> tuple[str, str, str]:
    """The three texts made of a run."""
    return index.index_page([run]), index.summary_page(run), summary.markdown(run)


def everything_missing() -> list[tuple[dict, str]]:
    """The committed runs with one thing left out of each, as older versions or a run that went
    wrong had it.
    """
    found = []
    for name, whole in COMMITTED.items():
        for key in set(whole) - {"run_name", "state"}:
            found.append(({k: v for k, v in whole.items() if k != key}, f"{name} without {key}"))
        for part in ("headline", "settings", "machine", "git"):
            for key in whole[part] or {}:
                found.append(
                    (
                        whole | {part: {k: v for k, v in whole[part].items() if k != key}},
                        f"{name} without {part} {key}",
                    )
                )
    return [
        *found,
        *(
            ({"run_name": "x", "state": state}, state)
            for state in ("unreadable", "running", "died", "interrupted", "failed", "ok")
        ),
    ]


def test_older_runs_are_shown():
    """Whichever field is missing: nothing breaks, and nothing missing is shown as a number."""
    cases = everything_missing()
    assert len(cases) > 200
    for run, what in cases:
        for text in shown(run):
            assert run["run_name"] in text, what
            assert not re.search(
                r"\bNone\b|\bnan\b|undefined", re.sub(r"<script.*?</script>", "", text, flags=re.S)
            ), what


def test_numbers_are_those_of_run_json():
    run = committed()
    html, sent, text = shown(run)
    headline = run["headline"]
    for key in ("acceptance_length", "offline_estimate", "speed_ratio", "speed_ratio_bfloat16"):
        block = headline[key]
        value, span = f"{block['value']:.2f}", f"{block['low']:.2f} to {block['high']:.2f}"
        assert f"<b>{value}</b>" in html and span in html
        assert f"<td>{value}</td><td>{span}</td><td>{block['prompts']}</td>" in sent
        assert f"| {value} | {span} | {block['prompts']} |" in text
    for part in (html, sent, text):
        for said in (
            headline["data"],
            headline["parity"],
            run["command"],
            run["git"]["commit"][:12],
            run["versions"]["sglang"],
            "held-out prompts",
        ):
            assert said in part
    assert f"{headline['identical_prompts']} of {headline['decoded_prompts']} prompts" in text
    assert summary.sentence(run) in text and "<svg" in sent
    for at in headline["served_throughput"]["at"]:
        assert f"{at['value']:.2f}" in summary.sentence(
            run
        ) and f"95 % interval {at['low']:.2f} to {at['high']:.2f}" in summary.sentence(run)
    headline["served_throughput"] = None
    assert "prefill included" in summary.sentence(run), (
        "the verdict of our own decoder, where the server's throughput was not measured"
    )
    assert not re.search(r"(?:src|href)=", re.sub(r"<style>.*?</style>", "", sent, flags=re.S)), (
        "a file to send has no links to others"
    )


def test_two_verdicts_say_whose_they_are():
    run = committed()
    run["headline"] |= {
        "served_speed_ratio": None,
        "served_throughput": None,
        "speed_ratio": {"value": 0.9, "low": 0.8, "high": 0.95, "prompts": 24},
        "speed_ratio_bfloat16": {"value": 1.3, "low": 1.2, "high": 1.4, "prompts": 8},
    }
    assert summary.sentence(run) == (
        "Serve it: 1.30 times the speed of plain greedy decoding by our own decoder in "
        "bfloat16, prefill included, 95 % interval 1.20 to 1.40, 8 prompts; "
        "in float32, don't serve it: 0.90 times, 95 % interval 0.80 to 0.95, 24 prompts."
    )


def test_the_verdict_is_of_the_speed_most_like_serving():
    """Throughput of the server, its single stream in bfloat16, our decoder in bfloat16, in float32
    last: as each is missing, the next one speaks.
    """
    none, slow, fast = (
        {"value": v, "low": v - 0.05, "high": v + 0.05, "prompts": 8} for v in (1.0, 0.8, 1.5)
    )
    at = [
        fast | {"parallel": 1},
        fast | {"value": 1.31, "low": 1.2, "parallel": 4},
        none | {"parallel": 16},
    ]
    headline = {
        "speed_ratio": slow,
        "speed_ratio_bfloat16": none,
        "served": fast | {"dtype": "bfloat16"},
        "served_speed_ratio": slow | {"value": 0.7},
        "served_throughput": at[0] | {"prompts": 16, "rounds": 6, "dtype": "bfloat16", "at": at},
        "identical_float32": True,
    }
    assert verdict.verdict(headline) == (
        "With this drafter SGLang is 1.5× faster for one request at a time and 1.3× for "
        "four. At sixteen there is no clear gain. "
        "Tokens per second divided by those of the same server without the drafter: 1.50 "
        "at 1 request at a time, 95 % interval "
        "1.45 to 1.55; 1.31 at 4, 95 % interval 1.20 to 1.55; 1.00 at 16, 95 % interval "
        "0.95 to 1.05; served in bfloat16, 16 prompts, 6 rounds."
    )
    assert verdict.verdict(headline | {"identical_float32": False}).startswith(
        "Don't serve it: its output is not the target's own greedy output (Tokens per "
        "second divided by those of the same server without the drafter: 1.50 at 1"
    )
    once = headline["served_throughput"] | {
        "at": [{"value": 1.5, "low": None, "high": None, "parallel": 1}]
    }
    assert verdict.verdict(headline | {"served_throughput": once}).startswith(
        "Too few rounds for an answer for one request at a time. Tokens per second "
        "divided by those of the same server without the drafter: 1.50 at 1"
    )
    headline["served_throughput"] = None
    assert verdict.verdict(headline).startswith(
        "Don't serve it: 0.70 times the speed of the same server without it, one request "
        "at a time, prefill left out, served in bfloat16"
    )
    headline["served"] = fast | {"dtype": "float32"}  # nobody serves so
    assert verdict.verdict(headline).startswith(
        "No clear gain: 1.00 times the speed of plain greedy decoding by our own decoder "
        "in bfloat16"
    )
    headline["speed_ratio_bfloat16"] = {"value": None, "low": None, "high": None, "prompts": 0}
    assert verdict.verdict(headline) == (
        "Don't serve it: 0.80 times the speed of plain greedy decoding by our own decoder "
        "in float32, prefill included, 95 % interval 0.75 to 0.85, 8 prompts."
    )
    assert verdict.verdict({"served": fast}) == "No speed was measured in this run."


def test_a_drafter_that_was_not_served_says_why():
    run = committed()
    run["headline"] |= {
        "served": None,
        "served_speed_ratio": None,
        "served_throughput": None,
        "not_served": "sglang 0.5.23 cannot serve a drafter with norm_before_residual",
    }
    html, sent, text = shown(run)
    for part in (html, sent, text):
        assert (
            "Not served: sglang 0.5.23 cannot serve a drafter with norm_before_residual." in part
            and "not served: sglang" in part
        )


def test_served_throughput_is_shown():
    run = committed()
    at = [
        {"value": 1.531, "low": 1.378, "high": 1.739, "parallel": 1},
        {"value": 1.161, "low": 1.056, "high": 1.234, "parallel": 16},
    ]
    run["headline"]["served_throughput"] = at[0] | {
        "prompts": 16,
        "rounds": 6,
        "dtype": "bfloat16",
        "at": at,
    }
    for part in shown(run):
        assert (
            "1.38 to 1.74" in part
            and "Served throughput" in part
            and "1.16 at 16, 95 % interval 1.06 to 1.23" in part
        )


def test_a_warning_of_repeats_is_shown():
    run = committed()
    run["headline"].pop("repeats_warning", None)
    assert "WARNING" not in index.index_page([run])
    run["headline"]["repeats_warning"] = WORDS
    html, sent, text = shown(run)
    assert html.count("WARNING") == 3, "at the top, in the table, in the details"
    assert WORDS in html and WORDS in sent and WORDS in text


def test_the_servers_own_acceptance_is_shown():
    run = committed()
    run["headline"] = {
        key: value for key, value in run["headline"].items() if not key.startswith("served")
    }
    assert "Served" not in BeautifulSoup(index.index_page([run]), "html.parser").find("table").text
    run["headline"] |= {
        "served": {
            "value": 1.777,
            "low": 1.666,
            "high": 1.888,
            "prompts": 40,
            "dtype": "bfloat16",
            "verdict": "they agree",
        },
        "served_speed_ratio": {"value": 1.223, "low": 1.111, "high": 1.334, "prompts": 8},
    }
    html, sent, text = shown(run)
    for part in (html, sent, text):
        assert (
            "Served by SGLang in bfloat16: acceptance length 1.78, 95 % interval 1.67 to "
            "1.89, 40 prompts; serve it: 1.22 times the same server"
        ) in part
        assert "1.78" in part and "1.67 to 1.89" in part and "1.22" in part and "they agree" in part
    assert "Served" in BeautifulSoup(html, "html.parser").find("table").text


def test_a_failure_comes_first_and_says_what_to_do():
    html, sent, text = shown(failed_run())
    for part in (html, sent):
        soup = BeautifulSoup(part, "html.parser")
        banner = soup.select_one(".banner")
        assert (
            "03_shard_inspection failed: exception in cell 4 of 9" in banner.text
            and "no <store> | here" in banner.text
            and "--from 03" in banner.text
        )
        assert not [tag for tag in banner.find_all_previous(["table", "figure", "h2"])], (
            "nothing but the title and the sentence stands before it"
        )
    assert (
        "**Failed in 03_shard_inspection, cell 4 of 9: exception.**" in text
        and "EyasError: no <store> | here" in text
        and "--from 03`" in text
    )
    cells = BeautifulSoup(html, "html.parser").select_one(".runs tbody tr")
    assert "failed" in cells.text and "in 03_shard_inspection" in cells.text


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("running", "Still running, at 04_training."),
        ("died", "Killed in 04_training."),
        ("interrupted", "Interrupted in 04_training."),
    ],
)
def test_states(state, words):
    run = committed(state=state, headline=None)
    run["notebooks"][3]["state"] = "interrupted" if state == "interrupted" else "running"
    html, sent, text = shown(run)
    assert words in html and words in sent and words in text
    assert ("What to do" in html) == ("What to do" in text) == (state != "running")


def test_newest_first_and_every_way_on():
    runs = [committed("layers"), failed_run(), committed()]
    soup = BeautifulSoup(index.index_page(runs), "html.parser")
    rows = soup.select(".runs tbody tr")
    assert [row.select_one("b a").text for row in rows] == [
        "broken",
        *sorted(("reference", "layers"), key=lambda name: COMMITTED[name]["started"], reverse=True),
    ]
    for row in rows:
        run = next(run for run in runs if run["run_name"] == row.select_one("b a").text)
        links = {a["href"] for a in row.select("a")}
        assert {f"{run['run_name']}/{n['page']}" for n in run["notebooks"]} | {
            f"{run['run_name']}/run.json",
            f"#run-{run['run_name']}",
        } <= links
        assert row.select_one("button[data-copy]")["data-copy"] == run["command"]
        assert (
            soup.find(id=f"run-{run['run_name']}").select_one(".command code").text
            == run["command"]
        )
    assert soup.select_one(".answer").text == summary.sentence(runs[1]) and soup.select(".answer")[
        1
    ].text == summary.sentence(runs[2]), "and the newest with an answer"
    assert "No run yet" in index.index_page([])


def test_names_and_texts_are_no_markup():
    run = failed_run() | {
        "run_name": 'a "b" <script>&c#%',
        "profile": "<img src=x>",
        "command": "python -m eyas report --profile '<b>\"'",
        "layer_choice": "</script><script>alert(1)</script>",
    }
    run["headline"] = committed()["headline"] | {"target": "<i>", "repeats_warning": "</script>"}
    soup = BeautifulSoup(index.index_page([run]), "html.parser")
    assert len(soup.select("script")) == 2 and not soup.select("img, i")
    assert json.loads(soup.select_one("#data").string)["runs"][0]["name"] == run["run_name"]
    assert (
        soup.select_one(".runs b a").text == run["run_name"]
        and soup.select_one("[data-copy]")["data-copy"] == run["command"]
    )
    assert soup.select_one(".links a")["href"].startswith("a%20%22b%22%20%3Cscript%3E%26c%23%25/")
    assert not BeautifulSoup(index.summary_page(run), "html.parser").select("script, img, i")


def test_what_a_comparison_knows():
    data = json.loads(
        BeautifulSoup(index.index_page([committed(), committed("layers")]), "html.parser")
        .select_one("#data")
        .string
    )
    assert {run["name"] for run in data["runs"]} == {"reference", "layers"}
    for measure in data["measures"]:
        assert set(measure["needs"]) <= set(SETTINGS) | CONDITIONS
    reference = next(run for run in data["runs"] if run["name"] == "reference")
    assert (
        reference["settings"] == COMMITTED["reference"]["settings"]
        and reference["numbers"]["speed_ratio"] == COMMITTED["reference"]["headline"]["speed_ratio"]
    )
    assert set(data["meanings"]) == set(SETTINGS)


# ---- a notebook's page


def cell(source: str, text: str = "", figure: bool = False, tags=()):
    outputs = [nbformat.v4.new_output("stream", text=text)] if text else []
    if figure:
        outputs.append(
            nbformat.v4.new_output(
                "display_data",
                {
                    "image/svg+xml": "<svg xmlns='http://www.w3.org/2000/svg'/>",
                    "text/plain": "<Figure>",
                },
            )
        )
    return nbformat.v4.new_code_cell(source, outputs=outputs, metadata={"tags": list(tags)})


def page_of(*cells):
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("# What is it?\n\n**Question.** Is it?"), *cells]
    )
    return BeautifulSoup(
        pages.notebook_page(notebook, "What is it?", "01_it, ok", ""), "html.parser"
    )


SAID = (
    "It is 1.50 [1.40, 1.60] so. More of it, 2 [1, 3].\nA second line: 3.14 [3, 4]\nWARNING: "
    "it loops\nA fourth line"
)


@pytest.mark.parametrize(
    "cells",
    [
        (
            nbformat.v4.new_markdown_cell("## Before"),
            cell("print(1)", "not this"),
            nbformat.v4.new_markdown_cell("## The answer\nWords."),
            cell("print(2)", SAID),
            cell("# Figure: a line\nplot()", figure=True),
        ),
        (
            cell("print(1)", "not this"),
            cell("print(2)", SAID, tags=["headline"]),
            cell("# Figure: another\nplot()", figure=True),
            cell("# Figure: a line\nplot()", figure=True, tags=["headline"]),
        ),
    ],
    ids=["section", "tag"],
)
def test_the_headline_opens_the_page(cells):
    """A sentence, numbers with intervals, a picture; the text stays where it was said too, the
    picture is there once.
    """
    soup = page_of(*cells)
    headline = soup.select_one("h1").find_next_sibling()
    assert (
        headline["class"] == ["headline"]
        and headline.select_one(".answer").text == "It is 1.50 [1.40, 1.60] so."
    )
    assert [b.text for b in headline.select("b")] == [
        "2 [1, 3]",
        "3.14 [3, 4]",
    ] and headline.select_one(".warning").text == "WARNING: it loops"
    assert "A fourth line" not in headline.text and "A fourth line" in soup.text
    assert (
        headline.select_one("img")["alt"] == "a line" and len(soup.select('img[alt="a line"]')) == 1
    )
    assert (
        soup.text.index("It is 1.50") < soup.text.index("Question.")
        and soup.text.count("It is 1.50 [1.40, 1.60] so.") == 2
    )


def test_a_notebook_without_an_answer_opens_with_its_question():
    soup = page_of(cell("print(1)", "Words. More."), cell("# Figure: a line\nplot()", figure=True))
    assert not soup.select(".headline") and soup.select_one(
        "h1"
    ).find_next_sibling().text.startswith("Question.")


def test_the_answer_stands_once_on_a_page():
    """In JupyterLab it is shown under the parameters; a page opens with it."""
    shown = nbformat.v4.new_output("display_data", {"text/html": f"{ANSWER}Yes, it is.</div>"})
    opening = nbformat.v4.new_code_cell("open_notebook(globals())", outputs=[shown])
    head = "**Answer.** It appears below.\n\n**Inputs.** A store."
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell(f"# Is it?\n\n{head}"),
            opening,
            cell("answer.says(text)", "Yes, it is.", tags=["headline"]),
        ]
    )
    html = pages.notebook_page(notebook, "Is it?", "05, ok", "")
    text = BeautifulSoup(html, "html.parser").body.text
    assert "It appears below" not in text and ANSWER not in html and "A store." in text
    assert BeautifulSoup(html, "html.parser").select_one("p.answer").text == "Yes, it is."


def test_links_to_the_neighbours():
    html = pages.notebook_page(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# It")]), "It", "02, ok", ""
    )
    linked = pages.with_links(html, "01_a", "03_c")
    assert [a["href"] for a in BeautifulSoup(linked, "html.parser").select("nav a")] == [
        "../index.html",
        "01_a.html",
        "03_c.html",
    ]
    assert (
        pages.with_links(linked, "01_a", "03_c") == linked
        and pages.with_links(linked, None, None) == html
    )


# ---- commands


def test_index_and_summary_again_from_what_is_there(tmp_path, capsys):
    """`report index` runs nothing: run.json files are as they were, the pages there are link to each
    other, a second time changes no file.
    """
    for name, run in (("reference", committed()), ("broken", failed_run())):
        write_json(tmp_path / name / "run.json", run)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text('{"run_name": ')
    html = pages.notebook_page(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# It")]), "It", "ok", ""
    )
    for name in ("01_server_setup", "04_training"):
        (tmp_path / "reference" / f"{name}.html").write_text(html)
    assert main(["report", "index", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "index.html").read_text()
    assert (
        "Run reference" in text
        and "Run broken" in text
        and "Run torn" in text
        and "can't be read" in text.replace("&#x27;", "'")
    )
    assert (
        'href="04_training.html"' in (tmp_path / "reference" / "01_server_setup.html").read_text()
    ), "the notebooks between have no page here"
    assert read_json(tmp_path / "reference" / "run.json") == committed()
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.glob("*/*")}
    assert (
        main(["report", "index", "--out", str(tmp_path)]) == 0
        and (tmp_path / "index.html").read_text() == text
    )
    assert {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.glob("*/*")
    } == before
    capsys.readouterr()
    assert main(["report", "summary", "reference", "--out", str(tmp_path)]) == 0
    assert (
        capsys.readouterr().out
        == (tmp_path / "reference" / "summary.md").read_text()
        == summary.markdown(committed())
    )
    with pytest.raises(EyasError, match="one of broken, reference, torn"):
        report.read_report("refrence", tmp_path)


def test_committed_index_is_of_the_committed_runs():
    """`python -m eyas report index` makes the committed files again, but for lines that newer code says
    otherwise.
    """
    soup = BeautifulSoup((ROOT / "reports" / "index.html").read_text(), "html.parser")
    assert {"reference", "layers"} <= {
        row.select_one("b a").text for row in soup.select(".runs tbody tr")
    }
    for name, run in COMMITTED.items():
        assert f"### Eyas run {name}" in (ROOT / "reports" / name / "summary.md").read_text()
        assert run["command"] in soup.find(id=f"run-{name}").text


def test_a_reader_that_goes_away():
    """`| head` ends quietly, as for other programs; another broken pipe is still an error."""
    code = "from eyas.cli import main; raise SystemExit(main(['settings']))"
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=write,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": str(ROOT / "lib")},
    )
    os.close(write)
    assert process.stderr.read() == b"" and process.wait() == EXIT_BROKEN_PIPE


def test_a_misspelt_profile():
    with pytest.raises(EyasError, match="did you mean reference"):
        Config.load("refrence")
    with pytest.raises(EyasError, match="one of demo"):
        Config.load("zzz")
