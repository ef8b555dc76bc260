"""Run one notebook through papermill, in a process of its own that starts a kernel of this Python.

- The process is `python -m eyas.report.notebook SPEC`; `execute` starts it and waits for it.
- A killed kernel, a killed runner, a cell that takes too long and a `sys.exit(0)` halfway all give
  a return code other than 0, and what went wrong in words.
- The cells of the output are not asked how they ended: they say "completed" after a kill too.
"""

import argparse
import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from eyas.errors import EyasError
from eyas.files import ROOT, read_json, write_json
from eyas.processes import still_running
from eyas.progress import MARK, bytes_text

CELL_TIMEOUT_S = 4 * 3600.0
LAST_LINES = 15  # of a traceback or a log that run.json keeps
ADDED_TAGS = {
    "injected-parameters",
    "papermill-error-cell-tag",
    "eyas-end",
}  # cells that are not the notebook's own
EXIT_EXCEPTION, EXIT_STOPPED_EARLY, EXIT_RUNNER, EXIT_TIMEOUT, EXIT_KERNEL_DIED = 1, 3, 4, 124, 137
OUT_OF_MEMORY = (
    "MemoryError",
    "_ArrayMemoryError",
    "OutOfMemoryError",
)  # of Python, numpy and CUDA; torch on a CPU says it in a RuntimeError
MEMORY_SETTINGS = (
    "pass_tok",
    "batch_tok",
    "concurrency",
    "max_total_tok",
    "sweep_parallel",
    "decode_prompts",
)  # less of them needs less


def declared_parameters(path: Path) -> dict[str, Any]:
    """Return the names and literal values of the notebook's one cell tagged `parameters`.

    EyasError: there is not exactly one such cell, or a line is not `name: type = literal`.
    """
    cells = [
        c for c in read_json(path)["cells"] if "parameters" in c.get("metadata", {}).get("tags", [])
    ]
    wrong = EyasError(
        f"{path.name}: the parameters cell",
        "exactly one cell tagged 'parameters', lines 'name: type = literal  # meaning, unit'",
    )
    if len(cells) != 1:
        raise wrong
    values = {}
    for line in ast.parse("".join(cells[0]["source"])).body:
        if not (
            isinstance(line, ast.AnnAssign)
            and isinstance(line.target, ast.Name)
            and line.value is not None
        ):
            raise wrong
        try:
            values[line.target.id] = ast.literal_eval(line.value)
        except ValueError:
            raise wrong from None
    return values


def execute(
    path: Path,
    output: Path,
    parameters: dict,
    cell_timeout_s: float = CELL_TIMEOUT_S,
    wait=subprocess.Popen.wait,
    environment: dict[str, str] | None = None,
) -> tuple[int, dict | None]:
    """Run a notebook in a process of its own; return its return code and what went wrong, or None.

    `wait(process)` waits for the process. `environment` adds to the environment of this process.
    The log and the specification are written beside `output`, the executed notebook.

    What went wrong is a dict: kind, ename, evalue, lines, cell and cells (which of how many),
    source, and `memory_kills`: how many processes the operating system killed for memory meanwhile
    (None where it does not count them). The process and its kernel end with this process.
    """
    log, spec, result = (
        output.with_suffix(f".{suffix}") for suffix in ("log", "spec.json", "result.json")
    )
    for leftover in (output, result):
        leftover.unlink(missing_ok=True)
    write_json(
        spec,
        {
            "parent": os.getpid(),
            "notebook": str(path),
            "output": str(output),
            "result": str(result),
            "parameters": parameters,
            "cell_timeout_s": cell_timeout_s,
        },
    )
    environment = (
        os.environ
        | (environment or {})
        | {
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(ROOT / "lib"), os.environ.get("PYTHONPATH")))
            )
        }
    )
    environment.pop(
        "MPLBACKEND", None
    )  # Agg would give a report without figures and without an error
    # widgets are not installed on purpose: they do not show in a saved page
    environment["PYTHONWARNINGS"] = ",".join(
        filter(None, (environment.get("PYTHONWARNINGS"), "ignore:IProgress not found"))
    )
    kills_before = memory_kills()
    with open(log, "wb") as log_file:
        child = subprocess.Popen(
            [sys.executable, "-m", "eyas.report.notebook", str(spec)],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        wait(child)
    finally:
        _stop(child)
    if child.returncode == 0:
        return 0, None
    problem = read_json(result) if result.is_file() else _runner_killed(child.returncode, log)
    at = place(output)
    kills = None if kills_before is None else memory_kills() - kills_before
    if kills and "SIGKILL" in problem["kind"]:
        problem["kind"] += ": memory ran out"
    return child.returncode, problem | {name: at[name] for name in ("cell", "cells", "source")} | {
        "memory_kills": kills
    }


def _stop(child: subprocess.Popen) -> None:
    """End the child and its kernel. Do nothing when the child has ended.

    The kernel ends by itself when its parent is gone; it is killed where it does not.
    """
    if child.poll() is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        kernels = psutil.Process(child.pid).children()
        for sign in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(child.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=10)
                break
        for kernel in still_running(kernels, 5.0):
            kernel.kill()


def place(output: Path) -> dict:
    """Return how far a notebook is, from the times that papermill writes into `output`.

    `cell` of `cells` started last. `source` is its first line, `said` the last line of its output.
    `seconds` holds the duration of each cell, None where it has not ended. A cell's status is not
    used: it is "completed" after a kill too.
    """
    at = {"cell": None, "cells": None, "source": "", "said": "", "seconds": []}
    try:
        cells = [
            c
            for c in read_json(output)["cells"]
            if not ADDED_TAGS & set(c["metadata"].get("tags", []))
        ]
    except (OSError, ValueError):  # not there yet, or just being written
        return at
    for number, cell in enumerate(cells, 1):
        times = cell["metadata"].get("papermill", {})
        at["seconds"].append(times.get("duration"))
        if cell["cell_type"] == "code" and times.get("start_time"):
            lines = [line for line in "".join(cell["source"]).splitlines() if line.strip()]
            # Only plain text and progress bars: figures and tables have a text/plain that says
            # nothing. The format allows a string or a list of lines.
            said = [
                out["data"].get("text/plain", "") if "data" in out else out["text"]
                for out in cell["outputs"]
                if "text" in out
                or set(out.get("data", {})) == {"text/plain"}
                or "".join(out.get("data", {}).get("text/html", "")).startswith(MARK)
            ]
            at |= {
                "cell": number,
                "source": (lines or [""])[0][:120],
                "said": "".join(said[-1] if said else "").strip().split("\n")[-1],
            }
    at["cells"] = len(cells)
    return at


def memory_kills() -> int | None:
    """Return how many processes the operating system has killed for memory since it started.

    Kills by the limit of a container count too. None where the system does not count them.
    """
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.M)
    except OSError:
        return None
    return int(found.group(1)) if found else None


def advice(problem: dict, again: str, log: str, settings: dict) -> str:
    """Return what to do about a problem.

    `settings` are those that the notebook reads: the text names those that lower the memory.
    """
    kind, name = problem["kind"], problem["ename"]
    less = [n for n in MEMORY_SETTINGS if n in settings]
    smaller = ""
    if less:
        smaller = (
            f", or take less of {' or '.join(less)} (`python -m eyas settings` says what each does)"
        )
    memory = (
        f"memory ran out: this machine has {bytes_text(psutil.virtual_memory().total)}; "
        f"close other programs{smaller}; then `{again}`"
    )
    if (
        name in OUT_OF_MEMORY
        or "can't allocate memory" in problem["evalue"]
        or "out of memory" in problem["evalue"].lower()
    ):
        return memory
    if "SIGKILL" in kind:
        kills = problem["memory_kills"]
        if kills is None:
            return f"most often {memory}"
        if kills:
            processes = "1 process" if kills == 1 else f"{kills} processes"
            return (
                f"{memory}. The operating system killed {processes} for want of memory while it ran"
            )
        return (
            "somebody killed it, and not the operating system for want of memory, "
            f"which counts such kills; `{again}`"
        )
    if kind.startswith("the kernel died"):
        return f"what it said last: {log}; then `{again}`"
    if kind == "exception":
        return (
            f"what the message says; then `{again}`"
            if name == "EyasError"
            else f"read the traceback on the notebook's page; then `{again}`"
        )
    if kind.startswith("a cell took"):
        return f"see why it is slow, or allow more: `{again} --cell-timeout-s SECONDS`"
    if kind.startswith("it stopped before its end"):
        return f"remove the exit from that cell: the cells after it have not run; then `{again}`"
    return f"see {log}; then `{again}`"


def _ended(return_code: int) -> str:
    return (
        f"with code {return_code}"
        if return_code >= 0
        else f"by signal {-return_code} ({signal.Signals(-return_code).name})"
    )


def _runner_killed(return_code: int, log: Path) -> dict:
    return {
        "kind": f"the process that ran it ended {_ended(return_code)}",
        "ename": "",
        "evalue": "",
        "lines": log.read_text(errors="replace").splitlines()[-LAST_LINES:],
    }


def _one(spec_path: Path) -> int:
    """Run one notebook, inside the child; return the return code of the process.

    What went wrong is written into the result file.
    """
    import nbformat
    import papermill
    from jupyter_client import AsyncKernelManager
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    class Kernel(AsyncKernelManager):
        """Keep how the process of a kernel ended, which jupyter_client forgets."""

        ended: int | None = None

        async def _async_is_alive(self) -> bool:
            alive = await super()._async_is_alive()
            if not alive and self.provisioner is not None and self.provisioner.process is not None:
                Kernel.ended = self.provisioner.process.returncode
            return alive

    spec = read_json(spec_path)
    threading.Thread(target=_end_with, args=(spec["parent"],), daemon=True).start()
    notebook = nbformat.read(spec["notebook"], as_version=4)
    end = f"eyas-end-{os.urandom(16).hex()}"  # only a notebook that has run to its end prints it
    notebook.cells.append(
        nbformat.v4.new_code_cell(f"print({end!r})", metadata={"tags": ["eyas-end"]})
    )
    source = Path(spec["output"]).with_suffix(".source.ipynb")
    nbformat.write(notebook, source)

    def failed(kind: str, ename: str, evalue: str, text: str, code: int) -> int:
        lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()[-LAST_LINES:]
        write_json(
            Path(spec["result"]), {"kind": kind, "ename": ename, "evalue": evalue, "lines": lines}
        )
        return code

    try:
        for tries_left in (2, 1, 0):
            try:
                papermill.execute_notebook(
                    str(source),
                    spec["output"],
                    parameters=spec["parameters"],
                    cwd=str(ROOT),
                    progress_bar=False,
                    autosave_cell_every=5,
                    execution_timeout=spec["cell_timeout_s"],
                    start_timeout=180,
                    iopub_timeout=600,
                    kernel_manager_class=Kernel,
                )
                break
            except RuntimeError as error:
                # Another program took a port that was free, before the kernel did. No cell has run.
                if not tries_left or "Kernel died before replying" not in str(error):
                    raise
    except papermill.PapermillExecutionError as error:
        return failed(
            "exception", error.ename, error.evalue, "\n".join(error.traceback), EXIT_EXCEPTION
        )
    except DeadKernelError as error:
        return failed(
            "the kernel died" + (f", {_ended(Kernel.ended)}" if Kernel.ended is not None else ""),
            "",
            "",
            str(error),
            EXIT_KERNEL_DIED,
        )
    except CellTimeoutError as error:
        return failed(
            f"a cell took longer than {spec['cell_timeout_s']:g} s",
            "CellTimeoutError",
            "",
            str(error),
            EXIT_TIMEOUT,
        )
    finally:
        source.unlink(missing_ok=True)
    said = "".join(
        "".join(o.get("text", ""))
        for o in nbformat.read(spec["output"], as_version=4).cells[-1].get("outputs", [])
    )
    if end not in said:
        return failed(
            "it stopped before its end (sys.exit in a cell?)",
            "SystemExit",
            "0",
            "",
            EXIT_STOPPED_EARLY,
        )
    return 0


def _end_with(parent: int) -> None:
    """End this process when its parent has ended: it has its own session, so nothing else ends it.

    The kernel does the same with this process.
    """
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(EXIT_RUNNER)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="the child of `python -m eyas report`: runs one notebook"
    )
    parser.add_argument("spec", type=Path)
    raise SystemExit(_one(parser.parse_args().spec))
