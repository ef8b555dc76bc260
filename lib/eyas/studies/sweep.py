"""Many trainings of one store, in parallel: papermill runs of one notebook with changed settings, on Ray.

    python -m eyas sweep --profile layers       # the trainings of notebook 06, half an hour on 2 cores; again: goes on where it was

Ray runs on this machine alone for as long as the sweep, bound to 127.0.0.1 with a secret of its own, without dashboard and usage reports; or it is a
cluster that runs already (`ray_address`), whose machines see this repository and the data folder under the same paths.

A training is identified by what decides its result: the code of its notebook, every setting that the notebook declares, the store's identity and the
code of trainer, drafter and walk (comments and docstrings left out). Its folder, sweep/<that hash>, holds
  notebook.ipynb    the executed notebook, whatever became of it; notebook.log beside it
  run.json          settings, identity, state, return code, what went wrong, times, versions
  counts.parquet    what the walk counted, a row a held-out sample; written by the notebook (`keep`)
  drafter/          as of any run
A training is finished when run.json says ok and the counts are there: those are not repeated. One that failed or was cut off is tried again by the next
sweep, from its last checkpoint. One that fails stops no other.
"""

import ast
import fcntl
import functools
import inspect
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
TMP_LETTERS = 14  # of a folder for Ray's sockets: their paths may have 107
STARTS = 4  # tries
OBJECT_STORE_BYTES = (
    80 * 2**20
)  # about the least that Ray takes; nothing but a few words goes through it
NO_INFLUENCE = {"run_name", "member", "checkpoint_steps", "keep_checkpoints"}  # on what is learnt


@dataclass(frozen=True)
class Member:
    """One training. `settings`: what was changed against the sweep's own."""

    id: str
    folder: Path
    settings: dict[str, Any]
    parameters: dict[str, Any]  # of its notebook
    identity: dict[str, Any]

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {' '.join(map(str, value)) if isinstance(value, (tuple, list)) else value}"
            for name, value in self.settings.items()
        )

    @property
    def notebook(self) -> Path:
        return self.folder / "notebook.ipynb"

    @property
    def counts_path(self) -> Path:
        return self.folder / "counts.parquet"

    @property
    def record(self) -> dict:
        """run.json; a training whose process is gone without a word was interrupted."""
        path = self.folder / "run.json"
        record = (
            read_json(path)
            if path.is_file()
            else {"state": "not run", "process": None, "exception": None, "duration_s": None}
        )
        return (
            record | {"state": "interrupted"}
            if record["state"] == "running" and not is_alive(record)
            else record
        )

    @property
    def finished(self) -> bool:
        return self.record["state"] == "ok" and self.counts_path.is_file()

    def counts(self) -> pd.DataFrame:
        """As `eyas.evaluation.offline.walk` gives them. EyasError where the training is not finished."""
        if not self.finished:
            raise EyasError(
                f"the training with {self} is not finished", "one that is", "python -m eyas sweep"
            )
        return read_parquet(self.counts_path)

    def problem(self) -> str:
        """What went wrong, in one line; '' where nothing did."""
        found = self.record["exception"]
        return (
            ""
            if self.finished or not found
            else f"{found['ename']}: {found['evalue']}"
            if found["ename"]
            else found["kind"]
        )


class Sweep:
    """A run's sweep, by one process at a time: `with Sweep(config, store) as sweep: sweep.run([{"boundaries": (10, 20, 29), "seed": 0}, ...])`.

    Ray is started when the first training is due and shut down at the end, whichever way that comes.
    """

    def __init__(self, config: Config, store, notebook: Path = NOTEBOOK):
        self.config, self.store, self.path = config, store, notebook
        self._declared = sorted(settings_read(notebook))
        self._notebook_code = sha256_json(
            [
                c["source"]
                for c in read_json(notebook)["cells"]
                if c["cell_type"] == "code" and "parameters" not in c["metadata"].get("tags", [])
            ]
        )
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
                f"a sweep of run {self.config.run_name!r} is going on",
                "one at a time",
                "wait for it, or take another -p run_name",
            ) from None
        return self

    def __exit__(self, *_) -> None:
        try:
            self._stop_ray()
        finally:
            self._lock.close()

    def member(self, settings: dict[str, Any]) -> Member:
        """The training with these settings on top of the sweep's. EyasError: one that Config refuses, or that the notebook does not declare."""
        unknown = sorted(set(settings) - set(self._declared))
        if unknown:
            raise EyasError(
                f"{self.path.name} does not declare the setting {', '.join(unknown)}",
                "a name in its parameters cell",
            )
        config = Config.create(
            **{name: getattr(self.config, name) for name in self._declared}
            | {"threads": threads_each(self.config)}
            | settings
        )
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
        """Train all of them, `sweep_parallel` at a time, but for those that are finished; gives them in the order asked. What failed says so in its record."""
        members = [self.member(settings) for settings in variants]
        todo = {
            member.id: member for member in members if not member.finished
        }  # one that is asked for twice is trained once
        if todo:
            self._train(list(todo.values()), len({member.id for member in members}))
        return members

    def _train(self, waiting: list[Member], total: int) -> None:
        ray = self._start_ray()
        task = ray.remote(train_member).options(
            num_cpus=threads_each(self.config),
            num_gpus=1 if self.config.device == "cuda" else 0,
            max_retries=0,
        )
        going: dict[Any, Member] = {}
        with Progress(total, "trainings") as progress:
            progress.update(
                samples=total - len(waiting), note="finished before" if total > len(waiting) else ""
            )
            while waiting or going:
                while waiting and len(going) < self.config.sweep_parallel:
                    member = waiting.pop(0)
                    going[
                        task.remote(
                            str(self.path),
                            str(member.folder),
                            member.parameters,
                            self._record(member),
                            str(data_dir()),
                        )
                    ] = member
                done, _ = ray.wait(list(going), timeout=1.0)
                progress.update()
                for reference in done:
                    member = going.pop(reference)
                    try:
                        ray.get(reference)
                    except (
                        ray.exceptions.RayError
                    ) as error:  # a worker that was killed, a machine that is gone
                        text = str(error).strip().splitlines()
                        failure = {
                            "kind": f"the Ray worker that ran it ended ({type(error).__name__})",
                            "ename": "",
                            "evalue": "",
                            "lines": text[-15:],
                        }
                        _write_record(
                            member.folder,
                            self._record(member)
                            | {"state": "failed", "return_code": -1, "exception": failure},
                        )
                    ok = member.finished
                    progress.update(
                        samples=ok,
                        errors=not ok,
                        note=f"{member}: {'ok' if ok else member.problem() or member.record['state']}"[
                            :100
                        ],
                    )

    def _record(self, member: Member) -> dict:
        return {
            "id": member.id,
            "settings": {n: plain(v) for n, v in member.settings.items()},
            "identity": member.identity,
            "state": "waiting",
            "return_code": None,
            "exception": None,
        }

    # ---- Ray

    def _start_ray(self):
        if self._ray is not None:
            return self._ray
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        address = self.config.ray_address
        if not address:
            # Ray reads its own words for "this machine alone" as any address that reaches this machine, but for this switch, which only sounds like another system's.
            os.environ |= {
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
            }
            folder = Path(
                tempfile.gettempdir() if len(tempfile.gettempdir()) <= TMP_LETTERS else "/tmp"
            )
            for left in folder.glob("eyas-ray-*"):  # of a sweep that was killed
                if not psutil.pid_exists(int(left.name.split("-")[2])):
                    shutil.rmtree(left, ignore_errors=True)
            self._temporary = Path(tempfile.mkdtemp(prefix=f"eyas-ray-{os.getpid()}-", dir=folder))
        import logging

        import ray

        for name in ("ray", "ray.widgets.util"):  # the second asks for widgets
            logging.getLogger(name).setLevel(logging.ERROR)
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address:
            try:
                ray.init(address=address, **quiet)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise EyasError(
                    f"no Ray cluster answers at ray_address {address!r} ({' '.join(str(error).split())[:120]})",
                    "HOST:PORT of one that runs",
                    "ray status; or -p ray_address ''",
                ) from None
        else:
            self._watcher = processes.watch()
            self._before = psutil.Process().children(recursive=True)
            for more in reversed(range(STARTS)):
                try:
                    ray.init(
                        address="local",
                        num_cpus=self.config.sweep_parallel * threads_each(self.config),
                        include_dashboard=False,
                        object_store_memory=OBJECT_STORE_BYTES,
                        _temp_dir=str(self._temporary),
                        **quiet,
                    )
                    break
                except Exception as error:  # Ray has no class of its own for it, and gives its processes 30 s, which a busy machine may not
                    self._shut_down(ray)
                    if "timed out during startup" not in str(error):
                        raise
                    if not more:
                        raise EyasError(
                            f"Ray did not start in {STARTS} times 30 s",
                            "a machine with a core to spare",
                            "python -m eyas sweep, when it is less busy",
                        ) from None
        self._ray = ray
        return ray

    def _shut_down(self, ray) -> None:
        """Ray, and on this machine also what it and its workers started, which end by themselves when their parents are gone."""
        started = (
            []
            if self.config.ray_address
            else [p for p in psutil.Process().children(recursive=True) if p not in self._before]
        )
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
    """On a Ray worker: one training from start to end, its run.json always true to its state."""
    os.environ |= {"EYAS_DATA": data, "OMP_NUM_THREADS": str(parameters["threads"])}
    folder = Path(folder)
    before = folder / "run.json"
    while before.is_file() and is_alive(
        read_json(before)
    ):  # of a sweep that was killed a moment ago: it ends when it notices
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
        code, problem = (
            -1,
            {"kind": "the notebook kept no counts", "ename": "", "evalue": "", "lines": []},
        )
    _write_record(
        folder,
        record
        | {
            "state": "failed" if problem else "ok",
            "return_code": code,
            "exception": problem,
            "duration_s": round(time.monotonic() - started_s, 1),
        },
    )


def _write_record(folder: Path, record: dict) -> None:
    write_json(
        folder / "run.json",
        {"process": None, "duration_s": None} | pages.without_machine_paths(record),
    )


def keep(config: Config, counts: pd.DataFrame) -> Path:
    """In the notebook of a training, at its end: write what the sweep gathers, the walk's counts, a row a held-out sample. The checkpoints go, the drafter stays.

    EyasError where the code is not the one that the sweep began with: its results would not be comparable.
    """
    asked = config.out_dir / "run.json"
    if asked.is_file() and read_json(asked)["identity"]["code"] != code_hash():
        raise EyasError(
            "trainer, drafter or walk were edited while the sweep ran",
            "the code that it began with",
            "python -m eyas sweep, which trains anew what the new code changes",
        )
    path = write_atomic(
        config.out_dir / "counts.parquet", lambda path: counts.to_parquet(path, index=False)
    )
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(config.drafter_dir / name, ignore_errors=True)
    (config.drafter_dir / "best.safetensors").unlink(missing_ok=True)
    return path


def gather(members: dict[str, list[Member]]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(runs, counts) of named members. runs: a row each with name, the settings, id, state, minutes, problem, notebook. counts: a row for each
    held-out sample of each finished one, the columns of the walk beside name and settings."""
    runs, counts = [], []
    for name, group in members.items():
        for member in group:
            settings = {
                key: " ".join(map(str, value)) if isinstance(value, (tuple, list)) else value
                for key, value in member.settings.items()
            }
            record = member.record
            notebook = (
                str(member.notebook.relative_to(data_dir())) if member.notebook.is_file() else ""
            )
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
    return pd.DataFrame(runs), pd.concat(counts, ignore_index=True) if counts else pd.DataFrame()


@functools.cache
def code_hash() -> str:
    """Over the code that decides what a training learns and what its walk counts; comments, docstrings and line breaks do not count."""
    from eyas.evaluation import offline
    from eyas.models import drafter, vocab
    from eyas.store import mixture
    from eyas.training import (
        attention,
        batch,
        head_loss,
        losses,
        operators,
        schedule,
        steps,
        trainer,
        ttt,
    )

    training = (attention, batch, head_loss, losses, operators, schedule, steps, trainer, ttt)
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
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and ast.get_docstring(node, clean=False) is not None
        ):
            node.body = node.body[1:]
    return ast.dump(tree)
