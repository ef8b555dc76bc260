"""Long jobs that outlive the notebook that starts them: `python -m eyas job list|follow|stop`.

    follow(start(config, "train"))        # in a cell: train in a process of its own, and watch it

A job is `python -m eyas COMMAND` with the notebook's settings, in a session of its own: it goes on when the browser tab closes, the kernel dies or the cell is
interrupted, and the same cell (or command) finds it again and shows where it is. One of a kind and run at a time; `start` gives the one that is going on.

Files in jobs/COMMAND of the run's folder, each whole or absent:
  job.json        command, process (pid and start ticks), when it was started
  settings.yaml   the settings that are not the defaults: a profile
  progress.json   the bars that the job shows (`eyas.progress`)
  log             what it printed
  end.json        written by the job at its end, with the return code and what went wrong. A job without a process and without this file was killed
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

COMMANDS = ("extract", "train", "sweep")
POLL_S = 0.4
INTERRUPTED = 130


@dataclass(frozen=True)
class Job:
    """One job of a run, going on or over."""

    folder: Path

    @property
    def command(self) -> str:
        return self.folder.name

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
        """The running process, or None when it has ended. A pid alone may be another process by now."""
        return _alive(self.record)

    def end(self) -> dict | None:
        """What the job said at its end; None while it goes on, and when it was killed."""
        path = self.folder / "end.json"
        return read_json(path) if path.is_file() else None

    @property
    def state(self) -> str:
        """running, done, failed, stopped or killed."""
        if self.process() is not None:
            return "running"
        end = self.end()  # after the process: it writes this last
        return end["state"] if end else "killed"

    def bars(self) -> list[dict]:
        return progress.read_bars(self.folder)

    def where(self) -> str:
        """How far it is, or was, in one line."""
        bars = self.bars()
        return bars[-1]["text"] if bars else ""


def job_dir(config: Config, command: str) -> Path:
    return config.run_dir / "jobs" / command


def start(config: Config, command: str) -> Job:
    """Start `python -m eyas COMMAND` with these settings in the background, or give the one that is going on with them.

    EyasError: one of this run goes on with other settings; no such command.
    """
    if command not in COMMANDS:
        raise EyasError(f"no background job {command!r}", "one of " + ", ".join(COMMANDS))
    job, settings = (
        Job(job_dir(config, command)),
        {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in config.changed.items()
        },
    )
    with _alone(job.folder):
        if (job.folder / "job.json").is_file() and (process := job.process()) is not None:
            was = yaml.safe_load((job.folder / "settings.yaml").read_text(encoding="utf-8")) or {}
            if was != settings:
                theirs = Config.create(**was)
                differing = ", ".join(
                    f"{name} {getattr(theirs, name)!r}, here {getattr(config, name)!r}"
                    for name in sorted({*was, *settings})
                    if was.get(name) != settings.get(name)
                )
                raise EyasError(
                    f"{job} is going on with other settings: {differing}",
                    "one at a time",
                    _stop_command(job),
                )
            print(
                f"{job} is going on already (process {process.pid}, since {job.record['started']})",
                flush=True,
            )
            return job
        for leftover in ("job.json", "end.json", "progress.json"):
            (job.folder / leftover).unlink(missing_ok=True)
        write_text(job.folder / "settings.yaml", yaml.safe_dump(settings, sort_keys=False))
        arguments = [command, "--profile", str(job.folder / "settings.yaml")]
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
        except BaseException:  # a full disk, an interrupt: nothing goes on of which nobody knows
            process.kill()
            raise
    return job


def follow(job: Job, each: Callable[[], None] = lambda: None) -> Job:
    """Show what the job prints and its live bars until it ends; `each()` is called a few times a second. An interrupt ends the watching, not the job.

    EyasError: the job's own, where it ended with one; it failed, was stopped or was killed (with the end of its log).
    """
    bars: list[progress.Bar] = []
    at = 0
    try:
        while True:
            running = job.process() is not None  # first: what it wrote before its end is shown then
            at = _print_new_lines(job.log, at, all=not running)
            for n, bar in enumerate(job.bars()):
                if n == len(bars):
                    bars.append(progress.Bar())
                if bars[n].due or bar["closed"] or not running:
                    bars[n].draw(bar["text"], bar["share"], bar["closed"] or not running)
            each()
            if not running:
                break
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        print(
            f"\n{job} goes on in the background; the same again shows where it is. To end it: {_stop_command(job)}",
            flush=True,
        )
        raise
    if (state := job.state) == "done":
        return job
    end, again = job.end() or {}, f"the same again: it goes on where it was ({shown(job.log)})"
    if "found" in end:
        raise EyasError(end["found"], end["expected"], end["next_command"])
    tail = "" if state == "stopped" else f"; the end of its log:\n{log_tail(job.log)}\n"
    raise EyasError(f"{job} {'failed' if state == 'failed' else 'was ' + state}{tail}", "", again)


def stop(job: Job, patience_s: float = 60.0) -> bool:
    """End the job as Ctrl-C would: store, checkpoint and records stay whole. Killed with what it started where that takes too long. Was it running?"""
    process = job.process()
    if process is None:
        return False
    family = process.children(recursive=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGTERM)
    left = still_running([process], patience_s)
    for one in [*left, *(p for p in family if left or p.is_running())]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    still_running([*left, *family], 10.0)
    if job.end() is None:  # it had no time to say so
        write_json(
            job.folder / "end.json", {"state": "stopped", "code": INTERRUPTED, "ended": now()}
        )
    return True


def stop_all(config: Config) -> list[Job]:
    """Stop every job of the run that is going on; gives them."""
    return [job for job in list_jobs(config.run_name) if stop(job)]


def list_jobs(run_name: str = "") -> list[Job]:
    """The jobs that there is a record of, of this run or of all."""
    runs = (
        [data_dir() / "runs" / run_name] if run_name else sorted((data_dir() / "runs").glob("*/"))
    )
    return [Job(path.parent) for run in runs for path in sorted(run.glob("jobs/*/job.json"))]


def find_job(config: Config, command: str) -> Job:
    job = Job(job_dir(config, command))
    if not (job.folder / "job.json").is_file():
        raise EyasError(
            f"run {config.run_name!r} has no job {command!r}",
            "one that was started from a notebook or with `job start`",
            f"python -m eyas job start {command} -p run_name {config.run_name}",
        )
    return job


def table(jobs: list[Job]) -> str:
    """A line a job: run, command, state, since when, how far."""
    return (
        "\n".join(
            f"{job.run_name:16} {job.command:8} {job.state:8} {job.record['started'][:16].replace('T', ' ')} UTC  {job.where()}"
            for job in jobs
        )
        or "no jobs yet"
    )


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _alive(record: dict) -> psutil.Process | None:
    try:
        process = psutil.Process(record["pid"])
        return (
            process
            if started_ticks(record["pid"]) == record["ticks"]
            and process.status() != psutil.STATUS_ZOMBIE
            else None
        )
    except (psutil.NoSuchProcess, OSError):
        return None


def _stop_command(job: Job) -> str:
    return f"python -m eyas job stop {job.command} -p run_name {job.run_name}"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two that start the same job at once: the second waits a moment, and then finds it going on."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _print_new_lines(log: Path, at: int, all: bool) -> int:
    """Print what stands in the log from byte `at` on, whole lines, or `all`; gives up to where."""
    with open(log, "rb") as file:
        file.seek(at)
        new = file.read()
    if not all:
        new = new[: new.rfind(b"\n") + 1]
    if new:
        print(new.decode(errors="replace"), end="", flush=True)
    return at + len(new)
