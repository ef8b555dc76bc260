"""Training that continues a drafter, and what keeps a training from replacing one.

    # the drafter that was imported into the run
    python -m eyas train -p run_name theirs -p initial_weights drafter
    # the drafter of another run, which is not changed
    python -m eyas train -p run_name mine -p initial_weights drafter -p drafter_run theirs

- A run has one drafter, in `drafter.safetensors`. A training never replaces a drafter that another
  command or other settings made.
- A training that continues its own run's imported drafter first keeps it, as
  `imported.safetensors`, and starts from that file.
- Shape, draft vocabulary, boundaries and norms are the drafter's. Settings that say otherwise are
  refused by name.
"""

import fcntl
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import sha256_file, write_atomic
from eyas.models.drafter import FILE, IMPORTED, Drafter, load_drafter, read_record
from eyas.models.target import Target

LOCK = ".lock"  # of a drafter folder
# settings that the drafter decides
OF_THE_DRAFTER = ("boundaries", "draft_vocab_size", "fc_norm", "norm_output")
# parts of an imported drafter that `train` refuses
NOT_TRAINED = ("norm_before_fc", "norm_before_residual", "rope_scaling")


@dataclass(frozen=True)
class Start:
    """The drafter that a training continues.

    own: it was imported into the run that is trained.
    """

    drafter: Drafter
    run_name: str
    file: str
    sha256: str
    record: dict
    own: bool

    def described(self) -> dict:
        """Return what the trained drafter's record says about its start."""
        kept = {"kept_as": IMPORTED} if self.own else {"file": self.file}
        return {"run_name": self.run_name, **kept, "sha256": self.sha256, "record": self.record}

    def __str__(self) -> str:
        imported = self.record.get("imported")
        what = (
            f"imported from {imported['folder']!r}"
            if imported
            else f"of {self.record.get('steps')} optimiser steps"
        )
        kept = f", which is kept as {IMPORTED}" if self.own else ""
        return f"continues the drafter of run {self.run_name!r}, {what}{kept}"


def read_start(config: Config, target: Target) -> Start | None:
    """Return the drafter that this training continues, or None where it continues none.

    Raise EyasError if there is no such drafter, it has another target, settings differ from what it
    is, or a part of it cannot be trained.
    """
    if config.initial_weights != "drafter":
        return None
    source = config.judged
    own = source.drafter_dir == config.drafter_dir
    file = _own_imported(config) if own else source.drafter_file
    record = read_record(source.drafter_dir, file)
    drafter = load_drafter(source.drafter_dir, target, file)
    _check_settings(config, source.run_name, drafter)
    _check_parts(source.run_name, drafter)
    return Start(
        drafter, source.run_name, file, sha256_file(source.drafter_dir / file), record, own
    )


def _own_imported(config: Config) -> str:
    """Return the file of the drafter that was imported into this run."""
    if (config.drafter_dir / IMPORTED).is_file():
        return IMPORTED
    path = config.drafter_dir / FILE
    if path.is_file() and "imported" in read_record(config.drafter_dir):
        return FILE
    found = (
        f"the drafter of run {config.run_name!r} was not imported"
        if path.is_file()
        else f"run {config.run_name!r} has no imported drafter"
    )
    raise EyasError(
        f"initial_weights = 'drafter', but {found}",
        "an imported drafter, or drafter_run to name another run's",
        "python -m eyas train -p initial_weights drafter -p drafter_run NAME, "
        f"or python -m eyas drafter import FOLDER -p run_name {config.run_name}",
    )


def _check_settings(config: Config, run_name: str, drafter: Drafter) -> None:
    """Raise EyasError where a setting differs from what the drafter is.

    A profile that names no boundaries takes the drafter's.
    """
    given = [name for name in OF_THE_DRAFTER if name != "boundaries" or config.boundaries]
    differing = [name for name in given if getattr(config, name) != getattr(drafter.config, name)]
    if not differing:
        return
    apart = [
        f"{name} {_shown(getattr(drafter.config, name))}, not {_shown(getattr(config, name))}"
        for name in differing
    ]
    options = [
        f"-p {name} {shlex.quote(_shown(getattr(drafter.config, name)))}" for name in differing
    ]
    raise EyasError(
        f"the drafter of run {run_name!r} has {'; '.join(apart)}",
        "the drafter's own to continue it",
        " ".join(options),
    )


def _shown(value) -> str:
    """Return a setting's value as -p takes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check_parts(run_name: str, drafter: Drafter) -> None:
    """Raise EyasError where the drafter has a part that the training does not compute."""
    parts = [name for name in NOT_TRAINED if getattr(drafter.config, name)]
    if parts:
        raise EyasError(
            f"the drafter of run {run_name!r} has {', '.join(parts)}, "
            "which training does not compute",
            "a drafter without",
            "python -m eyas train -p initial_weights target, in another run: -p run_name NAME",
        )


def check_nothing_is_lost(config: Config, identity: dict, start: Start | None) -> None:
    """Raise EyasError where this training, from its first step, would replace a drafter of the run.

    identity: the store, the settings and the start of this training. A drafter of the very same
    training is made again.
    """
    path = config.drafter_dir / FILE
    if not path.is_file():
        return
    run = config.run_name
    remove = f"python -m eyas data rm {run} --part drafter --yes"
    record = read_record(config.drafter_dir)
    if "imported" in record:
        if start is not None and start.own:
            return
        folder = record["imported"]["folder"]
        raise EyasError(
            f"the drafter of run {run!r} was imported from {folder!r}, "
            "and this training would replace it",
            "a run without a drafter, or a training that continues it",
            f"python -m eyas train -p run_name {run} -p initial_weights drafter, "
            "which continues it and keeps it; or import it into another run "
            "(python -m eyas drafter import FOLDER -p run_name ANOTHER), "
            f"remove it here ({remove}), and train again",
        )
    made = {
        "store": record.get("store"),
        "settings": record.get("settings"),
        "start": _start_of(record),
    }
    now = {
        "store": identity["store"],
        "settings": identity["settings"],
        "start": identity.get("start"),
    }
    if made == now:
        print(
            f"note: run {run!r} has the drafter of this very training and no checkpoint; "
            "it is trained again and replaced at the end"
        )
        return
    raise EyasError(
        f"run {run!r} has a drafter of another training, "
        f"without a checkpoint to continue it ({_apart(made, now)})",
        "the same training, or a run without a drafter",
        f"another run, e.g. -p run_name NAME, or {remove}",
    )


def _start_of(record: dict) -> dict | None:
    continued = record.get("continued_from")
    return {"sha256": continued["sha256"]} if continued else None


def _apart(made: dict, now: dict) -> str:
    """Return in words what differs between two trainings."""
    settings = made["settings"] or {}
    names = [
        name
        for name in {**now["settings"], **settings}
        if settings.get(name) != now["settings"].get(name)
    ]
    parts = (
        [f"{name} {settings.get(name)}, now {now['settings'].get(name)}" for name in names]
        if settings
        else []
    )
    parts += [f"another {name}" for name in ("store", "start") if made[name] != now[name]]
    return ", ".join(parts) or "its record names no settings"


def keep_imported(config: Config, start: Start | None) -> None:
    """Keep the imported drafter that this run's training continues, before anything is written."""
    kept = config.drafter_dir / IMPORTED
    if start is not None and start.own and not kept.is_file():
        write_atomic(kept, lambda temporary: shutil.copyfile(config.drafter_dir / FILE, temporary))


def only_one(folder: Path) -> IO:
    """Return the lock of a run's drafter folder, which is held until it is closed.

    It is a record lock: processes that this one forks do not hold it, so it ends with the process
    that took it. Raise EyasError where another process trains there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / LOCK, "w")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise EyasError(
            f"another process writes the drafter of run {folder.parent.name!r}",
            "one at a time",
            "wait for it, or another run: -p run_name NAME",
        ) from None
    return lock


def is_free(folder: Path) -> bool:
    """Return whether nothing of a drafter is in this folder."""
    return not folder.is_dir() or all(path.name == LOCK for path in folder.iterdir())
