"""Run the notebooks with a profile's settings and write self-contained pages.

    python -m eyas report --profile demo             # what is not up to date
    python -m eyas report --profile demo --all       # all of it again
    python -m eyas report --profile demo --from 04   # from one notebook on

- A notebook that is up to date (`eyas.report.reuse`) does not run. Its page is written again from
  the executed notebook of its last run.
- The others run one after the other, each in a process of its own (`eyas.report.notebook`), up to
  the first one that fails.
- `reports/<run>/run.json` exists from the start and is written again whenever something changes.
  An old page stays until the new one exists.
- After Ctrl-C, a termination signal, a closed terminal or a kill, the same command resumes the run.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import importlib.metadata
import os
import re
import shlex
import shutil
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

from eyas import __version__, processes
from eyas.config import Config, flatten, read_profile
from eyas.errors import EyasError
from eyas.files import ROOT, git_state, read_json, write_json, write_text
from eyas.progress import duration_text
from eyas.report import index, pages, summary
from eyas.report.notebook import (
    CELL_TIMEOUT_S,
    EXIT_RUNNER,
    advice,
    execute,
    place,
)
from eyas.report.parameters import injected_parameters, plain, resolved_settings, settings_read
from eyas.report.reuse import Work, in_words

NOTEBOOKS = ROOT / "notebooks"
REPORTS = ROOT / "reports"
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TERMINAL_S = 2.0  # seconds between two progress lines in a terminal
LOG_S = 60.0  # and in a log


def run_report(
    profile: str,
    overrides: dict[str, Any] | None = None,
    notebooks: tuple[str, ...] | None = None,
    *,
    reports: Path = REPORTS,
    folder: Path = NOTEBOOKS,
    cell_timeout_s: float = CELL_TIMEOUT_S,
    again: bool = False,
) -> Path:
    """Bring notebooks up to date, in order, up to the first that fails; return reports/<run_name>.

    `notebooks` holds the beginnings of their names; by default the profile's `notebooks` names
    them. `again` runs all of them, up to date or not. The run.json in the returned folder holds
    `state` and `return_code` (0: every notebook is up to date now). The index beside it is written
    again. A notebook that fails raises nothing: run.json, its page and the index say so.

    EyasError, before anything starts: no such profile or notebook, an unknown setting or one that
    no notebook reads, a missing kernelspec, or the same run is already running.
    """
    overrides = flatten(overrides or {})
    config = Config.load(profile, **overrides)
    available = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    asked = tuple(config.notebooks.split())
    chosen = [
        p for p in available if p.stem.startswith(asked if notebooks is None else tuple(notebooks))
    ]
    if not chosen:
        raise EyasError(
            f"no notebook {', '.join(notebooks or asked)} in {folder.name}/",
            "one of " + ", ".join(p.stem for p in available),
        )
    reads = {p.stem: settings_read(p) for p in available}
    profile_values = read_profile(profile)
    given = {**profile_values, **overrides}
    unread = sorted(set(given) - set().union(*reads.values()) - {"notebooks"})  # read above
    if unread:
        raise EyasError(
            f"no notebook reads the setting {', '.join(unread)}",
            "a setting that some notebook reads",
            "python -m eyas settings",
        )
    for path in chosen:
        _check_kernelspec(path)
    out, work = reports / config.run_name, config.run_dir / "notebooks"
    earlier = _read_run(out)
    if earlier and is_alive(earlier):
        raise _going_on(config, earlier["process"]["pid"])

    command = f"python -m eyas report --profile {profile}" + "".join(
        f" -p {n} {shlex.quote(str(v))}" for n, v in overrides.items()
    )
    settings = {n: plain(v) for n, v in dataclasses.asdict(config).items()}
    run = {
        "run_name": config.run_name,
        "state": "running",
        "return_code": None,
        "problem": None,
        "started": now(),
        "duration_s": None,
        "process": this_process(),
        "command": command,
        "profile": profile,
        "given": {n: settings[n] for n in given},
        "settings": settings,
        "git": git_state(),
        "versions": versions(),
        "machine": _machine(),
        "headline": None,
        "layer_choice": None,
        "notebooks": [
            _first_record(
                p,
                p in chosen,
                earlier,
                {n: settings[n] for n in given if n in reads[p.stem]},
                out,
            )
            for p in available
            if p in chosen or p.stem.startswith(asked)
        ],
    }
    records = {record["name"]: record for record in run["notebooks"]}
    works = [
        Work(
            p,
            resolved_settings(p, profile_values, overrides),
            work,
            injected_parameters(p, profile, records[p.stem]["parameters"], set(overrides)),
        )
        for p in chosen
    ]
    started_s = time.monotonic()

    def save():
        run["duration_s"] = round(time.monotonic() - started_s, 1)
        write_json(out / "run.json", pages.without_machine_paths(run))

    with _only_one(config, work), _stop_signals_as_interrupt():
        try:
            save()
            _update_index(reports)
            _take_server_down(config)  # a killed run may have left one
            course = Course(works, again, earlier)
            with _nothing_outlives():
                for one in works:
                    _bring_up_to_date(
                        one,
                        records[one.path.stem],
                        out,
                        command,
                        cell_timeout_s,
                        again,
                        course,
                        save,
                    )
                    if records[one.path.stem]["state"] == "failed":
                        run |= {
                            "state": "failed",
                            "return_code": records[one.path.stem]["return_code"],
                        }
                        break
                else:
                    run |= {
                        "headline": headline(config),
                        "layer_choice": layer_choice(config),
                        "state": "ok",
                        "return_code": 0,
                    }
        except KeyboardInterrupt:
            run |= {
                "state": "interrupted",
                "return_code": 130,
                "problem": "It was stopped from outside (interrupt or termination signal).",
            }
        except Exception as error:
            run |= {
                "state": "failed",
                "return_code": EXIT_RUNNER,
                "problem": f"{type(error).__name__}: {error}",
            }
            raise
        finally:
            for record in run["notebooks"]:
                if record["state"] in ("waiting", "running"):
                    record["state"] = "not run" if record["state"] == "waiting" else "interrupted"
            run["process"] = None
            save()
            _update_index(reports)
            _take_server_down(config)
    return out


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "eyas": __version__}
    for package in ("torch", "transformers", "sglang"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def headline(config: Config) -> dict | None:
    """Return the numbers that the index opens with, from the run's acceptance folder.

    None when this run has not measured acceptance.
    """
    from eyas.evaluation.served_throughput import read_throughput
    from eyas.evaluation.warnings import warnings_of

    path, walk_path, served_path = (
        config.acceptance_dir / f"{name}.json" for name in ("acceptance", "walk", "served")
    )
    if not path.is_file():
        return None
    found = read_json(path)
    counts, identical, again = (
        found["counts"],
        found["identical_to_greedy"]["float32"],
        found["identical_to_greedy"]["bfloat16"],
    )

    def block(record: dict, name: str, prompts: int) -> dict:
        return {key: record[name][key] for key in ("value", "low", "high")} | {"prompts": prompts}

    walked, served = (read_json(p) if p.is_file() else None for p in (walk_path, served_path))
    refused = (served or {}).get("not_served")
    served = None if refused else served
    throughput, _ = read_throughput(config)
    return {
        "target": found["settings"]["target"],
        "boundaries": found["settings"]["boundaries"],
        "data": _data_sentence(config),
        "parity": _parity_sentence(config),
        "acceptance_length": block(found, "acceptance_length", counts["prompts"]),
        "prompt_lookup": block(found["prompt_lookup"], "acceptance_length", counts["prompts"])
        if found.get("prompt_lookup")
        else None,
        "offline_estimate": block(walked, "acceptance_length", walked["counts"]["samples"])
        if walked
        else None,
        "served": served["headline"]
        | {"dtype": served["settings"]["dtype"], "verdict": served["verdict"]}
        if served
        else None,
        "not_served": refused["reason"] if refused else None,
        "served_speed_ratio": block(served, "speed_ratio", served["speed_prompts"])
        | {"dtype": served["settings"]["dtype"]}
        if served and served["speed_ratio"]
        else None,
        "served_throughput": _throughput_block(throughput) if throughput else None,
        "speed_ratio": block(found, "speed_ratio", counts["prompts"]),
        "speed_ratio_bfloat16": block(
            found,
            "speed_ratio_bfloat16",
            found["speed_ratio_bfloat16"].get("prompts", again["prompts"]),
        ),
        "repeated_bigrams": found["repeated_bigrams"]["value"],
        "repeats_warning": "; ".join(warnings_of(found)) or None,
        "outside_vocab": found["outside_vocab"]["value"],
        "identical_float32": identical["differing"] == 0
        if identical["prompts"]
        else None,  # drawn texts are compared with nothing
        "identical_prompts": identical["prompts"] - identical["differing"],
        "decoded_prompts": counts["prompts"],
        "bfloat16": {name: again[name] for name in ("prompts", "differing", "ties", "not_ties")},
    }


def _throughput_block(record: dict) -> dict:
    """Return throughput.json as the headline holds it.

    The ratio is that at the fewest requests at a time; all ratios are in "at".
    """
    at = [
        {name: row["ratio"][name] for name in ("value", "low", "high")}
        | {"parallel": row["parallel"]}
        for row in sorted(record["ratios"], key=lambda row: row["parallel"])
    ]
    return at[0] | {
        "prompts": record["prompts"],
        "rounds": record["ratios"][0]["rounds"],
        "dtype": record["settings"]["dtype"],
        "at": at,
    }


def layer_choice(config: Config) -> str | None:
    """Return what the run's study of layers says in words; None without a study."""
    path = config.sweep_dir / "study.json"
    return read_json(path)["sentence"] if path.is_file() else None


def _data_sentence(config: Config) -> str:
    from eyas.store.reader import Store

    index = Store.open(config.judged_store_dir).index
    done = index[index["state"] == "extracted"]
    train, heldout = done[done["split"] == "train"], done[done["split"] == "heldout"]
    return (
        f"{len(train):,} training conversations ({train['length'].sum():,} tokens, "
        f"{train['loss_tok'].sum():,} supervised) in {train['category'].nunique()} categories, "
        f"{len(heldout):,} of held-out topics"
    )


def _parity_sentence(config: Config) -> str:
    from eyas.store.certificate import read_certificate, verdict
    from eyas.store.reader import Store

    record = read_certificate(Store.open(config.judged_store_dir))
    return verdict(record) if record else "no certificate of these data"


def write_index(reports: Path = REPORTS) -> Path:
    """Write reports/index.html, and summary.md and summary.html of each run under `reports`.

    The pages of a run that has ended get links to each other. A run is shown as killed where its
    process is gone without a word, and as unreadable where its run.json cannot be read.
    """
    runs = {path.parent: _seen(path.parent) for path in sorted(reports.glob("*/run.json"))}
    for folder, run in runs.items():
        if run["state"] != "running":
            _link_pages(folder, run)
        _write_changed(folder / "summary.md", summary.markdown(run))
        _write_changed(folder / "summary.html", index.summary_page(run))
    return write_text(reports / "index.html", index.index_page(list(runs.values())))


def read_report(run_name: str, reports: Path = REPORTS) -> dict:
    """Return a run.json as the index shows it. EyasError: there is no report of that name."""
    if not (reports / run_name / "run.json").is_file():
        there = sorted(path.parent.name for path in reports.glob("*/run.json"))
        raise EyasError(
            f"no report {run_name!r} in {reports.name}/",
            f"one of {', '.join(there)}" if there else "at least one",
            "python -m eyas report --profile demo",
        )
    return _seen(reports / run_name)


def _seen(folder: Path) -> dict:
    try:
        run = _read_run(folder) | {"run_name": folder.name}
        if run["state"] == "running" and not is_alive(run):
            run |= {"state": "died", "problem": "Its process is gone and left no word."}
        return run
    except (OSError, ValueError, TypeError, KeyError) as error:
        return {
            "run_name": folder.name,
            "state": "unreadable",
            "problem": f"run.json can't be read ({type(error).__name__}: {error})",
            "command": "",
        }


def _link_pages(out: Path, run: dict) -> None:
    """Write links to the previous and the next notebook at the head of each page."""
    names = [n["name"] for n in run.get("notebooks") or [] if (out / f"{n['name']}.html").is_file()]
    for before, name, after in zip([None, *names], names, [*names[1:], None]):
        path = out / f"{name}.html"
        _write_changed(path, pages.with_links(path.read_text(encoding="utf-8"), before, after))


def _write_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


def _bring_up_to_date(
    work: Work,
    record: dict,
    out: Path,
    command: str,
    cell_timeout_s: float,
    again: bool,
    course: "Course",
    save,
) -> None:
    """Run a notebook that is not up to date; write its page, and how it went into its record.

    `record` is the notebook's part of run.json, which `save()` writes. A notebook that is up to
    date gets the record and a page of its last run.
    """
    name = work.path.stem
    reasons = ["it was asked for"] if again else work.reasons()
    if not reasons:
        record |= work.made["record"] | {"reused": True, "earlier": True}
        _write_page(work.path, work.output, record, out)
        say(f"{name}: up to date, from the run of {record['started'][:16].replace('T', ' ')} UTC")
        save()
        return
    say(f"{name}: runs, because {in_words(reasons)}")
    started_s = time.monotonic()
    record |= {"state": "running", "started": now(), "git": git_state(), "versions": versions()}
    save()
    problem = None
    try:
        made_from = work.begin()
        record["return_code"], problem = execute(
            work.path,
            work.output,
            work.injected,
            cell_timeout_s,
            lambda child: _wait(child, name, work.output, course),
            {"EYAS_SERVER_OWNER": _owner()},
        )
    finally:
        record["duration_s"] = round(time.monotonic() - started_s, 1)
    record["cells_s"] = [seconds and round(seconds, 1) for seconds in place(work.output)["seconds"]]
    course.ended(name, record["cells_s"])
    record["state"] = "failed" if problem else "ok"
    if problem:
        problem["what_to_do"] = advice(
            problem, command, str(work.output.with_suffix(".log")), work.parameters
        )
        record["exception"] = pages.without_machine_paths(problem)
    _write_page(work.path, work.output, record, out)
    if not problem:
        work.end(made_from, {n: record[n] for n in record if n not in ("reused", "earlier")})
    say(
        f"{name}: {record['state']} after {duration_text(record['duration_s'])}"
        + (f" ({record['exception']['kind']})" if record["exception"] else "")
    )
    save()


class Course:
    """Estimate how long the rest of a run takes.

    From the cells of the run before where there was one, else from the minutes that the notebook's
    metadata name.
    """

    def __init__(self, works: list[Work], again: bool, earlier: dict | None):
        before = {record["name"]: record for record in earlier["notebooks"]} if earlier else {}
        # Expected seconds of each notebook that will run, by cell; a single number is for all cells
        self.seconds: dict[str, list[float]] = {}
        self.done_s = 0.0  # of the finished cells of this run
        self.meant_s = 0.0  # of the same cells, as expected
        changed = set()  # what earlier notebooks of this run will write
        for work in works:
            if again or changed & set(work.reads) or work.reasons():
                changed |= set(work.writes)
                record = (work.made or {}).get("record") or before.get(work.path.stem) or {}
                cells = record.get("cells_s") if record.get("state") == "ok" else None
                self.seconds[work.path.stem] = (
                    [seconds or 0.0 for seconds in cells]
                    if cells
                    else [60.0 * work.minutes]
                    if work.minutes
                    else []
                )

    def left_s(
        self, name: str, seconds: list[float | None], cell_s: float, since_s: float
    ) -> float | None:
        """Return the seconds until the run ends; None where nothing is known of this notebook.

        `seconds` holds the duration of each cell of notebook `name`, None where it has not ended.
        The current cell has run for `cell_s`, the notebook for `since_s`.
        """
        meant = self.seconds.get(name)
        if not meant:
            return None
        later = sum(sum(s) for other, s in self.seconds.items() if other > name)
        ran = seconds[: max((i + 1 for i, s in enumerate(seconds) if s is not None), default=0)]
        if len(meant) != len(seconds):  # all of it as one cell
            meant, ran, cell_s = [sum(meant)], [], since_s
        done_s = self.done_s + sum(s or 0.0 for s in ran)
        meant_s = self.meant_s + sum(meant[: len(ran)])
        pace = 1.0  # seconds of this run per expected second
        if min(done_s, meant_s) > 10:
            pace = done_s / meant_s
        current_s = sum(meant[len(ran) : len(ran) + 1])
        following_s = sum(meant[len(ran) + 1 :]) + later
        return max(0.0, pace * current_s - cell_s) + pace * following_s

    def ended(self, name: str, seconds: list[float | None]) -> None:
        if meant := self.seconds.pop(name, []):
            self.done_s, self.meant_s = (
                self.done_s + sum(s or 0.0 for s in seconds),
                self.meant_s + sum(meant),
            )


def _wait(child: subprocess.Popen, name: str, output: Path, course: Course) -> None:
    """Wait for the child and print its progress.

    In a terminal it is one line that changes, in a log a line a minute.
    """
    terminal = sys.stdout.isatty()
    started_s = shown_s = cell_started_s = time.monotonic()
    cell, width = None, 0
    while True:
        try:
            child.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            now_s = time.monotonic()
            if now_s - shown_s < (TERMINAL_S if terminal else LOG_S):
                continue
            at, shown_s = place(output), now_s
            if at["cell"] != cell:
                cell, cell_started_s = at["cell"], now_s
            left_s = course.left_s(name, at["seconds"], now_s - cell_started_s, now_s - started_s)
            left = f", about {duration_text(left_s)} left of all" if left_s is not None else ""
            text = (
                f"{name}: cell {at['cell'] or '?'} of {at['cells'] or '?'}, "
                f"{duration_text(now_s - started_s)}{left}  {at['said']}"
            )
            text = text[: shutil.get_terminal_size().columns - 1 if terminal else 150]
            say(f"\r{text.ljust(width)}" if terminal else text, end="" if terminal else "\n")
            width = len(text)
        else:
            if width and terminal:
                say(f"\r{' ' * width}\r", end="")
            return


def say(text: str, end: str = "\n") -> None:
    with contextlib.suppress(OSError):  # the terminal is closed
        print(text, end=end, flush=True)


def _write_page(path: Path, output: Path, record: dict, out: Path) -> None:
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    if output.is_file():
        executed = nbformat.read(output, as_version=4)
        executed.cells = [
            c
            for c in executed.cells
            if not {"eyas-end", "papermill-error-cell-tag"} & set(c.metadata.get("tags", []))
        ]  # the banner says it
        notebook = _in_new_words(executed, notebook) if record.get("reused") else executed
    notebook = nbformat.from_dict(pages.without_machine_paths(notebook))
    title = re.search(
        r"^# (.+)$", "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown"), re.M
    )
    record["title"] = title.group(1) if title else path.stem
    facts = (
        f"{path.stem}, {record['state']}, {record['started'][:16].replace('T', ' ')} UTC, "
        f"{duration_text(record['duration_s'])}"
    )
    html = pages.notebook_page(notebook, record["title"], facts, pages.failure_banner(record))
    write_text(out / f"{path.stem}.html", html)
    record["page"] = f"{path.stem}.html"


def _in_new_words(executed, notebook):
    """Return the notebook as it is now with the outputs of `executed`.

    The code of an up-to-date notebook is that which was executed. Its prose, captions and comments
    may be newer.
    """
    injected = [c for c in executed.cells if "injected-parameters" in c.metadata.get("tags", [])]
    ran = [c for c in executed.cells if c.cell_type == "code" and c not in injected]
    code = [c for c in notebook.cells if c.cell_type == "code"]
    for cell, before in zip(code, ran, strict=True):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count
    at = next(i for i, c in enumerate(notebook.cells) if "parameters" in c.metadata.get("tags", []))
    notebook.cells[at + 1 : at + 1] = injected
    return notebook


def _first_record(
    path: Path, chosen: bool, earlier: dict | None, parameters: dict, out: Path
) -> dict:
    """Return the record of a notebook that waits, or that this run leaves out.

    A notebook that is left out keeps its record of the run before, marked as earlier. An old page
    stays until the new one exists.
    """
    if not chosen:
        before = (
            next((r for r in earlier["notebooks"] if r["name"] == path.stem), None)
            if earlier
            else None
        )
        if before and before["started"]:
            return before | {"earlier": True}
    page = f"{path.stem}.html"
    return {
        "name": path.stem,
        "title": None,
        "state": "waiting" if chosen else "not run",
        "return_code": None,
        "exception": None,
        "parameters": parameters,
        "started": None,
        "duration_s": None,
        "git": None,
        "versions": None,
        "page": page if (out / page).is_file() else None,
    }


def _going_on(config: Config, pid: int | str) -> EyasError:
    return EyasError(
        f"run {config.run_name!r} is going on (process {pid})",
        "one run of a name at a time",
        "wait for it, or take another -p run_name",
    )


@contextlib.contextmanager
def _only_one(config: Config, work: Path) -> Iterator[None]:
    """Hold the lock of a run: two reports of it would write the same executed notebooks.

    The lock ends with its process.
    """
    work.mkdir(parents=True, exist_ok=True)
    with open(work / ".lock", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise _going_on(config, lock.read()) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _update_index(reports: Path) -> None:
    """Write the index under a lock: of two runs that end together, the later one sees both."""
    reports.mkdir(parents=True, exist_ok=True)
    folder = os.open(reports, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        write_index(reports)
    finally:
        os.close(folder)


def _owner() -> str:
    return f"report {os.getpid()}"


def _take_server_down(config: Config) -> None:
    """Stop the server that a notebook of a report left up.

    A server that was started by hand stays up, and so does that of `server_url`.
    """
    from eyas.server.serve import find_server

    server = find_server(config)
    if server is not None and server.owner.startswith(
        "report "
    ):  # of this run or one before: there is one at a time
        server.down()


@contextlib.contextmanager
def _nothing_outlives() -> Iterator[None]:
    """End everything that the notebooks started with the run: kernels, servers and jobs.

    At the end of the block at once; within seconds when this process is killed (`eyas.processes`).
    """
    before = set(psutil.Process().children(recursive=True))
    adopt = ctypes.CDLL(None).prctl
    # PR_SET_CHILD_SUBREAPER: a process that a kernel leaves behind becomes a child of this process
    adopt(36, 1)
    watcher = processes.watch()
    try:
        yield
    finally:
        left = [
            p
            for p in psutil.Process().children(recursive=True)
            if p not in before and p.pid != watcher.pid
        ]
        for stop in (psutil.Process.terminate, psutil.Process.kill):
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    stop(process)
            left = processes.still_running(left, 20.0)
        watcher.kill()
        watcher.wait()
        adopt(36, 0)


@contextlib.contextmanager
def _stop_signals_as_interrupt() -> Iterator[None]:
    """Let a termination signal and a closed terminal end the run as Ctrl-C does.

    Notebook and server are stopped and run.json is written. After the first signal the others are
    ignored, since the end is short and has to come.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {sign: signal.getsignal(sign) for sign in STOPS}
    # nohup, for one, has a signal ignored: it stays so
    before = {sign: h for sign, h in handlers.items() if h != signal.SIG_IGN}

    def interrupt(*_):
        for sign in before:
            signal.signal(sign, signal.SIG_IGN)
        raise KeyboardInterrupt

    for sign in before:
        signal.signal(sign, interrupt)
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def _check_kernelspec(path: Path) -> None:
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    name = read_json(path)["metadata"].get("kernelspec", {}).get("name")
    fix = "python -m ipykernel install --sys-prefix --name python3"
    if not name:
        raise EyasError(
            f"{path.name} names no kernelspec", "python3", f"save it from JupyterLab, or: {fix}"
        )
    try:
        program = KernelSpecManager().get_kernel_spec(name).argv[0]
    except NoSuchKernel:
        raise EyasError(
            f"{path.name} wants the kernelspec {name!r}, which is not installed",
            "python3 of this Python",
            fix,
        ) from None
    if re.fullmatch(r"python(3(\.\d+)?)?", program):  # replaced by the Python that asks
        return
    if os.path.abspath(program) != os.path.abspath(sys.executable) and not Path(
        program
    ).absolute().is_relative_to(sys.prefix):
        raise EyasError(
            f"the kernelspec {name!r} starts another Python ({program})",
            f"this one ({sys.executable})",
            fix,
        )


def this_process(pid: int | None = None) -> dict:
    """Return what `is_alive` needs to recognise this process, or that of the pid."""
    process = psutil.Process(pid)
    return {"pid": process.pid, "created": process.create_time()}


def is_alive(run: dict) -> bool:
    """Return whether the process that wrote this run.json still runs.

    The pid alone may belong to another process by now.
    """
    process = run.get("process")
    try:
        found = psutil.Process(process["pid"]) if process else None
        return (
            found is not None
            and abs(found.create_time() - process["created"]) < 1.0
            and found.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.NoSuchProcess:
        return False


def _read_run(folder: Path) -> dict | None:
    path = folder / "run.json"
    return read_json(path) if path.is_file() else None


def _machine() -> dict:
    import torch

    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
