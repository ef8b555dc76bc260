"""List and delete what is in the data folder.

    python -m eyas data
    python -m eyas data rm RUN

A store that a drafter's record names is kept.
"""

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from eyas.errors import EyasError
from eyas.files import RUN_PARTS, data_dir
from eyas.models.drafter import read_record
from eyas.progress import bytes_text
from eyas.server.serve import started_server
from eyas.store.reader import Store, lock_store


def list_runs() -> pd.DataFrame:
    """Return one row for each part of each run: its files and bytes."""
    rows = []
    for run in sorted((data_dir() / "runs").glob("*/")):
        for part in RUN_PARTS:
            files, size = _measure(run / part)
            if files:
                rows.append(
                    {"run": run.name, "part": part, "files": files, "size": bytes_text(size)}
                )
    return pd.DataFrame(rows, columns=["run", "part", "files", "size"])


@dataclass(frozen=True)
class Removal:
    """Describe what `remove` would delete.

    named_by: runs whose drafter was trained from this store.
    """

    folders: tuple[Path, ...]
    files: int
    bytes: int
    named_by: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{folder.parent.name}/{folder.name}" for folder in self.folders]
        return f"{', '.join(lines)}: {self.files:,} files, {bytes_text(self.bytes)}"


def look(run_name: str, parts: tuple[str, ...]) -> Removal:
    """Describe the removal of parts of a run. Raise EyasError if it has none of them."""
    run = data_dir() / "runs" / run_name
    # A name such as "../x" would lead to a folder elsewhere.
    inside = run.parent == data_dir() / "runs" and run.name == run_name != ".."
    folders = tuple(run / part for part in parts if inside and (run / part).is_dir())
    if not folders:
        raise EyasError(
            f"run {run_name!r} has no {' or '.join(parts)}",
            "a run and a part that exist",
            "python -m eyas data",
        )
    measured = [_measure(folder) for folder in folders]
    named_by = _named_by(run / "store") if run / "store" in folders else ()
    return Removal(
        folders,
        sum(files for files, _ in measured),
        sum(size for _, size in measured),
        tuple(name for name in named_by if data_dir() / "runs" / name / "drafter" not in folders),
    )


def remove(removal: Removal, force: bool = False) -> None:
    """Delete the folders.

    Raise EyasError if a drafter's record names the store (unless `force`), if another process is
    writing to it, or if the run's server is up.
    """
    if removal.named_by and not force:
        raise EyasError(
            f"the drafter of run {', '.join(removal.named_by)} was trained from this store",
            "a store that no drafter names",
            "the same command with --force, or remove the drafter too (--part all)",
        )
    for folder in removal.folders:
        if folder.name == "server" and (server := started_server(folder)) is not None:
            raise EyasError(
                f"the server of run {folder.parent.name!r} is up (pid {server.pid})",
                "one that is down",
                f"python -m eyas server down -p run_name {folder.parent.name}",
            )
    for folder in removal.folders:
        with lock_store(folder) if folder.name == "store" else contextlib.nullcontext():
            shutil.rmtree(folder.resolve())
            if folder.is_symlink():
                folder.unlink()


def _measure(folder: Path) -> tuple[int, int]:
    """Return the number of files and bytes of a folder.

    The folder may be a link, and another process may write to it.
    """
    sizes = []
    for path in folder.resolve().rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                sizes.append(path.stat().st_size)
    return len(sizes), sum(sizes)


def _named_by(store: Path) -> list[str]:
    """Return the runs whose drafter was trained from this store.

    The drafter's record names the store, or the drafter is in the same run.
    """
    try:
        identity = Store.open(store).identity
    except EyasError:
        identity = None
    names = []
    for folder in sorted((data_dir() / "runs").glob("*/drafter")):
        try:
            record = read_record(folder)
        except EyasError:
            continue
        same_run = folder.parent == store.parent
        named = identity is not None and record.get("store") == identity
        if same_run or named:
            names.append(folder.parent.name)
    return names
