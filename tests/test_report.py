"""The runner on a tiny notebook: each way to end badly is noticed, recorded and shown; settings are
checked first; pages need no network.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import pytest

from eyas import progress
from eyas.config import Config
from eyas.errors import EyasError
from eyas.evaluation import verdict
from eyas.files import ROOT, read_json, write_json
from eyas.report import notebook as runner
from eyas.report import pages, reuse
from eyas.report import run as report
from eyas.report.parameters import resolved_settings, settings_read
from eyas.server.serve import started_ticks

FIGURE = """# Figure: a line that rises
import matplotlib.pyplot as plt
from IPython import get_ipython
get_ipython().run_line_magic("config", "InlineBackend.figure_formats = ['svg']")
plt.plot([0, 1]);"""


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    monkeypatch.setenv("EYAS_DATA", str(tmp_path / "eyas-data"))


PARAMETERS = (
    'run_name: str = "demo"  # name\nseed: int = 0  # seed\nlearning_rate: float = 2.0e-3  # rate'
)


def notebook(
    folder: Path,
    *cells: str,
    name: str = "01_tiny",
    kernel: str | None = "python3",
    words: str = "A tiny notebook.",
    parameters: str = PARAMETERS,
    eyas: dict | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    nb = nbformat.v4.new_notebook()
    if kernel:
        nb.metadata["kernelspec"] = {
            "name": kernel,
            "display_name": "Python 3",
            "language": "python",
        }
    if eyas is not None:
        nb.metadata["eyas"] = eyas
    parameters = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
    nb.cells = [
        nbformat.v4.new_markdown_cell(f"# Does it run?\n{words}"),
        parameters,
        *(nbformat.v4.new_code_cell(c) for c in cells),
    ]
    nbformat.write(nb, folder / f"{name}.ipynb")
    return folder


def profile(folder: Path, text: str) -> str:
    path = folder / "tiny.yaml"
    path.write_text(text)
    return str(path)


def run(
    tmp_path: Path, *cells: str, settings: str = "run_name: tiny\n", **options
) -> tuple[dict, str]:
    """run.json and the page of a notebook with these cells."""
    out = report.run_report(
        profile(tmp_path, settings),
        {},
        folder=notebook(tmp_path / "notebooks", *cells),
        reports=tmp_path / "reports",
        **options,
    )
    assert out == tmp_path / "reports" / "tiny"
    return read_json(out / "run.json"), (out / "01_tiny.html").read_text()


def no_network(html: str) -> None:
    assert not re.findall(
        r"<(?:script|img|link|iframe|source)[^>]*(?:src|href)\s*=\s*[\"']?(?:https?:)?//",
        html,
        re.I,
    )
    assert not re.findall(r"@import|url\(\s*[\"']?(?:https?:)?//", html, re.I)
    assert not re.findall(r"<script[^>]*\ssrc", html) and "<link" not in html


@pytest.mark.kernel
def test_success(tmp_path):
    settings = "run_name: tiny\nlearning_rate: 1e-4\nseed: 7\n"  # YAML reads 1e-4 as a string
    record, html = run(
        tmp_path,
        "print(seed, learning_rate * 2, type(learning_rate).__name__)",
        FIGURE,
        "from eyas.files import ROOT; ROOT / 'lib'",
        settings=settings,
    )
    assert (record["state"], record["return_code"]) == ("ok", 0)
    one = record["notebooks"][0]
    assert (one["state"], one["return_code"], one["exception"]) == ("ok", 0, None)
    assert one["parameters"] == {"run_name": "tiny", "learning_rate": 1e-4, "seed": 7}
    assert one["duration_s"] > 0 and one["started"] and one["title"] == "Does it run?"
    assert set(record["versions"]) == {"python", "torch", "transformers", "sglang", "eyas"}
    assert set(record["git"]) == {"commit", "dirty"} and record["process"] is None
    assert (
        record["settings"]["learning_rate"] == 1e-4
        and record["settings"]["draft_steps"] == Config().draft_steps
    )
    assert "7 0.0002 float" in html
    assert (
        re.search(r'<img alt="a line that rises" src="data:image/svg\+xml;base64,', html)
        and "<figcaption>a line that rises" in html
    )
    assert (
        "banner" not in re.sub(r"<style>.*?</style>", "", html, flags=re.S)
        and "eyas-end" not in html
    )
    assert (
        "<details" in html
        and '<a href="../index.html">' in html
        and "prefers-color-scheme: dark" in html
    )
    assert (
        str(ROOT) not in html
        and str(tmp_path) not in html
        and str(tmp_path) not in json.dumps(record)
    )
    no_network(html)
    index = (tmp_path / "reports" / "index.html").read_text()
    assert (
        "Run tiny" in index
        and 'href="tiny/01_tiny.html"' in index
        and 'href="tiny/run.json"' in index
    )
    no_network(index)


def failed(record: dict, html: str, tmp_path: Path) -> dict:
    """What every failure has in common; gives the exception block."""
    assert record["state"] == "failed" and record["return_code"] != 0
    one = record["notebooks"][0]
    assert one["state"] == "failed" and one["return_code"] == record["return_code"]
    index = (tmp_path / "reports" / "index.html").read_text()
    for page in (html, index):
        top = page[page.index('<div class="banner"') :][:2000]
        assert (
            "01_tiny failed" in top
            and "What to do" in top
            and "python -m eyas report --profile" in top
        )
    assert html.index('<div class="banner"') < html.index("Does it run?</h1>")
    assert str(tmp_path) not in html and str(tmp_path) not in json.dumps(record)
    return one["exception"]


@pytest.mark.kernel
def test_exception(tmp_path):
    record, html = run(
        tmp_path,
        "seed",
        (
            "from eyas.errors import EyasError\nraise EyasError('no store', 'one', 'python -m "
            "eyas extract')"
        ),
        "print('never')",
    )
    problem = failed(record, html, tmp_path)
    assert (problem["ename"], problem["evalue"]) == (
        "EyasError",
        "no store; expected one; next: python -m eyas extract",
    )
    assert (
        problem["kind"] == "exception"
        and problem["source"] == "from eyas.errors import EyasError"
        and (problem["cell"], problem["cells"]) == (4, 5)
    )
    assert any("next: python -m eyas extract" in line for line in problem["lines"])


@pytest.mark.kernel
def test_killed_kernel(tmp_path):
    record, html = run(
        tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "print('never')"
    )
    assert record["return_code"] == runner.EXIT_KERNEL_DIED
    problem = failed(record, html, tmp_path)
    assert (
        problem["kind"] == "the kernel died, by signal 9 (SIGKILL)"
        and problem["source"] == "import os, signal"
    )
    assert problem["memory_kills"] == 0 and "not the operating system" in problem["what_to_do"]


@pytest.mark.kernel
def test_memory_that_a_cell_asks_for_in_vain(tmp_path):
    """The kernel lives and says so."""
    record, html = run(
        tmp_path,
        (
            "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36))\nheld = "
            "bytearray(2**40)"
        ),
        "print('never')",
    )
    problem = failed(record, html, tmp_path)
    assert (problem["kind"], problem["ename"], record["return_code"]) == (
        "exception",
        "MemoryError",
        runner.EXIT_EXCEPTION,
    )
    assert (
        "memory ran out: this machine has" in problem["what_to_do"]
        and "batch_tok" not in problem["what_to_do"]
    )  # which this notebook does not have


CGROUPS = (
    Path("/sys/fs/cgroup/memory"),
    "memory.limit_in_bytes",
)  # version 1; of version 2 a process of the root group may not be limited


@pytest.fixture
def small_group():
    """A group of processes that together get 300 MiB, then one of them is killed."""
    folder, limit = CGROUPS[0] / f"eyas-test-{os.getpid()}", CGROUPS[1]
    try:
        folder.mkdir()
        (folder / limit).write_text(str(300 * 2**20))
    except OSError as error:
        # Goes when a limit can be set without root and in version 2 too.
        pytest.skip(
            f"no group of processes with a limit of memory can be made here ({error}); "
            f"run the tests as root on a machine with cgroups of version 1"
        )
    yield folder
    until(lambda: not (folder / "cgroup.procs").read_text(), 30)
    folder.rmdir()


@pytest.mark.kernel
def test_memory_that_the_operating_system_takes_back(tmp_path, small_group):
    """A real kill for want of memory: the count of such kills rises, and the banner says so."""
    record, html = run(
        tmp_path,
        f"import os\nopen({str(small_group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))",
        "held = b'x' * 2**30",
        "print('never')",
    )
    assert record["return_code"] == runner.EXIT_KERNEL_DIED
    problem = failed(record, html, tmp_path)
    assert (
        problem["kind"] == "the kernel died, by signal 9 (SIGKILL): memory ran out"
        and problem["source"] == "held = b'x' * 2**30"
    )
    assert (
        problem["memory_kills"] >= 1
        and "memory ran out" in problem["what_to_do"]
        and "The operating system killed" in problem["what_to_do"]
    )


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (
            {
                "kind": "exception",
                "ename": "OutOfMemoryError",
                "evalue": "CUDA out of memory. Tried to allocate 2.00 GiB",
            },
            "take less of batch_tok",
        ),
        (
            {
                "kind": "exception",
                "ename": "RuntimeError",
                "evalue": (
                    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to "
                    "allocate 9 bytes"
                ),
            },
            "take less of batch_tok",
        ),
        (
            {
                "kind": "the kernel died, by signal 9 (SIGKILL)",
                "ename": "DeadKernelError",
                "evalue": "",
                "memory_kills": None,
            },
            "most often memory ran out",
        ),
        (
            {
                "kind": "the kernel died, by signal 11 (SIGSEGV)",
                "ename": "DeadKernelError",
                "evalue": "",
            },
            "what it said last: a.log",
        ),
        ({"kind": "exception", "ename": "ValueError", "evalue": "no"}, "read the traceback"),
    ],
)
def test_advice(problem, words):
    assert words in runner.advice(
        problem, "again", "a.log", {"batch_tok": 512}
    ) and "`again`" in runner.advice(problem, "again", "a.log", {})


@pytest.mark.kernel
def test_cell_timeout(tmp_path):
    record, html = run(tmp_path, "import time\ntime.sleep(600)", cell_timeout_s=10.0)
    assert record["return_code"] == runner.EXIT_TIMEOUT and record["duration_s"] < 300
    problem = failed(record, html, tmp_path)
    assert (
        problem["kind"] == "a cell took longer than 10 s"
        and problem["source"] == "import time"
        and "--cell-timeout-s" in problem["what_to_do"]
    )


@pytest.mark.kernel
def test_exit_halfway(tmp_path):
    record, html = run(tmp_path, "import sys\nsys.exit(0)", "print('never')")
    assert record["return_code"] == runner.EXIT_STOPPED_EARLY
    problem = failed(record, html, tmp_path)
    assert "stopped before its end" in problem["kind"] and problem["source"] == "import sys"


@pytest.mark.kernel
def test_killed_runner_and_the_notebooks_after_it(tmp_path):
    folder = notebook(
        tmp_path / "notebooks",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nimport time; time.sleep(20)",
    )
    notebook(folder, "print('never')", name="02_after")
    out = report.run_report(
        profile(tmp_path, "run_name: tiny\n"), {}, folder=folder, reports=tmp_path / "reports"
    )
    record, html = read_json(out / "run.json"), (out / "01_tiny.html").read_text()
    problem = failed(record, html, tmp_path)
    assert (
        "SIGKILL" in problem["kind"]
        and problem["source"] == "import os, signal"
        and record["return_code"] == -9
    )
    assert record["notebooks"][1]["state"] == "not run" and not (out / "02_after.html").exists()


@pytest.mark.kernel
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
    assert second["state"] == "ok" and second["notebooks"][0] == first["notebooks"][0] | {
        "earlier": True
    }
    assert (
        second["notebooks"][1]["parameters"] == {"run_name": "tiny", "seed": 3}
        and (out / "01_tiny.html").exists()
    )


@pytest.mark.parametrize(
    ("settings", "overrides", "words"),
    [
        ("run_name: tiny\nlayers: 3\n", {}, "unknown setting layers"),
        ("run_name: tiny\n", {"epochs": "2"}, "no notebook reads the setting epochs"),
        ("run_name: tiny\nseed: two\n", {}, "seed = 'two'"),
        ("run_name: tiny\n", {"learning_rate": "-1"}, "learning_rate = -1.0"),
    ],
)
def test_wrong_settings_start_nothing(tmp_path, settings, overrides, words):
    folder = notebook(tmp_path / "notebooks", "print('never')")
    with pytest.raises(EyasError, match=re.escape(words)):
        report.run_report(
            profile(tmp_path, settings), overrides, folder=folder, reports=tmp_path / "reports"
        )
    assert not (tmp_path / "reports").exists() and not (tmp_path / "eyas-data").exists()


@pytest.mark.parametrize(
    ("kernel", "words"),
    [("no-such-kernel", "'no-such-kernel', which is not installed"), (None, "names no kernelspec")],
)
def test_missing_kernelspec(tmp_path, kernel, words):
    folder = notebook(tmp_path / "notebooks", "print('never')", kernel=kernel)
    with pytest.raises(EyasError, match=words):
        report.run_report(
            profile(tmp_path, "run_name: tiny\n"), {}, folder=folder, reports=tmp_path / "reports"
        )


def test_parameters_cell_must_be_literals(tmp_path):
    folder = notebook(tmp_path / "notebooks")
    path = folder / "01_tiny.ipynb"
    nb = nbformat.read(path, as_version=4)
    nb.cells[1].source = "seed: int = 1 + len('a')"
    nbformat.write(nb, path)
    with pytest.raises(EyasError, match="parameters cell"):
        runner.declared_parameters(path)


# What the tiny notebooks below write goes into the run's folder, where `reads` and `writes` look
# for it.
HERE = (
    "from eyas.config import Config\nfolder = Config.create(run_name=run_name).run_dir / "
    "'mine'\nfolder.mkdir(exist_ok=True)"
)


def tiny_road(folder: Path, words: str = "Words.", two: str = "") -> Path:
    """01 writes a file that says whether the seed is odd, 02 reads it."""
    notebook(
        folder,
        HERE,
        "(folder / 'odd.txt').write_text(str(seed % 2))",
        "print('seed', seed)  # a comment",
        words=words,
        eyas={"reads": [], "writes": ["mine/odd.txt"]},
    )
    return notebook(
        folder,
        HERE,
        "import time\ntime.sleep(1)",
        "print('odd:', (folder / 'odd.txt').read_text())" + two,
        name="02_after",
        parameters='run_name: str = "demo"  # name',
        eyas={"reads": ["mine/odd.txt"], "writes": [], "minutes": 3},
    )


@pytest.mark.kernel
def test_up_to_date_or_not(tmp_path, monkeypatch, capsys):
    """By content: what is up to date is shown again, in new words; what is not says why, and its
    result alone decides about what comes after it.
    """
    folder, settings, reports = (
        tiny_road(tmp_path / "notebooks"),
        profile(tmp_path, "run_name: tiny\n"),
        tmp_path / "reports",
    )
    monkeypatch.setattr(report, "LOG_S", 0.3)

    def again(**settings_) -> tuple[list, str, list[dict]]:
        """[was it reused?] of both, what was said, the records."""
        out = report.run_report(settings, settings_, folder=folder, reports=reports)
        found = read_json(out / "run.json")
        assert found["state"] == "ok" and [n["state"] for n in found["notebooks"]] == ["ok", "ok"]
        return (
            [bool(n.get("reused")) for n in found["notebooks"]],
            capsys.readouterr().out,
            found["notebooks"],
        )

    reused, said, first = again()
    assert (
        reused == [False, False] and said.count("runs, because no finished run of it is there") == 2
    )
    assert re.search(r"02_after: cell \d of 5, 0:\d\d, about [23]:\d\d left of all", said), (
        "the minutes that it declares"
    )

    (
        reports / "tiny" / "01_tiny.html"
    ).unlink()  # pages are made anew, in the notebook's words of now
    tiny_road(folder, "Other words.")
    reused, said, second = again()
    assert reused == [True, True] and said.count("up to date, from the run of") == 2
    assert second[1] == first[1] | {"reused": True, "earlier": True}
    page = (reports / "tiny" / "01_tiny.html").read_text()
    assert "Other words." in page and "seed 0" in page and page.count("injected-parameters") == 1

    odd = tmp_path / "eyas-data" / "runs" / "tiny" / "mine" / "odd.txt"
    odd.write_text("lost")  # the same in the end: what comes after it stays
    reused, said, _ = again(seed="2")
    assert (
        reused == [False, True]
        and "01_tiny: runs, because -p seed is 2, was 0; mine/odd.txt is not what its run left"
        in said
    )

    reused, said, _ = again(seed="1")
    assert reused == [False, False] and "02_after: runs, because mine/odd.txt has changed" in said
    assert re.search(r"02_after: cell \d of 5, 0:\d\d, about 0:0\d left of all", said), (
        "the seconds of its last run"
    )
    assert "odd: 1" in (reports / "tiny" / "02_after.html").read_text()

    tiny_road(
        folder, two="; 1 / 0"
    )  # a failure is not kept; the page of before is, until there is a new one
    assert (
        read_json(
            report.run_report(settings, {"seed": "1"}, folder=folder, reports=reports) / "run.json"
        )["state"]
        == "failed"
    )
    assert "02_after: runs, because its code has changed" in capsys.readouterr().out
    work = report.Work(
        folder / "02_after.ipynb",
        {"run_name": "tiny"},
        tmp_path / "eyas-data" / "runs" / "tiny" / "notebooks",
    )
    assert work.reasons() == ["no finished run of it is there"]


def test_what_is_reached(tmp_path, monkeypatch):
    """A function that a notebook comes to decides, by its code; its words, and functions that it
    does not come to, do not.
    """
    library = tmp_path / "eyas"
    shutil.copytree(reuse.LIBRARY, library, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(reuse, "LIBRARY", library)

    def changed(
        module: str,
        before: str,
        after: str,
        cells=(
            "from eyas.report import plots",
            "from eyas.store.certificate import verdict as v; plots.plot_lengths(v)",
        ),
        elsewhere=(),
    ) -> set[str]:
        path, was = (
            library / f"{module.replace('.', '/')}.py",
            reuse.reached(list(cells), list(elsewhere)),
        )
        text = path.read_text()
        assert text.count(before) == 1
        path.write_text(text.replace(before, after))
        now = reuse.reached(list(cells), list(elsewhere))
        path.write_text(text)
        return {name for name in was.keys() | now.keys() if was.get(name) != now.get(name)}

    assert changed("store.certificate", "tests, {len(record", "test, {len(record") == {
        "eyas.store.certificate.verdict"
    }
    assert changed("store.certificate", "Return the result in words", "Other words") == set()
    assert (
        changed(
            "store.certificate",
            'return store.folder / "parity.json"',
            'return store.folder / "other.json"',
        )
        == set()
    ), "verdict does not come to it"
    assert changed("report.plots", "def _axes(", "def _axes(other=0, *, ") == {
        "eyas.report.plots._axes"
    }, "by way of plot_lengths"
    assert changed("evaluation.offline", "def walk(", "def walk(other, ") == set()
    assert changed(
        "evaluation.offline",
        "def walk(",
        "def walk(other, ",
        elsewhere=["eyas.training.trainer.train"],
    ) == {"eyas.evaluation.offline.walk"}, "in another process"
    assert (
        changed(
            "config",
            "epochs: Float = Field(2.0, ",
            "epochs: Float = Field(3.0, ",
            cells=["from eyas.config import Config; Config.create()"],
        )
        == set()
    ), "settings count as parameters"
    assert changed(
        "config",
        'folder = self.out_dir / "export"',
        'folder = self.out_dir / "exported"',
        cells=["from eyas.config import Config"] + ["Config.create()"],
    ) == {"eyas.config.Config"}


@pytest.mark.parametrize("path", sorted(report.NOTEBOOKS.glob("0*.ipynb")), ids=lambda p: p.stem)
def test_what_the_notebooks_read(path, embedded, monkeypatch):
    """Each says what it reads and writes, in names that there are, and comes to the code that does
    its work, here or in a job.
    """
    monkeypatch.delenv("EYAS_DATA")  # where the target is converted already
    work = report.Work(path, settings := resolved_settings(path, {}, {}), Path())
    assert settings.keys() == settings_read(path) > {"run_name"}
    assert (
        work.declared
        and work.minutes >= 1
        and all(isinstance(reuse.content(name, work.config), str) for name in work.writes)
    )
    code = work.inputs()
    assert {f"-p {name}" for name in settings} <= code.keys() and {
        "torch",
        "its code",
    } <= code.keys()
    found = {
        "01": "eyas.server.serve.server_up",
        "02": "eyas.capture.extract.extract",
        "03": "eyas.inspection.stats.probes",
        "04": "eyas.training.ttt.batch_loss",
        "05": "eyas.evaluation.decode.speculative",
        "06": "eyas.studies.sweep.gather",
    }
    assert any(name.startswith(found[path.stem[:2]]) for name in code), found
    assert all(
        reuse.content(name, work.config) != reuse.ABSENT
        for name in work.reads
        if name.startswith("notebooks/") or name == "server"
    )
    assert not [
        name
        for name in code
        if name.startswith(
            (
                "eyas.report.pages.notebook_page",
                "eyas.report.pages.page",
                "eyas.report.index",
                "eyas.report.run._write",
            )
        )
    ], "a new look is no reason to run"


def test_how_long_it_will_take(tmp_path):
    """From the cells of the run before, at the pace of this run."""
    folder = notebook(tmp_path / "notebooks", "1", "2")
    notebook(folder, "1", name="02_after", eyas={"reads": [], "writes": [], "minutes": 2})
    works = [
        report.Work(folder / f"{name}.ipynb", {"run_name": "tiny"}, tmp_path)
        for name in ("01_tiny", "02_after")
    ]
    before = {"notebooks": [{"name": "01_tiny", "state": "ok", "cells_s": [None, 0.0, 20.0, 10.0]}]}
    course = report.Course(works, False, before)
    assert course.left_s("01_tiny", [0.0, 0.0, None, None], 5.0, 5.0) == 15.0 + 10.0 + 120.0
    assert (
        course.left_s("01_tiny", [0.0, 0.0, 40.0, None], 5.0, 45.0) == 2 * 10.0 - 5.0 + 2 * 120.0
    ), "twice as slow as before"
    course.ended("01_tiny", [0.0, 0.0, 40.0, 20.0])
    assert course.left_s("02_after", [0.0, None, None], 30.0, 30.0) == 2 * 120.0 - 30.0
    assert course.left_s("01_tiny", [], 0.0, 0.0) is None


@pytest.mark.kernel
def test_stopped_and_killed(tmp_path):
    """A run that is told to stop takes its notebook, its kernel and what they started with it and
    says so; so does one that is killed, which is shown as killed. The same goes on from there.
    """
    folder = notebook(tmp_path / "notebooks", "print('first')", eyas={"reads": [], "writes": []})
    notebook(
        folder,
        "import os, subprocess, time\nfrom eyas.files import data_dir, write_text\n"
        "write_text(data_dir() / 'pids', f\"{os.getpid()} {subprocess.Popen(['sleep', "
        "'300'], start_new_session=True).pid}\")\ntime.sleep(120)",
        name="02_long",
    )
    settings, reports = profile(tmp_path, "run_name: tiny\n"), tmp_path / "reports"
    code = (
        f"from pathlib import Path; from eyas.report.run import run_report; "
        f"run_report({settings!r}, folder=Path({str(folder)!r}), "
        f"reports=Path({str(reports)!r}))"
    )
    mark, said = tmp_path / "eyas-data" / "pids", tmp_path / "said"
    for signs, state in (
        ((signal.SIGINT, signal.SIGINT), "interrupted"),
        ((signal.SIGHUP,), "interrupted"),
        ((signal.SIGKILL,), "running"),
    ):
        mark.unlink(missing_ok=True)
        with open(said, "w") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=os.environ | {"PYTHONPATH": str(ROOT / "lib")},
                stdout=out,
                preexec_fn=_as_from_a_terminal,
            )
        until(mark.exists, 300)
        started = [int(pid) for pid in mark.read_text().split()]
        for where in (reports, tmp_path / "elsewhere"):
            with pytest.raises(EyasError, match=f"'tiny' is going on .process {process.pid}"):
                report.run_report(settings, {}, folder=folder, reports=where)
        if state == "running":  # another run beside it, with the same data folder
            other = report.run_report(
                profile(tmp_path, "run_name: other\n"),
                {},
                ("01",),
                folder=folder,
                reports=tmp_path / "elsewhere",
            )
            assert read_json(other / "run.json")["state"] == "ok"
        for sign in signs:
            process.send_signal(sign)
            time.sleep(0.2)
        process.wait(120)
        until(lambda: not [pid for pid in started if Path(f"/proc/{pid}").exists()], 60)
        record = read_json(reports / "tiny" / "run.json")
        assert (
            record["state"] == state and "first" in (reports / "tiny" / "01_tiny.html").read_text()
        )
        if state == "interrupted":
            assert [n["state"] for n in record["notebooks"]] == ["ok", "interrupted"] and record[
                "process"
            ] is None
    assert "01_tiny: up to date" in said.read_text()
    report.write_index(reports)
    assert "was killed" in (reports / "index.html").read_text()


@pytest.mark.kernel
def test_a_server_that_somebody_else_started_stays(tmp_path):
    """By hand: neither a notebook nor the run takes it down.

    One that a run left which was killed: the next one does, at its start.
    """
    folder = notebook(
        tmp_path / "notebooks",
        "from eyas.config import Config\nfrom eyas.server.serve import "
        "find_server\nserver = find_server(Config.create(run_name=run_name))\n"
        "server and server.done()\nprint('server:', server and server.owner)",
    )
    server_dir = Config.create(run_name="tiny").server_dir
    for owner, stays in (("hand", True), ("report 1", False)):
        process = subprocess.Popen(["sleep", "300"])
        record = {
            "url": "http://127.0.0.1:9",
            "pid": process.pid,
            "started": started_ticks(process.pid),
            "owner": owner,
            "command": [],
            "environment": {},
        }
        write_json(server_dir / "server.json", record)
        out = report.run_report(
            profile(tmp_path, "run_name: tiny\n"), {}, folder=folder, reports=tmp_path / "reports"
        )
        assert f"server: {'hand' if stays else None}" in (out / "01_tiny.html").read_text()
        assert (process.poll() is None) == stays == (server_dir / "server.json").exists()
        process.kill()
        process.wait()


def _as_from_a_terminal() -> None:
    """Tests that run in the background (`nohup make test &`) have these ignored, and so would what
    they start.
    """
    for sign in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sign, signal.SIG_DFL)


def until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def test_machine_paths():
    home = os.path.expanduser("~")
    text = (
        f"File \x1b[32m{ROOT}/lib/eyas/training/trainer.py:12\x1b[39m in {ROOT}; "
        f"{sys.prefix}/bin/python; see {home}/x and lib{home}; {ROOT}ed"
    )
    cleaned = pages.without_machine_paths({"a": [text], "image/png": str(ROOT)})
    assert cleaned["image/png"] == str(ROOT)
    longer = re.sub(
        f"^{re.escape(tempfile.gettempdir())}/", "tmp/", f"{ROOT}ed"
    )  # another folder, beside this one
    assert cleaned["a"] == [
        (
            f"File \x1b[32mlib/eyas/training/trainer.py:12\x1b[39m in .; .venv/bin/python; "
            f"see ~/x and lib{home}; {longer}"
        )
    ]


@pytest.mark.parametrize(
    ("low", "high", "identical", "word"),
    [
        (1.1, 1.3, True, "Serve it: 1.20 times"),
        (0.6, 0.7, True, "Don't serve it: 0.65 times"),
        (0.9, 1.1, True, "No clear gain: 1.00 times"),
        (1.1, 1.3, False, "Don't serve it: its output is not"),
        (None, None, True, "Too few prompts"),
    ],
)
def test_verdict(low, high, identical, word):
    ratio = {
        "value": 1.0 if low is None else (low + high) / 2,
        "low": low,
        "high": high,
        "prompts": 24,
    }
    assert verdict.verdict({"speed_ratio": ratio, "identical_float32": identical}).startswith(word)


def interval(value, low, high):
    return {"value": value, "low": low, "high": high, "level": 0.95}


@pytest.mark.kernel
@pytest.mark.parametrize("differing", [0, 2])
def test_headline_is_copied_to_the_index(tmp_path, monkeypatch, differing):
    """The numbers go from the acceptance files through run.json to the index, as they are."""
    config = Config.create(run_name="tiny")
    check = {
        "prompts": 24,
        "differing": differing,
        "ties": 0,
        "not_ties": differing,
        "differences": [],
    }
    write_json(
        config.acceptance_dir / "acceptance.json",
        {
            "settings": {"target": "SmolLM2-135M-Instruct", "boundaries": [2, 15, 27]},
            "counts": {"prompts": 24},
            "acceptance_length": interval(1.6234, 1.512, 1.741),
            "prompt_lookup": {"acceptance_length": interval(1.4321, 1.31, 1.58)},
            "speed_ratio": interval(1.214, 1.109, 1.333),
            "speed_ratio_bfloat16": interval(1.302, 1.2, 1.4),
            "repeated_bigrams": interval(0.091, 0.08, 0.1),
            "outside_vocab": interval(0.05, 0.04, 0.06),
            "identical_to_greedy": {
                "float32": check,
                "bfloat16": check | {"prompts": 8, "differing": 3, "ties": 3},
            },
        },
    )
    write_json(
        config.acceptance_dir / "walk.json",
        {"counts": {"samples": 48}, "acceptance_length": interval(1.598, 1.52, 1.68)},
    )
    monkeypatch.setattr(report, "_data_sentence", lambda config: "1,000 training conversations")
    monkeypatch.setattr(report, "_parity_sentence", lambda config: "passed (4 tests, 12 samples)")
    record, _ = run(tmp_path, "pass")
    assert record["headline"]["acceptance_length"] == {
        "value": 1.6234,
        "low": 1.512,
        "high": 1.741,
        "prompts": 24,
    }
    assert record["headline"]["offline_estimate"] == {
        "value": 1.598,
        "low": 1.52,
        "high": 1.68,
        "prompts": 48,
    }
    index = (tmp_path / "reports" / "index.html").read_text()
    for text in (
        "<b>1.62</b>",
        "95 % interval 1.51 to 1.74; 24 prompts",
        "<b>1.43</b>",
        "95 % interval 1.31 to 1.58; 24 prompts",
        "<b>1.60</b>",
        "95 % interval 1.52 to 1.68; 48 prompts",
        "<b>1.21</b>",
        "boundaries 2, 15, 27",
        "1,000 training conversations",
        "passed (4 tests, 12 samples)",
        "9.1% of the decoded bigrams",
        (
            "3 of 8 outputs differ from greedy, 3 of them at a tie; speed ratio 1.30, 95 % "
            "interval 1.20 to 1.40"
        ),
    ):
        assert text in index, text
    answer = "Serve it: 1.30 times" if differing == 0 else "Don&#x27;t serve it: its output is not"
    assert (
        f"output identical to greedy (float32): {'no' if differing else 'yes'}" in index
        and answer in index
    )
    assert (
        index.index(answer) < index.index("<b>1.62</b>") < index.index("01_tiny.html")
    )  # the answer, the numbers, then the table that leads to the pages


def test_where_a_notebook_is_whatever_its_last_output_was(tmp_path):
    """nbformat writes texts of several lines as lists: tables, bars and plain text alike."""
    bar = {"text/html": f"{progress.MARK}\n<progress></progress>", "text/plain": "12 of 40\n"}
    outputs = [
        nbformat.v4.new_output(
            "display_data", {"text/html": "<table>\n</table>", "text/plain": "a\nb"}
        ),
        nbformat.v4.new_output("stream", text="one\ntwo\n"),
        nbformat.v4.new_output("display_data", bar),
        nbformat.v4.new_output("display_data", {"image/png": "AAAA"}),
    ]
    for n, said in enumerate(["", "two", "12 of 40", "12 of 40"], 1):
        cell = nbformat.v4.new_code_cell(
            "work()",
            outputs=outputs[:n],
            metadata={"papermill": {"start_time": "2026-11-30T07:00:00", "duration": None}},
        )
        nbformat.write(
            nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# T"), cell]),
            tmp_path / "at.ipynb",
        )
        found = runner.place(tmp_path / "at.ipynb")
        assert (found["cell"], found["cells"], found["said"]) == (2, 2, said)
