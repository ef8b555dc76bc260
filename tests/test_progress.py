"""The progress line: counts add up, whole lines in a log, one rewritten line in a terminal."""

import io

import pytest

from eyas import progress as module
from eyas.progress import Progress, bytes_text, duration_text, number_text


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (812, "812 B"),
        (5_612_544, "5.35 MiB"),
        (991_222_464_512, "923 GiB"),
        (5 * 2**50, "5,120 TiB"),
    ],
)
def test_bytes(count, text):
    assert bytes_text(count) == text


def test_texts():
    assert [duration_text(s) for s in (7, 271, 3765)] == ["0:07", "4:31", "1:02:45"]
    assert [number_text(v) for v in (0.01234, 5.354, 99.97, 27_620)] == [
        "0.0123",
        "5.35",
        "100",
        "27,620",
    ]


def test_line(clock):
    """Ten seconds in:

    40 of 100 done, one of them failed; the bytes are the sum of all calls, not the last one's.
    """
    progress = Progress(100)
    for _ in range(39):
        progress.update(samples=1, tok=50, bytes=2**20)
    progress.update(errors=1, note="loss 3.1")
    clock[0] += 10
    assert progress.line() == (
        "40/100 samples, 40 % | 4 samples/s | 195 tok/s | 39 MiB | 1 error | 0:10, 0:15 "
        "left | loss 3.1"
    )


def test_log_gets_few_whole_lines(clock, capsys):
    with Progress(1000) as progress:
        for _ in range(1000):
            clock[0] += 0.1
            progress.update(samples=1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and lines[-1].startswith(
        "1,000/1,000 samples, 100 % | 10 samples/s | 0 errors | 1:40"
    )


def test_terminal_gets_one_line(clock, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(module.sys, "stderr", terminal)
    with Progress(10, "steps") as progress:
        for i in range(10):
            clock[0] += 1
            progress.update(samples=1, note="a long note" if i < 9 else "")
    text = terminal.getvalue()
    assert text.count("\n") == 1 and text.endswith("\n") and text.count("\r") == 12
    widths = [len(part) for part in text.rstrip("\n").split("\r")[1:]]
    assert widths[-1] >= len(text.rstrip("\n").split("\r")[-2].rstrip()), (
        "the shorter last line wipes the longer one before it"
    )


@pytest.mark.kernel
def test_a_live_figure_in_a_kernel_is_one_output_that_goes_at_the_end(tmp_path):
    """In a real kernel: drawn once the file is there, anew in the same place, and a saved notebook
    has nothing of it left.
    """
    import nbformat
    from nbclient import NotebookClient

    source = f"""
from pathlib import Path
import pandas as pd
from eyas.progress import LiveFigure
path = Path({str(tmp_path / "t.parquet")!r})
live = LiveFigure(lambda table: table.plot(), path, every_s=0.0)
live()
assert live._handle is None
pd.DataFrame({{"a": [1, 2]}}).to_parquet(path)
live()
first = live._handle.display_id
live()
assert live._handle.display_id == first
"""
    for last in ("", "live.close()"):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source + last)])
        (tmp_path / "t.parquet").unlink(missing_ok=True)
        NotebookClient(notebook, kernel_name="python3", iopub_timeout=60).execute()
        (output,) = [o for o in notebook.cells[0].outputs if o["output_type"] != "stream"]
        assert output["output_type"] == "display_data"
        assert ("image/png" in output["data"]) == (last == "") and (
            last == "" or output["data"] == {"text/plain": ""}
        )
