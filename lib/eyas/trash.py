"""What lies in the data folder, and deleting it: `python -m eyas data`, `python -m eyas data rm RUN`. A store that a drafter's record names is kept."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from eyas.drafter import read_record
from eyas.errors import EyasError
from eyas.files import data_dir
from eyas.progress import bytes_text
from eyas.store import Store, lock_store

PARTS = ("store", "drafter", "export", "acceptance", "prompts", "server")


def list_runs() -> pd.DataFrame:
    """A row per run and part of it: files and bytes."""
    rows = []
    for run in sorted((data_dir() / "runs").glob("*/")):
        for part in PARTS:
            files = [p for p in (run / part).rglob("*") if p.is_file()]
            if files:
                rows.append({"run": run.name, "part": part, "files": len(files), "size": bytes_text(sum(p.stat().st_size for p in files))})
    return pd.DataFrame(rows, columns=["run", "part", "files", "size"])


@dataclass(frozen=True)
class Removal:
    """What `remove` would delete. `named_by`: runs whose drafter was trained from this store."""

    folders: tuple[Path, ...]
    files: int
    bytes: int
    named_by: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{folder.parent.name}/{folder.name}" for folder in self.folders]
        return f"{', '.join(lines)}: {self.files:,} files, {bytes_text(self.bytes)}"


def look(run_name: str, parts: tuple[str, ...]) -> Removal:
    """EyasError when the run has none of these parts."""
    run = data_dir() / "runs" / run_name
    folders = tuple(run / part for part in parts if (run / part).is_dir())
    if not folders:
        raise EyasError(f"run {run_name!r} has no {' or '.join(parts)}", "one of python -m eyas data", "python -m eyas data")
    files = [p for folder in folders for p in folder.rglob("*") if p.is_file()]
    named_by = _named_by(run / "store") if run / "store" in folders else ()
    return Removal(folders, len(files), sum(p.stat().st_size for p in files), tuple(name for name in named_by if data_dir() / "runs" / name / "drafter" not in folders))


def remove(removal: Removal, force: bool = False) -> None:
    """Delete it. EyasError when a drafter's record names the store (unless `force`) or somebody is writing to it."""
    if removal.named_by and not force:
        raise EyasError(f"the drafter of run {', '.join(removal.named_by)} was trained from this store", "a store that no drafter names", "the same command with --force, or remove the drafter too (--part all)")
    for folder in removal.folders:
        if folder.name == "store":
            with lock_store(folder):
                shutil.rmtree(folder)
        else:
            shutil.rmtree(folder)


def _named_by(store: Path) -> list[str]:
    """Runs whose drafter was trained from this store: by its record, or because it is the run's own."""
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
        if folder.parent == store.parent or record.get("store") == identity:
            names.append(folder.parent.name)
    return names
