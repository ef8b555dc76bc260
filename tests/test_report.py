"""The runner on a tiny notebook: each way to end badly is noticed, recorded and shown; settings are checked first; pages need no network."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import pytest

from eyas import pages, report
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import ROOT, read_json, write_json

FIGURE = """# Figure: a line that rises
import matplotlib.pyplot as plt
from IPython import get_ipython
get_ipython().run_line_magic("config", "InlineBackend.figure_formats = ['svg']")
plt.plot([0, 1]);"""


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    monkeypatch.setenv("EYAS_DATA", str(tmp_path / "eyas-data"))


def notebook(folder: Path, *cells: str, name: str = "01_tiny", kernel: str | None = "python3") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    nb = nbformat.v4.new_notebook()
    if kernel:
        nb.metadata["kernelspec"] = {"name": kernel, "display_name": "Python 3", "language": "python"}
    parameters = nbformat.v4.new_code_cell('run_name: str = "demo"  # name\nseed: int = 0  # seed\nlearning_rate: float = 2.0e-3  # rate', metadata={"tags": ["parameters"]})
    nb.cells = [nbformat.v4.new_markdown_cell("# Does it run?\nA tiny notebook."), parameters, *(nbformat.v4.new_code_cell(c) for c in cells)]
    nbformat.write(nb, folder / f"{name}.ipynb")
    return folder


def profile(folder: Path, text: str) -> str:
    path = folder / "tiny.yaml"
    path.write_text(text)
    return str(path)


def run(tmp_path: Path, *cells: str, settings: str = "run_name: tiny\n", **options) -> tuple[dict, str]:
    """run.json and the page of a notebook with these cells."""
    out = report.run_report(profile(tmp_path, settings), {}, folder=notebook(tmp_path / "notebooks", *cells), reports=tmp_path / "reports", **options)
    assert out == tmp_path / "reports" / "tiny"
    return read_json(out / "run.json"), (out / "01_tiny.html").read_text()


def no_network(html: str) -> None:
    assert not re.findall(r"<(?:script|img|link|iframe|source)[^>]*(?:src|href)\s*=\s*[\"']?(?:https?:)?//", html, re.I)
    assert not re.findall(r"@import|url\(\s*[\"']?(?:https?:)?//", html, re.I)
    assert not re.findall(r"<script[^>]*\ssrc", html) and "<link" not in html


def test_success(tmp_path):
    settings = "run_name: tiny\nlearning_rate: 1e-4\nseed: 7\n"  # YAML reads 1e-4 as a string
    record, html = run(tmp_path, "print(seed, learning_rate * 2, type(learning_rate).__name__)", FIGURE, "from eyas.files import ROOT; ROOT / 'lib'", settings=settings)
    assert (record["state"], record["return_code"]) == ("ok", 0)
    one = record["notebooks"][0]
    assert (one["state"], one["return_code"], one["exception"]) == ("ok", 0, None)
    assert one["parameters"] == {"run_name": "tiny", "learning_rate": 1e-4, "seed": 7}
    assert one["duration_s"] > 0 and one["started"] and one["title"] == "Does it run?"
    assert set(record["versions"]) == {"python", "torch", "transformers", "sglang", "eyas"}
    assert set(record["git"]) == {"commit", "dirty"} and record["process"] is None
    assert record["settings"]["learning_rate"] == 1e-4 and record["settings"]["draft_steps"] == Config().draft_steps
    assert "7 0.0002 float" in html
    assert re.search(r'<img alt="a line that rises" src="data:image/svg\+xml;base64,', html) and "<figcaption>a line that rises" in html
    assert "banner" not in re.sub(r"<style>.*?</style>", "", html, flags=re.S) and "eyas-end" not in html
    assert "<details" in html and '<a href="../index.html">' in html and "prefers-color-scheme: dark" in html
    assert str(ROOT) not in html and str(tmp_path) not in html and str(tmp_path) not in json.dumps(record)
    no_network(html)
    index = (tmp_path / "reports" / "index.html").read_text()
    assert "Run tiny" in index and 'href="tiny/01_tiny.html"' in index and 'href="tiny/run.json"' in index
    no_network(index)


def failed(record: dict, html: str, tmp_path: Path) -> dict:
    """What every failure has in common; gives the exception block."""
    assert record["state"] == "failed" and record["return_code"] != 0
    one = record["notebooks"][0]
    assert one["state"] == "failed" and one["return_code"] == record["return_code"]
    index = (tmp_path / "reports" / "index.html").read_text()
    for page in (html, index):
        top = page[page.index('<div class="banner"'):][:2000]
        assert "01_tiny failed" in top and "What to do" in top and "--from 01" in top
    assert html.index('<div class="banner"') < html.index("Does it run?</h1>")
    assert str(tmp_path) not in html and str(tmp_path) not in json.dumps(record)
    return one["exception"]


def test_exception(tmp_path):
    record, html = run(tmp_path, "seed", "from eyas.errors import EyasError\nraise EyasError('no store', 'one', 'python -m eyas extract')", "print('never')")
    problem = failed(record, html, tmp_path)
    assert (problem["ename"], problem["evalue"]) == ("EyasError", "no store; expected one; next: python -m eyas extract")
    assert problem["kind"] == "exception" and problem["source"] == "from eyas.errors import EyasError" and (problem["cell"], problem["cells"]) == (4, 5)
    assert any("raise EyasError" in line for line in problem["lines"])


def test_killed_kernel(tmp_path):
    record, html = run(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "print('never')")
    assert record["return_code"] == report.EXIT_KERNEL_DIED
    problem = failed(record, html, tmp_path)
    assert "kernel died" in problem["kind"] and problem["source"] == "import os, signal" and "memory" in problem["what_to_do"]


def test_cell_timeout(tmp_path):
    record, html = run(tmp_path, "import time\ntime.sleep(60)", cell_timeout_s=2.0)
    assert record["return_code"] == report.EXIT_TIMEOUT and record["duration_s"] < 40
    problem = failed(record, html, tmp_path)
    assert problem["kind"] == "a cell took longer than 2 s" and problem["source"] == "import time" and "--cell-timeout-s" in problem["what_to_do"]


def test_exit_halfway(tmp_path):
    record, html = run(tmp_path, "import sys\nsys.exit(0)", "print('never')")
    assert record["return_code"] == report.EXIT_STOPPED_EARLY
    problem = failed(record, html, tmp_path)
    assert "stopped before its end" in problem["kind"] and problem["source"] == "import sys"


def test_killed_runner_and_the_notebooks_after_it(tmp_path):
    folder = notebook(tmp_path / "notebooks", "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nimport time; time.sleep(20)")
    notebook(folder, "print('never')", name="02_after")
    out = report.run_report(profile(tmp_path, "run_name: tiny\n"), {}, folder=folder, reports=tmp_path / "reports")
    record, html = read_json(out / "run.json"), (out / "01_tiny.html").read_text()
    problem = failed(record, html, tmp_path)
    assert "SIGKILL" in problem["kind"] and problem["source"] == "import os, signal" and record["return_code"] == -9
    assert record["notebooks"][1]["state"] == "not run" and not (out / "02_after.html").exists()


def test_again_from_the_second(tmp_path):
    folder = notebook(tmp_path / "notebooks", "print('first')")
    notebook(folder, "assert False, 'second'", name="02_after")
    settings = profile(tmp_path, "run_name: tiny\n")
    out = report.run_report(settings, {}, folder=folder, reports=tmp_path / "reports")
    first = read_json(out / "run.json")
    assert [n["state"] for n in first["notebooks"]] == ["ok", "failed"]
    notebook(folder, "print('second')", name="02_after")
    report.run_report(settings, {"seed": "3"}, ("02",), folder=folder, reports=tmp_path / "reports")
    second = read_json(out / "run.json")
    assert second["state"] == "ok" and second["notebooks"][0] == first["notebooks"][0] | {"earlier": True}
    assert second["notebooks"][1]["parameters"] == {"run_name": "tiny", "seed": 3} and (out / "01_tiny.html").exists()


@pytest.mark.parametrize(("settings", "overrides", "words"), [
    ("run_name: tiny\nlayers: 3\n", {}, "unknown setting layers"),
    ("run_name: tiny\n", {"epochs": "2"}, "no notebook declares the setting epochs"),
    ("run_name: tiny\nseed: two\n", {}, "seed = 'two'"),
    ("run_name: tiny\n", {"learning_rate": "-1"}, "learning_rate = -1.0"),
])
def test_wrong_settings_start_nothing(tmp_path, settings, overrides, words):
    folder = notebook(tmp_path / "notebooks", "print('never')")
    with pytest.raises(EyasError, match=re.escape(words)):
        report.run_report(profile(tmp_path, settings), overrides, folder=folder, reports=tmp_path / "reports")
    assert not (tmp_path / "reports").exists() and not (tmp_path / "eyas-data").exists()


@pytest.mark.parametrize(("kernel", "words"), [("no-such-kernel", "'no-such-kernel', which is not installed"), (None, "names no kernelspec")])
def test_missing_kernelspec(tmp_path, kernel, words):
    folder = notebook(tmp_path / "notebooks", "print('never')", kernel=kernel)
    with pytest.raises(EyasError, match=words):
        report.run_report(profile(tmp_path, "run_name: tiny\n"), {}, folder=folder, reports=tmp_path / "reports")


def test_parameters_cell_must_be_literals(tmp_path):
    folder = notebook(tmp_path / "notebooks")
    path = folder / "01_tiny.ipynb"
    nb = nbformat.read(path, as_version=4)
    nb.cells[1].source = "seed: int = 1 + len('a')"
    nbformat.write(nb, path)
    with pytest.raises(EyasError, match="parameters cell"):
        report.declared_parameters(path)


def test_termination_signal(tmp_path):
    """A runner that is told to stop takes its notebook and kernel with it and says so; one that is killed is shown as killed."""
    folder = notebook(tmp_path / "notebooks", "import os, time\nfrom pathlib import Path\nfrom eyas.files import data_dir\n"
                      "data_dir().joinpath('kernel').write_text(str(os.getpid()))\ntime.sleep(120)")
    code = f"from pathlib import Path; from eyas.report import run_report; run_report({profile(tmp_path, 'run_name: tiny')!r}, folder=Path({str(folder)!r}), reports=Path({str(tmp_path / 'reports')!r}))"
    for sign, state in ((signal.SIGTERM, "interrupted"), (signal.SIGKILL, "running")):
        mark = tmp_path / "eyas-data" / "kernel"
        mark.unlink(missing_ok=True)
        process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT / "lib")}, stdout=subprocess.DEVNULL)
        until(lambda: mark.exists() and mark.read_text(), 60)
        kernel = int(mark.read_text())
        with pytest.raises(EyasError, match="is going on"):
            report.run_report(str(tmp_path / "tiny.yaml"), {}, folder=folder, reports=tmp_path / "reports")
        process.send_signal(sign)
        process.wait(30)
        until(lambda: not Path(f"/proc/{kernel}").exists(), 15)
        assert read_json(tmp_path / "reports" / "tiny" / "run.json")["state"] == state
    report.write_index(tmp_path / "reports")
    assert "was killed" in (tmp_path / "reports" / "index.html").read_text()


def until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def test_machine_paths():
    home = os.path.expanduser("~")
    text = f"File \x1b[32m{ROOT}/lib/eyas/train.py:12\x1b[39m in {ROOT}; {sys.prefix}/bin/python; see {home}/x and lib{home}; {ROOT}ed"
    cleaned = pages.without_machine_paths({"a": [text], "image/png": str(ROOT)})
    assert cleaned["image/png"] == str(ROOT)
    longer = re.sub(f"^{re.escape(tempfile.gettempdir())}/", "tmp/", f"{ROOT}ed")  # another folder, beside this one
    assert cleaned["a"] == [f"File \x1b[32mlib/eyas/train.py:12\x1b[39m in .; .venv/bin/python; see ~/x and lib{home}; {longer}"]


@pytest.mark.parametrize(("low", "high", "identical", "word"), [
    (1.1, 1.3, True, "Serve it: 1.20 times"), (0.6, 0.7, True, "Don't serve it: 0.65 times"), (0.9, 1.1, True, "No clear gain: 1.00 times"),
    (1.1, 1.3, False, "Don't serve it: its output is not"), (None, None, True, "Too few prompts"),
])
def test_verdict(low, high, identical, word):
    ratio = {"value": 1.0 if low is None else (low + high) / 2, "low": low, "high": high, "prompts": 24}
    assert pages.verdict({"speed_ratio": ratio, "identical_float32": identical}).startswith(word)


def interval(value, low, high):
    return {"value": value, "low": low, "high": high, "level": 0.95}


@pytest.mark.parametrize("differing", [0, 2])
def test_headline_is_copied_to_the_index(tmp_path, monkeypatch, differing):
    """The numbers go from the acceptance files through run.json to the index, as they are."""
    config = Config.create(run_name="tiny")
    check = {"prompts": 24, "differing": differing, "ties": 0, "not_ties": differing, "differences": []}
    write_json(config.acceptance_dir / "acceptance.json", {
        "settings": {"target": "SmolLM2-135M-Instruct", "boundaries": [2, 15, 27]}, "counts": {"prompts": 24},
        "acceptance_length": interval(1.6234, 1.512, 1.741), "speed_ratio": interval(1.214, 1.109, 1.333),
        "speed_ratio_bfloat16": interval(1.302, 1.2, 1.4), "repeated_bigrams": interval(0.091, 0.08, 0.1),
        "outside_vocab": interval(0.05, 0.04, 0.06), "identical_to_greedy": {"float32": check, "bfloat16": check | {"prompts": 8, "differing": 3, "ties": 3}},
    })
    write_json(config.acceptance_dir / "walk.json", {"counts": {"samples": 48}, "acceptance_length": interval(1.598, 1.52, 1.68)})
    monkeypatch.setattr(report, "_data_sentence", lambda config: "1,000 training conversations")
    monkeypatch.setattr(report, "_parity_sentence", lambda config: "passed (4 tests, 12 samples)")
    record, _ = run(tmp_path, "pass")
    assert record["headline"]["acceptance_length"] == {"value": 1.6234, "low": 1.512, "high": 1.741, "prompts": 24}
    assert record["headline"]["offline_estimate"] == {"value": 1.598, "low": 1.52, "high": 1.68, "prompts": 48}
    index = (tmp_path / "reports" / "index.html").read_text()
    for text in ("<b>1.62</b>", "95 % interval 1.51 to 1.74; 24 prompts", "<b>1.60</b>", "95 % interval 1.52 to 1.68; 48 prompts", "<b>1.21</b>",
                 "boundaries 2, 15, 27", "1,000 training conversations", "passed (4 tests, 12 samples)", "9.1% of the decoded bigrams", "3 of 8 outputs differ from greedy, 3 of them at a tie; speed ratio 1.30, 95 % interval 1.20 to 1.40"):
        assert text in index, text
    answer = "Serve it: 1.21 times" if differing == 0 else "Don&#x27;t serve it: its output is not"
    assert f"output identical to greedy (float32): {'no' if differing else 'yes'}" in index and answer in index
    assert index.index(answer) < index.index("<b>1.62</b>") < index.index("01_tiny.html")
