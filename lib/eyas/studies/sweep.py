"""Train many drafters from one store in parallel.

    python -m eyas study layers --profile layers  # notebook 06, half an hour on 2 cores

Each training is a papermill run of one notebook with changed settings, on Ray. The same command
resumes the sweep where it stopped.

Ray runs on this machine alone for as long as the sweep, bound to 127.0.0.1 with a secret of its
own, without dashboard and usage reports. Or it is a cluster that you already run (`ray_address`),
whose machines see this repository and the data folder under the same paths.

A training is identified by what decides its result: the code of its notebook, every setting that
the notebook declares, the store's identity, and the code of trainer, drafter and walk (comments and
docstrings left out). Its folder, sweep/<hash of these>, holds
  notebook.ipynb    the executed notebook, whatever its result; notebook.log beside it
  run.json          settings, identity, state, return code, what went wrong, times, versions
  counts.parquet    what the walk counted, a row a held-out sample; written by the notebook (`keep`)
  drafter/          as of any run
A training is finished when run.json says ok and the counts exist. A finished one is not repeated.
The next sweep resumes one that failed or was interrupted from its last checkpoint. One that fails
stops no other.
"""

import ast
import fcntl
import functools
import inspect
import logging
import os
import secrets
import shutil
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import pandas as pd
import psutil

from eyas import processes
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import (
    data_dir,
    git_state,
    read_json,
    read_parquet,
    sha256_json,
    write_atomic,
    write_json,
)
from eyas.progress import Progress
from eyas.report import pages
from eyas.report.notebook import execute
from eyas.report.parameters import plain, settings_read
from eyas.report.run import NOTEBOOKS, is_alive, now, this_process, versions

NOTEBOOK = NOTEBOOKS / "sweep_training.ipynb"
# Most letters of the folder for Ray's sockets. The sockets' whole paths may have 107.
TMP_LETTERS = 14
STARTS = 4  # tries to start Ray
# About the least that Ray accepts. Only a few words go through it.
OBJECT_STORE_BYTES = 80 * 2**20
# Settings without influence on what is learnt.
NO_INFLUENCE = {"run_name", "member", "checkpoint_steps", "keep_checkpoints"}
NOT_RUN = {"state": "not run", "process": None, "exception": None, "duration_s": None}


@dataclass(frozen=True)
class Member:
    """Describe one training. `settings`: what was changed against the sweep's own."""

    id: str
    folder: Path
    settings: dict[str, Any]
    parameters: dict[str, Any]  # of its notebook
    identity: dict[str, Any]

    def __str__(self) -> str:
        """Return the changed settings in words."""
        return ", ".join(f"{name} {value}" for name, value in self.settings_text().items())

    def settings_text(self) -> dict[str, Any]:
        """Return the changed settings; those of several values as one text."""
        return {
            name: " ".join(map(str, value)) if isinstance(value, (tuple, list)) else value
            for name, value in self.settings.items()
        }

    @property
    def notebook(self) -> Path:
        return self.folder / "notebook.ipynb"

    @property
    def counts_path(self) -> Path:
        return self.folder / "counts.parquet"

    @property
    def record(self) -> dict:
        """Return run.json. A training whose process ended without a result was interrupted."""
        path = self.folder / "run.json"
        record = read_json(path) if path.is_file() else NOT_RUN
        if record["state"] == "running" and not is_alive(record):
            return record | {"state": "interrupted"}
        return record

    @property
    def finished(self) -> bool:
        """Return whether run.json says ok and the counts exist."""
        return self.record["state"] == "ok" and self.counts_path.is_file()

    def counts(self) -> pd.DataFrame:
        """Return what `eyas.evaluation.offline.walk` counted.

        Raise EyasError if the training is not finished.
        """
        if not self.finished:
            raise EyasError(
                f"the training with {self} is not finished",
                "one that is",
                "python -m eyas study layers",
            )
        return read_parquet(self.counts_path)

    def problem(self) -> str:
        """Return what went wrong in one line; "" where nothing did."""
        exception = self.record["exception"]
        if self.finished or not exception:
            return ""
        if exception["ename"]:
            return f"{exception['ename']}: {exception['evalue']}"
        return exception["kind"]


class Sweep:
    """Run the trainings of a sweep, in one process at a time.

        with Sweep(config, store) as sweep:
            sweep.run([{"boundaries": (10, 20, 29), "seed": 0}, ...])

    Ray is started when the first training is due. It is shut down at the end, also after an error.
    """

    def __init__(self, config: Config, store, notebook: Path = NOTEBOOK):
        self.config = config
        self.store = store
        self.path = notebook
        self._declared = sorted(settings_read(notebook))
        self._notebook_code = _notebook_hash(notebook)
        self._lock: IO | None = None
        self._ray = None
        self._before: list[psutil.Process] = []  # this process's children that are not Ray's
        self._watcher: subprocess.Popen | None = None
        self._temporary: Path | None = None

    def __enter__(self) -> "Sweep":
        self.config.sweep_dir.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.config.sweep_dir / "lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise EyasError(
                f"a sweep of run {self.config.run_name!r} is running",
                "one at a time",
                "wait for its end, or use another -p run_name",
            ) from None
        return self

    def __exit__(self, *_) -> None:
        try:
            self._stop_ray()
        finally:
            self._lock.close()

    def member(self, settings: dict[str, Any]) -> Member:
        """Return the training with these settings on top of the sweep's.

        Raise EyasError for a setting that Config refuses or that the notebook does not declare.
        """
        unknown = sorted(set(settings) - set(self._declared))
        if unknown:
            raise EyasError(
                f"{self.path.name} does not declare the setting {', '.join(unknown)}",
                "a name in its parameters cell",
            )
        sweep_settings = {name: getattr(self.config, name) for name in self._declared}
        threads = {"threads": threads_each(self.config)}
        config = Config.create(**(sweep_settings | threads | settings))
        parameters = {name: plain(getattr(config, name)) for name in self._declared}
        identity = {
            "notebook": self._notebook_code,
            "parameters": {n: v for n, v in parameters.items() if n not in NO_INFLUENCE},
            "store": self.store.identity,
            "code": code_hash(),
        }
        id = sha256_json(identity)[:16]
        folder = replace(self.config, member=id).out_dir
        return Member(id, folder, settings, parameters | {"member": id}, identity)

    def run(self, variants: Iterable[dict[str, Any]]) -> list[Member]:
        """Train those that are not finished, `sweep_parallel` at a time.

        Return all of them in the order asked. The record of a failed one says what went wrong.
        """
        members = [self.member(settings) for settings in variants]
        # By id, so one that is asked for twice is trained once.
        unfinished = {member.id: member for member in members if not member.finished}
        if unfinished:
            n_different = len({member.id for member in members})
            self._train(list(unfinished.values()), n_different)
        return members

    def _train(self, waiting: list[Member], total: int) -> None:
        ray = self._start_ray()
        task = ray.remote(train_member).options(
            num_cpus=threads_each(self.config),
            num_gpus=1 if self.config.device == "cuda" else 0,
            max_retries=0,
        )
        running: dict[Any, Member] = {}
        n_finished = total - len(waiting)
        with Progress(total, "trainings") as progress:
            progress.update(samples=n_finished, note="finished before" if n_finished else "")
            while waiting or running:
                while waiting and len(running) < self.config.sweep_parallel:
                    member = waiting.pop(0)
                    running[self._submit(task, member)] = member
                done, _ = ray.wait(list(running), timeout=1.0)
                progress.update()
                for reference in done:
                    member = running.pop(reference)
                    self._collect(ray, reference, member)
                    result = member.problem() or member.record["state"]
                    if member.finished:
                        result = "ok"
                    progress.update(
                        samples=member.finished,
                        errors=not member.finished,
                        note=f"{member}: {result}"[:100],
                    )

    def _submit(self, task, member: Member):
        """Start a training on Ray and return its reference."""
        return task.remote(
            str(self.path),
            str(member.folder),
            member.parameters,
            self._record(member),
            str(data_dir()),
        )

    def _collect(self, ray, reference, member: Member) -> None:
        """Take the end of a training; record a worker that was killed or a machine that is gone."""
        try:
            ray.get(reference)
        except ray.exceptions.RayError as error:
            failure = {
                "kind": f"the Ray worker that ran it ended ({type(error).__name__})",
                "ename": "",
                "evalue": "",
                "lines": str(error).strip().splitlines()[-15:],
            }
            failed = {"state": "failed", "return_code": -1, "exception": failure}
            _write_record(member.folder, self._record(member) | failed)

    def _record(self, member: Member) -> dict:
        return {
            "id": member.id,
            "settings": {name: plain(value) for name, value in member.settings.items()},
            "identity": member.identity,
            "state": "waiting",
            "return_code": None,
            "exception": None,
        }

    # ---- Ray

    def _start_ray(self):
        """Start Ray, or join the cluster at `ray_address`. Return the module."""
        if self._ray is not None:
            return self._ray
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        if not self.config.ray_address:
            self._prepare_local_ray()
        import ray

        for name in ("ray", "ray.widgets.util"):  # the second asks for widgets
            logging.getLogger(name).setLevel(logging.ERROR)
        if self.config.ray_address:
            self._join_cluster(ray)
        else:
            self._start_local_ray(ray)
        self._ray = ray
        return ray

    def _prepare_local_ray(self) -> None:
        """Set what Ray reads from the environment, and make a folder for its sockets."""
        # Without the first switch Ray takes its own words for "this machine alone" as any address
        # that reaches this machine. Its name only sounds like another system's.
        os.environ |= {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        temporary = tempfile.gettempdir()
        parent = Path(temporary if len(temporary) <= TMP_LETTERS else "/tmp")
        for folder in parent.glob("eyas-ray-*"):
            process_id = int(folder.name.split("-")[2])
            if not psutil.pid_exists(process_id):  # left by a sweep that was killed
                shutil.rmtree(folder, ignore_errors=True)
        prefix = f"eyas-ray-{os.getpid()}-"
        self._temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))

    def _join_cluster(self, ray) -> None:
        """Join the Ray cluster at `ray_address`. Raise EyasError if none answers there."""
        address = self.config.ray_address
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:120]
            raise EyasError(
                f"no Ray cluster answers at ray_address {address!r} ({reason})",
                "HOST:PORT of one that runs",
                "ray status; or -p ray_address ''",
            ) from None

    def _start_local_ray(self, ray) -> None:
        """Start Ray on this machine. Raise EyasError if it does not start in time.

        Ray gives its processes 30 s, which may not be enough on a busy machine.
        """
        self._watcher = processes.watch()
        self._before = psutil.Process().children(recursive=True)
        for tries_left in reversed(range(STARTS)):
            try:
                ray.init(
                    address="local",
                    num_cpus=self.config.sweep_parallel * threads_each(self.config),
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _temp_dir=str(self._temporary),
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
                return
            except Exception as error:  # Ray has no class of its own for this
                self._shut_down(ray)
                if "timed out during startup" not in str(error):
                    raise
                if not tries_left:
                    raise EyasError(
                        f"Ray did not start in {STARTS} times 30 s",
                        "a machine with a core to spare",
                        "python -m eyas study layers, when it is less busy",
                    ) from None

    def _shut_down(self, ray) -> None:
        """Shut Ray down, and on this machine also the processes that it and its workers started.

        These end by themselves when their parents are gone; after 15 s they are killed.
        """
        started = []
        if not self.config.ray_address:
            children = psutil.Process().children(recursive=True)
            started = [process for process in children if process not in self._before]
        ray.shutdown()
        for process in processes.still_running(started, 15.0):
            process.kill()

    def _stop_ray(self) -> None:
        if self._ray is not None:
            self._shut_down(self._ray)
            self._ray = None
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.wait()
            self._watcher = None
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None


def threads_each(config: Config) -> int:
    """Return the CPU threads of one training of a sweep."""
    return max(1, config.threads // config.sweep_parallel)


def train_member(notebook: str, folder: str, parameters: dict, record: dict, data: str) -> None:
    """Run one training on a Ray worker from start to end.

    Its run.json always states what is true of it.
    """
    os.environ |= {"EYAS_DATA": data, "OMP_NUM_THREADS": str(parameters["threads"])}
    folder = Path(folder)
    earlier = folder / "run.json"
    # The training of a sweep that was killed a moment ago ends when it notices that.
    while earlier.is_file() and is_alive(read_json(earlier)):
        time.sleep(0.2)
    (folder / "counts.parquet").unlink(missing_ok=True)
    record |= {
        "state": "running",
        "started": now(),
        "duration_s": None,
        "git": git_state(),
        "versions": versions(),
    }
    started_s = time.monotonic()

    def wait(child) -> None:
        _write_record(folder, record | {"process": this_process(child.pid)})
        child.wait()

    code, problem = execute(Path(notebook), folder / "notebook.ipynb", parameters, wait=wait)
    if not problem and not (folder / "counts.parquet").is_file():
        code = -1
        problem = {"kind": "the notebook kept no counts", "ename": "", "evalue": "", "lines": []}
    result = {
        "state": "failed" if problem else "ok",
        "return_code": code,
        "exception": problem,
        "duration_s": round(time.monotonic() - started_s, 1),
    }
    _write_record(folder, record | result)


def _write_record(folder: Path, record: dict) -> None:
    whole = {"process": None, "duration_s": None} | pages.without_machine_paths(record)
    write_json(folder / "run.json", whole)


def keep(config: Config, counts: pd.DataFrame) -> Path:
    """Write the walk's counts, which the sweep gathers, at the end of a training's notebook.

    counts: a row a held-out sample. The checkpoints are removed, the drafter is kept.
    Raise EyasError if the code is not the one that the sweep started with: its results could not be
    compared.
    """
    planned = config.out_dir / "run.json"
    if planned.is_file() and read_json(planned)["identity"]["code"] != code_hash():
        raise EyasError(
            "trainer, drafter or walk were edited while the sweep ran",
            "the code that it started with",
            "python -m eyas study layers, which trains again what the new code changes",
        )
    path = write_atomic(
        config.out_dir / "counts.parquet", lambda path: counts.to_parquet(path, index=False)
    )
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(config.drafter_dir / name, ignore_errors=True)
    (config.drafter_dir / "best.safetensors").unlink(missing_ok=True)
    return path


def gather(members: dict[str, list[Member]]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return (runs, counts) of named members.

    runs: a row each with name, the settings, id, state, minutes, problem and notebook.
    counts: a row for each held-out sample of each finished one, with the columns of the walk, name
    and settings.
    """
    runs = []
    counts = []
    for name, group in members.items():
        for member in group:
            settings = member.settings_text()
            record = member.record
            notebook = ""
            if member.notebook.is_file():
                notebook = str(member.notebook.relative_to(data_dir()))
            runs.append(
                {
                    "name": name,
                    **settings,
                    "training": member.id,
                    "state": record["state"],
                    "minutes": (record["duration_s"] or 0) / 60,
                    "problem": member.problem(),
                    "notebook": notebook,
                }
            )
            if member.finished:
                counts.append(member.counts().assign(name=name, **settings, training=member.id))
    all_counts = pd.concat(counts, ignore_index=True) if counts else pd.DataFrame()
    return pd.DataFrame(runs), all_counts


def _notebook_hash(notebook: Path) -> str:
    """Return a hash of a notebook's code; its parameters cell does not count."""
    cells = read_json(notebook)["cells"]
    code = [
        cell["source"]
        for cell in cells
        if cell["cell_type"] == "code" and "parameters" not in cell["metadata"].get("tags", [])
    ]
    return sha256_json(code)


@functools.cache
def code_hash() -> str:
    """Return a hash of the code that decides what a training learns and what its walk counts.

    Comments, docstrings and line breaks do not count.
    """
    from eyas.evaluation import offline
    from eyas.models import drafter, vocab
    from eyas.store import mixture
    from eyas.training import (
        attention,
        batch,
        head_loss,
        losses,
        operators,
        preparation,
        reference,
        schedule,
        steps,
        trainer,
        ttt,
    )

    training = (attention, batch, head_loss, losses, operators, preparation, reference)
    training += (schedule, steps, trainer, ttt)
    parts = (
        drafter,
        mixture,
        *training,
        vocab,
        offline,
        offline.position_counts,
        offline.response_start,
    )
    return sha256_json([_without_words(inspect.getsource(part)) for part in parts])


def _without_words(source: str) -> str:
    """Return the syntax tree of a source without comments and docstrings, as text."""
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        may_have_docstring = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if may_have_docstring and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)
