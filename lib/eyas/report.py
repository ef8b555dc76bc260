"""Run the notebooks with a profile's settings and write self-contained pages: `python -m eyas report --profile demo`.

Each notebook runs through papermill in a process of its own (`python -m eyas.report one SPEC`), which starts a kernel of this Python. A kernel or
a runner that is killed, a cell that takes too long and a `sys.exit(0)` halfway all come back as a return code that is not 0: what the cells of
the output say about themselves is not believed. `reports/<run>/run.json` is written from the start and again whenever something changes.
Again from one notebook on: `--from 04`.
"""

import argparse
import ast
import contextlib
import dataclasses
import importlib.metadata
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from eyas import __version__, index, pages, summary
from eyas.config import Config, read_profile
from eyas.errors import EyasError
from eyas.files import ROOT, git_state, read_json, write_json, write_text
from eyas.progress import duration_text

NOTEBOOKS = ROOT / "notebooks"
REPORTS = ROOT / "reports"
CELL_TIMEOUT_S = 4 * 3600.0
LAST_LINES = 15  # of a traceback or a log that run.json keeps
ADDED_TAGS = {"injected-parameters", "papermill-error-cell-tag", "eyas-end"}  # cells that are not the notebook's own
EXIT_EXCEPTION, EXIT_STOPPED_EARLY, EXIT_RUNNER, EXIT_TIMEOUT, EXIT_KERNEL_DIED = 1, 3, 4, 124, 137


def run_report(profile: str, overrides: dict[str, Any] | None = None, notebooks: tuple[str, ...] | None = None, *, reports: Path = REPORTS,
               folder: Path = NOTEBOOKS, cell_timeout_s: float = CELL_TIMEOUT_S) -> Path:
    """Run the notebooks whose names start with one of `notebooks` (those that the profile's `notebooks` names by default), in order, up to the first that fails.

    Gives reports/<run_name>; its run.json holds `state` and `return_code` (0: every notebook ran to its end), the index beside it is rewritten.
    EyasError before anything starts: no such profile or notebook, a setting that Config does not know or that no notebook declares, a missing
    kernelspec, the same run already going on. A notebook that fails is no exception: it is in run.json, on its page and on the index.
    """
    overrides = dict(overrides or {})
    config = Config.load(profile, **overrides)
    available = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    asked = tuple(config.notebooks.split())
    chosen = [p for p in available if p.stem.startswith(asked if notebooks is None else tuple(notebooks))]
    if not chosen:
        raise EyasError(f"no notebook {', '.join(notebooks or asked)} in {folder.name}/", "one of " + ", ".join(p.stem for p in available))
    declared = {p.stem: declared_parameters(p) for p in available}
    given = {**read_profile(profile), **overrides}
    unknown = sorted(set(given) - set().union(*declared.values()) - {"notebooks"})  # which is for this function
    if unknown:
        raise EyasError(f"no notebook declares the setting {', '.join(unknown)}", "a name in some notebook's parameters cell", "python -m eyas profile --explain")
    for path in chosen:
        _check_kernelspec(path)
    out = reports / config.run_name
    earlier = _read_run(out)
    if earlier and is_alive(earlier):
        raise EyasError(f"run {config.run_name!r} is going on (process {earlier['process']['pid']})", "one run of a name at a time", "wait for it, or take another -p run_name")

    command = f"python -m eyas report --profile {profile}" + "".join(f" -p {n} {shlex.quote(str(v))}" for n, v in overrides.items())
    settings = {n: plain(v) for n, v in dataclasses.asdict(config).items()}
    run = {
        "run_name": config.run_name, "state": "running", "return_code": None, "problem": None, "started": now(), "duration_s": None,
        "process": this_process(), "command": command, "profile": profile, "given": {n: settings[n] for n in given}, "settings": settings,
        "git": git_state(), "versions": versions(), "machine": _machine(), "headline": None, "layer_choice": None,
        "notebooks": [_first_record(p, p in chosen, earlier, {n: settings[n] for n in given if n in declared[p.stem]})
                      for p in available if p in chosen or p.stem.startswith(asked)],
    }
    for record in run["notebooks"]:
        if record["state"] == "waiting":
            (out / f"{record['name']}.html").unlink(missing_ok=True)
    work = config.run_dir / "notebooks"
    work.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()

    def save():
        run["duration_s"] = round(time.monotonic() - started_s, 1)
        write_json(out / "run.json", pages.without_machine_paths(run))

    save()
    write_index(reports)
    try:
        with _stop_signals_as_interrupt():
            for path in chosen:
                record = next(r for r in run["notebooks"] if r["name"] == path.stem)
                _run_notebook(path, record, work, out, command, cell_timeout_s, save)
                if record["state"] == "failed":
                    run |= {"state": "failed", "return_code": record["return_code"]}
                    break
            else:
                run |= {"headline": headline(config), "layer_choice": layer_choice(config), "state": "ok", "return_code": 0}
    except KeyboardInterrupt:
        run |= {"state": "interrupted", "return_code": 130, "problem": "It was stopped from outside (interrupt or termination signal)."}
    except Exception as error:
        run |= {"state": "failed", "return_code": EXIT_RUNNER, "problem": f"{type(error).__name__}: {error}"}
        raise
    finally:
        for record in run["notebooks"]:
            if record["state"] in ("waiting", "running"):
                record["state"] = "not run" if record["state"] == "waiting" else "interrupted"
        run["process"] = None
        save()
        write_index(reports)
        _take_server_down(config)
    return out


def declared_parameters(path: Path) -> dict[str, Any]:
    """Names and literal values of the notebook's one cell tagged `parameters`; EyasError when it is not one cell of literals."""
    cells = [c for c in read_json(path)["cells"] if "parameters" in c.get("metadata", {}).get("tags", [])]
    wrong = EyasError(f"{path.name}: the parameters cell", "exactly one cell tagged 'parameters', lines 'name: type = literal  # meaning, unit'")
    if len(cells) != 1:
        raise wrong
    values = {}
    for line in ast.parse("".join(cells[0]["source"])).body:
        if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value is not None):
            raise wrong
        try:
            values[line.target.id] = ast.literal_eval(line.value)
        except ValueError:
            raise wrong from None
    return values


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "eyas": __version__}
    for package in ("torch", "transformers", "sglang"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def headline(config: Config) -> dict | None:
    """The numbers that the index opens with, copied from the run's acceptance folder; None when this run has not measured acceptance."""
    path, walk_path, served_path = (config.acceptance_dir / f"{name}.json" for name in ("acceptance", "walk", "served"))
    if not path.is_file():
        return None
    found = read_json(path)
    counts, identical, again = found["counts"], found["identical_to_greedy"]["float32"], found["identical_to_greedy"]["bfloat16"]

    def block(record: dict, name: str, prompts: int) -> dict:
        return {key: record[name][key] for key in ("value", "low", "high")} | {"prompts": prompts}

    walked, served = (read_json(p) if p.is_file() else None for p in (walk_path, served_path))
    return {
        "target": found["settings"]["target"],
        "boundaries": found["settings"]["boundaries"],
        "data": _data_sentence(config),
        "parity": _parity_sentence(config),
        "acceptance_length": block(found, "acceptance_length", counts["prompts"]),
        "offline_estimate": block(walked, "acceptance_length", walked["counts"]["samples"]) if walked else None,
        "served": served["headline"] | {"dtype": served["settings"]["dtype"], "verdict": served["verdict"]} if served else None,
        "served_speed_ratio": block(served, "speed_ratio", served["speed_prompts"]) if served and served["speed_ratio"] else None,
        "speed_ratio": block(found, "speed_ratio", counts["prompts"]),
        "speed_ratio_bfloat16": block(found, "speed_ratio_bfloat16", again["prompts"]),
        "repeated_bigrams": found["repeated_bigrams"]["value"],
        "repeats_warning": (found.get("repeats") or {}).get("warning"),
        "outside_vocab": found["outside_vocab"]["value"],
        "identical_float32": identical["differing"] == 0,
        "identical_prompts": identical["prompts"] - identical["differing"],
        "decoded_prompts": identical["prompts"],
        "bfloat16": {name: again[name] for name in ("prompts", "differing", "ties", "not_ties")},
    }


def layer_choice(config: Config) -> str | None:
    """What the run's study of layers says in words; None when it has none."""
    path = config.sweep_dir / "study.json"
    return read_json(path)["sentence"] if path.is_file() else None


def _data_sentence(config: Config) -> str:
    from eyas.store import Store

    index = Store.open(config.judged_store_dir).index
    done = index[index["state"] == "extracted"]
    train, heldout = done[done["split"] == "train"], done[done["split"] == "heldout"]
    return (f"{len(train):,} training conversations ({train['length'].sum():,} tokens, {train['loss_tok'].sum():,} supervised) in "
            f"{train['category'].nunique()} categories, {len(heldout):,} of held-out topics")


def _parity_sentence(config: Config) -> str:
    from eyas.certificate import read_certificate, verdict
    from eyas.store import Store

    record = read_certificate(Store.open(config.judged_store_dir))
    return verdict(record) if record else "no certificate of these data"


def write_index(reports: Path = REPORTS) -> Path:
    """reports/index.html and each run's summary.md and summary.html from every run.json under `reports`; links between the pages of a run that has ended.

    A run whose process is gone without a word is shown as killed, one whose run.json cannot be read as that.
    """
    runs = []
    for path in sorted(reports.glob("*/run.json")):
        try:
            run = _read_run(path.parent) | {"run_name": path.parent.name}
            if run["state"] == "running" and not is_alive(run):
                run |= {"state": "died", "problem": "Its process is gone and left no word."}
        except (OSError, ValueError, TypeError, KeyError) as error:
            run = {"run_name": path.parent.name, "state": "unreadable", "problem": f"run.json can't be read ({type(error).__name__}: {error})"}
        runs.append(run)
        if run["state"] != "running":
            _link_pages(path.parent, run)
        _write_changed(path.with_name("summary.md"), summary.markdown(run))
        _write_changed(path.with_name("summary.html"), index.summary_page(run))
    return write_text(reports / "index.html", index.index_page(runs))


def _link_pages(out: Path, run: dict) -> None:
    """The previous and the next notebook at the head of each page that is there."""
    names = [n["name"] for n in run.get("notebooks") or [] if (out / f"{n['name']}.html").is_file()]
    for before, name, after in zip([None, *names], names, [*names[1:], None]):
        path = out / f"{name}.html"
        _write_changed(path, pages.with_links(path.read_text(encoding="utf-8"), before, after))


def _write_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


def _run_notebook(path: Path, record: dict, work: Path, out: Path, command: str, cell_timeout_s: float, save) -> None:
    """One notebook in its own process; the record, the page and run.json say how it went."""
    output = work / f"{path.stem}.ipynb"
    record |= {"state": "running", "started": now(), "git": git_state(), "versions": versions()}
    started_s = time.monotonic()
    save()
    problem = None
    try:
        record["return_code"], problem = execute(path, output, record["parameters"], cell_timeout_s, lambda child: _wait(child, path.stem, output, started_s))
    finally:
        record["duration_s"] = round(time.monotonic() - started_s, 1)
    record["state"] = "failed" if problem else "ok"
    if problem:
        problem["what_to_do"] = _advice(problem, f"{command} --from {path.stem[:2]}", str(output.with_suffix(".log")))
        record["exception"] = pages.without_machine_paths(problem)
    _write_page(path, output, record, out)
    print(f"{path.stem}: {record['state']} after {duration_text(record['duration_s'])}" + (f" ({record['exception']['kind']})" if record["exception"] else ""), flush=True)
    save()


def execute(path: Path, output: Path, parameters: dict, cell_timeout_s: float = CELL_TIMEOUT_S, wait=subprocess.Popen.wait) -> tuple[int, dict | None]:
    """Run a notebook in a process of its own, which `wait(process)` waits for; gives the return code and, where that is not 0, what went wrong.

    Beside `output`, the executed notebook, lie its log and what was asked of it. What went wrong: kind, ename, evalue, lines, and which cell of how many.
    The process ends with this one, and its kernel with it.
    """
    log, spec, result = (output.with_suffix(f".{suffix}") for suffix in ("log", "spec.json", "result.json"))
    for leftover in (output, result):
        leftover.unlink(missing_ok=True)
    write_json(spec, {"parent": os.getpid(), "notebook": str(path), "output": str(output), "result": str(result), "parameters": parameters, "cell_timeout_s": cell_timeout_s})
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "lib"), os.environ.get("PYTHONPATH"))))}
    environment.pop("MPLBACKEND", None)  # Agg would give a report without figures and without an error
    # widgets are not installed on purpose: they do not show in a saved page
    environment["PYTHONWARNINGS"] = ",".join(filter(None, (environment.get("PYTHONWARNINGS"), "ignore:IProgress not found")))
    with open(log, "wb") as log_file:
        child = subprocess.Popen([sys.executable, "-m", "eyas.report", "one", str(spec)], stdin=subprocess.DEVNULL, stdout=log_file,
                                 stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        wait(child)
    finally:
        _stop(child)
    if child.returncode == 0:
        return 0, None
    problem = read_json(result) if result.is_file() else _runner_killed(child.returncode, log)
    place = _last_started_cell(output)
    return child.returncode, problem | {name: place[name] for name in ("cell", "cells", "source")}


def _wait(child: subprocess.Popen, name: str, output: Path, started_s: float) -> None:
    """Until the child ends, saying now and then where it is: often in a terminal, once a minute in a log."""
    terminal = sys.stdout.isatty()
    every_s = 2.0 if terminal else 60.0
    shown_s, width = time.monotonic(), 0
    print(f"{name}: started", flush=True)
    while True:
        try:
            child.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            if time.monotonic() - shown_s < every_s:
                continue
            shown_s = time.monotonic()
            place = _last_started_cell(output)
            text = f"{name}: cell {place['cell'] or '?'} of {place['cells'] or '?'}, {duration_text(shown_s - started_s)}  {place['said']}"[:150]
            print(f"\r{text.ljust(width)}" if terminal else text, end="" if terminal else "\n", flush=True)
            width = len(text)
        else:
            if width and terminal:
                print(f"\r{' ' * width}\r", end="", flush=True)
            return


def _stop(child: subprocess.Popen) -> None:
    """End the child (its kernel ends by itself when its parent is gone); nothing to do after a normal end."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            return
        os.killpg(child.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=10)


def _last_started_cell(output: Path) -> dict:
    """Which cell ran last, from the times that papermill writes when a cell starts (not from its status, which says 'completed' after a kill)."""
    place = {"cell": None, "cells": None, "source": "", "said": ""}
    try:
        cells = [c for c in read_json(output)["cells"] if not ADDED_TAGS & set(c["metadata"].get("tags", []))]
    except (OSError, ValueError):  # not there yet, or just being written
        return place
    for number, cell in enumerate(cells, 1):
        if cell["cell_type"] == "code" and cell["metadata"].get("papermill", {}).get("start_time"):
            lines = [line for line in "".join(cell["source"]).splitlines() if line.strip()]
            # a line of text alone: figures and tables have a text/plain too, which says nothing
            said = [out["data"]["text/plain"] if "data" in out else out["text"] for out in cell["outputs"] if set(out.get("data", {})) == {"text/plain"} or "text" in out]
            place |= {"cell": number, "source": (lines or [""])[0][:120], "said": "".join(said[-1] if said else "").strip().split("\n")[-1]}
    place["cells"] = len(cells)
    return place


def _runner_killed(return_code: int, log: Path) -> dict:
    killed = f"by signal {-return_code} ({signal.Signals(-return_code).name})" if return_code < 0 else f"with code {return_code}"
    return {"kind": f"the process that ran it ended {killed}", "ename": "", "evalue": "", "lines": log.read_text(errors="replace").splitlines()[-LAST_LINES:]}


def _advice(problem: dict, again: str, log: str) -> str:
    if problem["kind"] == "exception" and problem["ename"] == "EyasError":
        return f"what the message says; then `{again}`"
    if problem["kind"] == "exception":
        return f"read the traceback on the notebook's page; then `{again}`"
    if problem["kind"].startswith("the kernel died"):
        return f"most often memory has run out: close other programs or take a smaller batch_tok, concurrency or max_total_tok; then `{again}`. The kernel's own words: {log}"
    if problem["kind"].startswith("a cell took"):
        return f"see why it is slow, or allow more: `{again} --cell-timeout-s SECONDS`"
    if problem["kind"].startswith("it stopped before its end"):
        return f"remove the exit from that cell: what comes after it has not run; then `{again}`"
    return f"see {log}; then `{again}`"


def _write_page(path: Path, output: Path, record: dict, out: Path) -> None:
    import nbformat

    notebook = nbformat.read(output if output.is_file() else path, as_version=4)
    notebook.cells = [c for c in notebook.cells if not {"eyas-end", "papermill-error-cell-tag"} & set(c.metadata.get("tags", []))]  # the banner says it
    notebook = nbformat.from_dict(pages.without_machine_paths(notebook))
    title = re.search(r"^# (.+)$", "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown"), re.M)
    record["title"] = title.group(1) if title else path.stem
    facts = f"{path.stem}, {record['state']}, {record['started'][:16].replace('T', ' ')} UTC, {duration_text(record['duration_s'])}"
    html = pages.notebook_page(notebook, record["title"], facts, pages.failure_banner(record))
    write_text(out / f"{path.stem}.html", html)
    record["page"] = f"{path.stem}.html"


def _first_record(path: Path, chosen: bool, earlier: dict | None, parameters: dict) -> dict:
    """A waiting notebook; one that this run leaves out keeps the record of the run before, which says when that was."""
    if not chosen:
        before = next((r for r in earlier["notebooks"] if r["name"] == path.stem), None) if earlier else None
        if before and before["started"]:
            return before | {"earlier": True}
    return {"name": path.stem, "title": None, "state": "waiting" if chosen else "not run", "return_code": None, "exception": None, "parameters": parameters,
            "started": None, "duration_s": None, "git": None, "versions": None, "page": None}


def _take_server_down(config: Config) -> None:
    """Whatever way the run ended: its own server does not outlive it (a server_url of the profile is somebody else's)."""
    from eyas.serve import find_server

    server = find_server(config)
    if server is not None:
        server.down()


@contextlib.contextmanager
def _stop_signals_as_interrupt() -> Iterator[None]:
    """A termination signal ends the run as Ctrl-C does: notebook and server stopped, run.json written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_kernelspec(path: Path) -> None:
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    name = read_json(path)["metadata"].get("kernelspec", {}).get("name")
    fix = "python -m ipykernel install --sys-prefix --name python3"
    if not name:
        raise EyasError(f"{path.name} names no kernelspec", "python3", f"save it from JupyterLab, or: {fix}")
    try:
        program = KernelSpecManager().get_kernel_spec(name).argv[0]
    except NoSuchKernel:
        raise EyasError(f"{path.name} wants the kernelspec {name!r}, which is not installed", "python3 of this Python", fix) from None
    if re.fullmatch(r"python(3(\.\d+)?)?", program):  # replaced by the Python that asks
        return
    if os.path.abspath(program) != os.path.abspath(sys.executable) and not Path(program).absolute().is_relative_to(sys.prefix):
        raise EyasError(f"the kernelspec {name!r} starts another Python ({program})", f"this one ({sys.executable})", fix)


def this_process(pid: int | None = None) -> dict:
    """This process, or that one, so that `is_alive` knows it again."""
    process = psutil.Process(pid)
    return {"pid": process.pid, "created": process.create_time()}


def is_alive(run: dict) -> bool:
    """Whether the process that wrote this run.json is still at it (a pid alone may be another process by now)."""
    process = run.get("process")
    try:
        found = psutil.Process(process["pid"]) if process else None
        return found is not None and abs(found.create_time() - process["created"]) < 1.0 and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _read_run(folder: Path) -> dict | None:
    path = folder / "run.json"
    return read_json(path) if path.is_file() else None


def _machine() -> dict:
    import torch

    return {"cores": len(os.sched_getaffinity(0)), "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None}


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value  # papermill makes a string of a tuple


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _one(spec_path: Path) -> int:
    """Inside the child: run one notebook. What went wrong goes into the result file; the return code is the truth."""
    import nbformat
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    spec = read_json(spec_path)
    threading.Thread(target=_end_with, args=(spec["parent"],), daemon=True).start()
    notebook = nbformat.read(spec["notebook"], as_version=4)
    end = f"eyas-end-{os.urandom(16).hex()}"  # only a notebook that has run to its end prints it
    notebook.cells.append(nbformat.v4.new_code_cell(f"print({end!r})", metadata={"tags": ["eyas-end"]}))
    source = Path(spec["output"]).with_suffix(".source.ipynb")
    nbformat.write(notebook, source)

    def failed(kind: str, ename: str, evalue: str, text: str, code: int) -> int:
        lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()[-LAST_LINES:]
        write_json(Path(spec["result"]), {"kind": kind, "ename": ename, "evalue": evalue, "lines": lines})
        return code

    try:
        papermill.execute_notebook(str(source), spec["output"], parameters=spec["parameters"], cwd=str(ROOT), progress_bar=False, autosave_cell_every=5,
                                   execution_timeout=spec["cell_timeout_s"], start_timeout=180)
    except papermill.PapermillExecutionError as error:
        return failed("exception", error.ename, error.evalue, "\n".join(error.traceback), EXIT_EXCEPTION)
    except DeadKernelError as error:
        return failed("the kernel died (killed, or crashed)", "DeadKernelError", str(error), str(error), EXIT_KERNEL_DIED)
    except CellTimeoutError as error:
        return failed(f"a cell took longer than {spec['cell_timeout_s']:g} s", "CellTimeoutError", "", str(error), EXIT_TIMEOUT)
    finally:
        source.unlink(missing_ok=True)
    said = "".join("".join(o.get("text", "")) for o in nbformat.read(spec["output"], as_version=4).cells[-1].get("outputs", []))
    if end not in said:
        return failed("it stopped before its end (sys.exit in a cell?)", "SystemExit", "0", "", EXIT_STOPPED_EARLY)
    return 0


def _end_with(parent: int) -> None:
    """The child has its own session, so a killed parent must be noticed; the kernel does the same with this process."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(EXIT_RUNNER)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="the child of `python -m eyas report`: runs one notebook")
    parser.add_argument("what", choices=["one"])
    parser.add_argument("spec", type=Path)
    raise SystemExit(_one(parser.parse_args().spec))
