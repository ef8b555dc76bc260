"""Long jobs that outlive the notebook that starts them.

    follow(start(config, "train"))        # in a cell: train in a process of its own, and watch it

A job is `python -m eyas COMMAND` with the notebook's settings, in a session of its own. It
continues when the browser tab closes, the kernel dies or the cell is interrupted. The same cell (or
command) finds it again and shows its progress. A run has one job of each command at a time; `start`
returns the one that is running. By hand: `python -m eyas job start|list|follow|stop`.

Files in jobs/COMMAND of the run's folder, each whole or absent:
  job.json        command, process (pid and start ticks), when it was started
  settings.yaml   the settings that are not the defaults: a profile
  progress.json   the bars that the job shows (`eyas.progress`)
  log             what it printed
  end.json        written by the job at its end: the return code, and the error if there was one.
                  A job without a process and without this file was killed
"""

import contextlib
import fcntl
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
import yaml

from eyas import progress
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import data_dir, read_json, write_json, write_text
from eyas.processes import still_running
from eyas.server.serve import log_tail, shown, started_ticks

COMMANDS = ("extract", "train", "study layers")
POLL_S = 0.4
INTERRUPTED = 130


@dataclass(frozen=True)
class Job:
    """One job of a run, running or ended."""

    folder: Path

    @property
    def command(self) -> str:
        return self.folder.name.replace("-", " ")

    @property
    def run_name(self) -> str:
        return self.folder.relative_to(data_dir() / "runs").parts[0]

    @property
    def record(self) -> dict:
        return read_json(self.folder / "job.json")

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def __str__(self) -> str:
        return f"{self.command} of run {self.run_name!r}"

    def process(self) -> psutil.Process | None:
        """Return the running process, or None when it has ended.

        The start ticks are compared too: the pid alone may be that of another process by now.
        """
        return _alive(self.record)

    def end(self) -> dict | None:
        """Return what the job wrote at its end; None while it runs, and when it was killed."""
        path = self.folder / "end.json"
        return read_json(path) if path.is_file() else None

    @property
    def state(self) -> str:
        """Return running, done, failed, stopped or killed."""
        if self.process() is not None:
            return "running"
        end = self.end()  # read after the process is seen to have ended: it writes this last
        return end["state"] if end else "killed"

    def bars(self) -> list[dict]:
        return progress.read_bars(self.folder)

    def where(self) -> str:
        """Return the job's progress, or its last one, in one line."""
        bars = self.bars()
        return bars[-1]["text"] if bars else ""


def job_dir(config: Config, command: str) -> Path:
    return config.run_dir / "jobs" / command.replace(" ", "-")


def start(config: Config, command: str) -> Job:
    """Start `python -m eyas COMMAND` with these settings in the background.

    Return the running job where one runs with the same settings already. Raise EyasError where one
    runs with other settings, and where there is no such command.
    """
    if command not in COMMANDS:
        raise EyasError(f"no background job {command!r}", "one of " + ", ".join(COMMANDS))
    job = Job(job_dir(config, command))
    settings = {name: _plain(value) for name, value in config.changed.items()}
    with _alone(job.folder):
        if _is_running_already(job, config, settings):
            return job
        for leftover in ("job.json", "end.json", "progress.json"):
            (job.folder / leftover).unlink(missing_ok=True)
        write_text(job.folder / "settings.yaml", yaml.safe_dump(settings, sort_keys=False))
        _start_process(job)
    return job


def _plain(value):
    """Return the value as YAML writes it."""
    return list(value) if isinstance(value, tuple) else value


def _is_running_already(job: Job, config: Config, settings: dict) -> bool:
    """Return whether the job runs with these settings; raise EyasError if it runs with others."""
    process = job.process() if (job.folder / "job.json").is_file() else None
    if process is None:
        return False
    theirs = yaml.safe_load((job.folder / "settings.yaml").read_text(encoding="utf-8")) or {}
    if theirs != settings:
        raise EyasError(
            f"{job} is running with other settings: {_differing(theirs, settings, config)}",
            "one at a time",
            _stop_command(job),
        )
    print(
        f"{job} is running already (process {process.pid}, since {job.record['started']})",
        flush=True,
    )
    return True


def _differing(theirs: dict, settings: dict, config: Config) -> str:
    their_config = Config.create(**theirs)
    return ", ".join(
        f"{name} {getattr(their_config, name)!r}, here {getattr(config, name)!r}"
        for name in sorted({*theirs, *settings})
        if theirs.get(name) != settings.get(name)
    )


def _start_process(job: Job) -> None:
    arguments = [*job.command.split(), "--profile", str(job.folder / "settings.yaml")]
    with open(job.log, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "eyas.job_process", str(job.folder), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        write_json(
            job.folder / "job.json",
            {
                "command": arguments,
                "pid": process.pid,
                "ticks": started_ticks(process.pid),
                "started": now(),
            },
        )
    except BaseException:  # a full disk, an interrupt: no process runs that no record names
        process.kill()
        raise


def follow(job: Job, each: Callable[[], None] = lambda: None) -> Job:
    """Show what the job prints and its live bars until it ends.

    An interrupt ends the watching, not the job.
    `each()` is called a few times a second. Raise the job's own EyasError where it ended with one,
    and an EyasError with the end of its log where it failed, was stopped or was killed.
    """
    try:
        _watch(job, each)
    except KeyboardInterrupt:
        print(
            f"\n{job} continues in the background; the same command shows it again. "
            f"To end it: {_stop_command(job)}",
            flush=True,
        )
        raise
    state = job.state
    if state == "done":
        return job
    end = job.end() or {}
    if "found" in end:
        raise EyasError(end["found"], end["expected"], end["next_command"])
    text = f"{job} failed" if state == "failed" else f"{job} was {state}"
    if state != "stopped":
        text += f"; the end of its log:\n{log_tail(job.log)}\n"
    raise EyasError(text, "", f"the same command again: it resumes ({shown(job.log)})")


def _watch(job: Job, each: Callable[[], None]) -> None:
    """Print new lines and redraw the bars until the job's process has ended."""
    bars: list[progress.Bar] = []
    position = 0
    running = True
    while running:
        running = job.process() is not None  # first: what it wrote before its end is shown then
        position = _print_new_lines(job.log, position, all=not running)
        for n, bar in enumerate(job.bars()):
            if n == len(bars):
                bars.append(progress.Bar())
            closed = bar["closed"] or not running
            if bars[n].due or closed:
                bars[n].draw(bar["text"], bar["share"], closed)
        each()
        if running:
            time.sleep(POLL_S)


def stop(job: Job, patience_s: float = 60.0) -> bool:
    """End the job as Ctrl-C would, so that store, checkpoint and records stay whole.

    Kill it, with the processes that it started, where that takes longer than `patience_s`. Return
    whether it was running.
    """
    process = job.process()
    if process is None:
        return False
    children = process.children(recursive=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGTERM)
    left = still_running([process], patience_s)
    orphans = [child for child in children if left or child.is_running()]
    for one in [*left, *orphans]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    still_running([*left, *children], 10.0)
    if job.end() is None:  # it had no time to write one
        write_json(
            job.folder / "end.json", {"state": "stopped", "code": INTERRUPTED, "ended": now()}
        )
    return True


def stop_all(config: Config) -> list[Job]:
    """Stop every running job of the run; return them."""
    return [job for job in list_jobs(config.run_name) if stop(job)]


def list_jobs(run_name: str = "") -> list[Job]:
    """Return the jobs that have a record, of this run or of all runs."""
    runs = (
        [data_dir() / "runs" / run_name] if run_name else sorted((data_dir() / "runs").glob("*/"))
    )
    return [Job(path.parent) for run in runs for path in sorted(run.glob("jobs/*/job.json"))]


def find_job(config: Config, command: str) -> Job:
    """Return the run's job of this command; raise EyasError if there is none."""
    job = Job(job_dir(config, command))
    if not (job.folder / "job.json").is_file():
        raise EyasError(
            f"run {config.run_name!r} has no job {command!r}",
            "one that was started from a notebook or with `job start`",
            f"python -m eyas job start {command} -p run_name {config.run_name}",
        )
    return job


def table(jobs: list[Job]) -> str:
    """Return one line for each job: run, command, state, start, progress."""
    lines = []
    for job in jobs:
        started = job.record["started"][:16].replace("T", " ")
        lines.append(
            f"{job.run_name:16} {job.command:12} {job.state:8} {started} UTC  {job.where()}"
        )
    return "\n".join(lines) or "no jobs yet"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _alive(record: dict) -> psutil.Process | None:
    try:
        process = psutil.Process(record["pid"])
        same = started_ticks(record["pid"]) == record["ticks"]
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.NoSuchProcess, OSError):
        return None


def _stop_command(job: Job) -> str:
    return f"python -m eyas job stop {job.command} -p run_name {job.run_name}"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: of two that start the same job, the second finds it running."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _print_new_lines(log: Path, position: int, all: bool) -> int:
    """Print the log from byte `position` on: whole lines, or `all`. Return where printing ended."""
    with open(log, "rb") as file:
        file.seek(position)
        new = file.read()
    if not all:
        new = new[: new.rfind(b"\n") + 1]
    if new:
        print(new.decode(errors="replace"), end="", flush=True)
    return position + len(new)
