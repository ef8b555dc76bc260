"""All five notebooks through the runner with a real server, once; then what their pages and
run.json hold.

The settings are the smoke profile's. A tiny Qwen3 is the target; `make test-slow` repeats all of it
with SmolLM2.
"""

import os
import re
import subprocess
import sys

import nbformat
import psutil
import pytest

from eyas.config import Config
from eyas.files import ROOT, read_json
from eyas.report import reuse
from helpers.tiny import make_tiny_target

pytestmark = [pytest.mark.kernel, pytest.mark.server]

FIGURES = {
    "01_server_setup": 0,
    "02_extraction": 1,
    "03_shard_inspection": 9,
    "04_training": 5,
    "05_acceptance": 10,
}
PROGRESS_LINES = {
    "02_extraction": 3,
    "04_training": 1,
    "05_acceptance": 4,
    # extraction, verification and parity; training; decoding in float32 and in bfloat16, other
    # settings
    # in bfloat16, the server
}


@pytest.fixture(scope="module", params=["tiny", pytest.param("SmolLM2", marks=pytest.mark.slow)])
def overrides(request, tmp_path_factory) -> dict:
    """Return the settings that differ from the smoke profile."""
    if request.param == "SmolLM2":
        return {}
    folder = tmp_path_factory.mktemp("target") / "tiny"
    make_tiny_target(folder, n_blocks=8, family="Qwen3", seed=3)
    return {"target": str(folder), "draft_vocab_size": 384}


def options(overrides: dict) -> list[str]:
    return [word for name, value in overrides.items() for word in ("-p", name, str(value))]


@pytest.fixture(scope="module")
def smoke(overrides, embedded, tmp_path_factory):
    """(run.json, index page, {notebook: page}, data folder) of one run of the smoke profile."""
    folder = tmp_path_factory.mktemp("smoke")
    data = folder / "data"
    data.mkdir()
    (data / "targets").symlink_to(embedded.folder.parent)  # converted already
    environment = os.environ | {
        "EYAS_DATA": str(data),
        "PYTHONPATH": str(ROOT / "lib"),
        "MPLBACKEND": "Agg",
    }  # which would give no figures, and no error
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "eyas",
            "report",
            "--profile",
            "smoke",
            "--out",
            str(folder / "reports"),
            *options(overrides),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    run = read_json(folder / "reports" / "smoke" / "run.json")
    assert ended.returncode == 0, ended.stdout + str([n["exception"] for n in run["notebooks"]])
    pages = {name: (folder / "reports" / "smoke" / f"{name}.html").read_text() for name in FIGURES}
    return run, (folder / "reports" / "index.html").read_text(), pages, data


def test_run_json(smoke):
    run, _, _, _ = smoke
    assert (run["state"], run["return_code"], run["run_name"]) == ("ok", 0, "smoke")
    assert [(n["name"], n["state"], n["return_code"]) for n in run["notebooks"]] == [
        (name, "ok", 0) for name in FIGURES
    ]
    assert run["notebooks"][1]["parameters"]["train_samples"] == Config.load("smoke").train_samples
    assert "missing" not in run["versions"].values()


def test_figures_are_there_and_described(smoke):
    for name, page in smoke[2].items():
        images = re.findall(r"<img[^>]*>", page)
        assert len(images) == FIGURES[name], name
        for image in images:
            assert (
                'src="data:image/svg+xml;base64,' in image
                and len(re.search(r'alt="([^"]*)"', image).group(1)) > 30
            )


def test_progress_is_one_line_each(smoke):
    for name, count in PROGRESS_LINES.items():
        assert (
            len(re.findall(r"\d+/\d+ (?:samples|prompts|steps)[^,<]*, \d+ %", smoke[2][name]))
            == count
        ), name


def test_pages_stand_alone(smoke):
    _, index, pages, data = smoke
    for html in (index, *pages.values()):
        assert not re.findall(
            r"<(?:link|iframe)|(?:src|href)\s*=\s*[\"']?(?:https?:)?//|@import", html, re.I
        )
        for word in (str(ROOT), str(data), "Traceback (most", "Warning:"):
            assert word not in html, html[max(0, html.index(word) - 300) : html.index(word) + 200]
        assert len(html) < 2_000_000


def test_headline(smoke):
    run, index, pages, data = smoke
    acceptance = read_json(data / "runs" / "smoke" / "acceptance" / "acceptance.json")
    walked = read_json(data / "runs" / "smoke" / "acceptance" / "walk.json")
    headline = run["headline"]
    assert headline["acceptance_length"]["value"] == acceptance["acceptance_length"]["value"] >= 1.0
    assert headline["offline_estimate"]["value"] == walked["acceptance_length"]["value"]
    assert (
        headline["speed_ratio"]["low"]
        <= headline["speed_ratio"]["value"]
        <= headline["speed_ratio"]["high"]
    )
    assert headline["identical_float32"] is True
    assert "output identical to greedy (float32): yes" in index
    for block in ("acceptance_length", "offline_estimate", "speed_ratio"):
        assert f"<b>{headline[block]['value']:.2f}</b>" in index
    answer = re.search(r'<p class="answer">([^<]+)</p>', index).group(1)
    assert answer in pages["05_acceptance"].replace("&#39;", "'") or answer.replace(
        "&#x27;", "'"
    ) in pages["05_acceptance"].replace("&#39;", "'")


def test_no_server_is_left(smoke):
    data = smoke[3]
    assert not (data / "runs" / "smoke" / "server" / "server.json").exists()
    assert not [
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if "sglang" in " ".join(p.info["cmdline"] or [])
        and str(data) in " ".join(p.info["cmdline"] or [])
    ]


def environment(data) -> dict[str, str]:
    return os.environ | {"EYAS_DATA": str(data), "PYTHONPATH": str(ROOT / "lib")}


def test_a_second_report_reuses_everything(smoke, overrides):
    """No kernel, no server: the pages are made anew from what is there, elsewhere too."""
    run, _, pages, data = smoke
    out = data.parent / "other-reports"
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "eyas",
            "report",
            "--profile",
            "smoke",
            "--out",
            str(out),
            *options(overrides),
        ],
        env=environment(data),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [line.split(",")[0] for line in ended.stdout.splitlines()[:-1]] == [
        f"{name}: up to date" for name in FIGURES
    ]
    again = read_json(out / "smoke" / "run.json")
    assert (again["state"], again["headline"]) == ("ok", run["headline"])
    for before, now in zip(run["notebooks"], again["notebooks"], strict=True):
        assert now == before | {"reused": True, "earlier": True}
        assert re.findall(
            r"<img[^>]*>", (out / "smoke" / before["page"]).read_text()
        ) == re.findall(r"<img[^>]*>", pages[before["name"]])


def test_plain_papermill_says_the_same(smoke, overrides, tmp_path, monkeypatch):
    """The notebook alone, from another folder, on the same store: the same words, tables and
    figures but for times, and the very same drafter.
    """
    here, data = smoke[3], tmp_path / "data"
    (data / "runs" / "smoke").mkdir(parents=True)
    (data / "targets").symlink_to(here / "targets")
    (data / "runs" / "smoke" / "store").symlink_to(here / "runs" / "smoke" / "store")
    command = [
        sys.executable,
        "-m",
        "papermill",
        str(ROOT / "notebooks" / "04_training.ipynb"),
        "out.ipynb",
        "-f",
        str(ROOT / "notebooks" / "profiles" / "smoke.yaml"),
        *options(overrides),
    ]
    ended = subprocess.run(
        command, env=environment(data), cwd=tmp_path, capture_output=True, text=True, timeout=1200
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    drafters = []
    for folder in (here, data):
        monkeypatch.setenv("EYAS_DATA", str(folder))
        drafters.append(reuse.content("drafter", Config.load("smoke", **overrides)))
    assert drafters[0] == drafters[1] != reuse.ABSENT
    executed, alone = (
        said(nbformat.read(path, as_version=4))
        for path in (
            here / "runs" / "smoke" / "notebooks" / "04_training.ipynb",
            tmp_path / "out.ipynb",
        )
    )
    assert len(executed) == len(alone) > 5
    for ours, theirs in zip(executed, alone):
        assert ours == theirs


def said(notebook) -> list[tuple[str, list[str]]]:
    """(code, what it put out) of each code cell of the notebook's own, without what no two runs
    have in common: times, rates, ids inside figures.
    """
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code" and not {"injected-parameters", "eyas-end"} & set(
            cell.metadata.get("tags", [])
        ):
            texts = [
                text
                for out in cell.outputs
                for text in (
                    out.get("text"),
                    *(
                        out.get("data", {}).get(kind)
                        for kind in ("text/plain", "text/html", "image/svg+xml")
                    ),
                )
                if text
            ]
            found.append((cell.source, [re.sub(MEASURED, "~", text) for text in texts]))
    return found


MEASURED = (
    r"[\d.,]+ (?:\w+/s|s\b|ms\b)|\d+:\d\d(?::\d\d)?(?: left)?|\d{4}-\d\d-\d\d[T "
    r'][\d:.]+|#?\b[a-zA-Z]{0,3}_?[0-9a-f]{10,}\b|pid \d+|0x[0-9a-f]+|T_[0-9a-f]{5}(?=[_"])'
)
