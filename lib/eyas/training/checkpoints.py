"""Checkpoints of a training run: whole or absent, and only continued by the same training."""

from pathlib import Path

import torch

from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import write_atomic
from eyas.models.drafter import IMPORTED

ALL = "all of the store"  # where a setting is no part of an identity: nothing is left out
# parts of an identity, and how an error names them
PARTS = {
    "drafter": "drafter shape",
    "store": "store (its samples differ)",
    "settings": "training",
    "start": "start (the drafter that it continues differs)",
}


class Checkpoints:
    """The checkpoints of a run, in its drafter folder."""

    def __init__(self, config: Config):
        self.config = config
        self.folder = config.drafter_dir / "checkpoints"

    @property
    def paths(self) -> list[Path]:
        """Return the checkpoints, the oldest first."""
        return sorted(self.folder.glob("step-*.pt"))

    def save(self, step: int, state: dict) -> None:
        """Write the checkpoint of an optimizer step and remove those that are too old."""
        path = self.folder / f"step-{step:07d}.pt"
        write_atomic(path, lambda temporary: torch.save(state, temporary))
        for old in self.paths[: -self.config.keep_checkpoints]:
            old.unlink()

    def load(self, identity: dict) -> dict | None:
        """Return the state of the last checkpoint, None where there is none.

        Raise EyasError for a torn checkpoint, or one of another drafter shape, store, settings or
        start than `identity` says.
        """
        if not self.paths:
            return None
        state = self._read()
        for part, named in PARTS.items():
            was, now = state["identity"].get(part), identity.get(part)
            if was == now:
                continue
            fields = ": " + differences(was, now) if part in ("drafter", "settings") else ""
            raise EyasError(
                f"the checkpoint of run {self.config.run_name!r} is of another {named}{fields}",
                "the same",
                self._another_run(),
            )
        return state

    def _read(self) -> dict:
        *older, path = self.paths
        try:
            state = torch.load(path, weights_only=True)
            state["identity"]
        except Exception as error:  # torch.load has no error of its own
            before = f"remove it and go on from {older[-1].name}" if older else ""
            raise EyasError(
                f"the checkpoint {path.name} of run {self.config.run_name!r} can't be read "
                f"({type(error).__name__})",
                "a whole file",
                before or self._another_run(),
            ) from None
        return state

    def _another_run(self) -> str:
        """Return what to do where this training cannot continue the run's checkpoints."""
        folder = self.config.drafter_dir
        imported = (folder / IMPORTED).is_file()
        with_it = ", and with it the imported drafter" if imported else ""
        return (
            "another run, e.g. -p run_name NAME, "
            f"or remove {folder.name}/ of run {self.config.run_name!r}{with_it}"
        )


def differences(was: dict, now: dict) -> str:
    """Return in words what differs between two identities."""
    names = [name for name in {**now, **was} if was.get(name) != now.get(name)]
    return ", ".join(f"{name} {was.get(name, ALL)}, now {now.get(name, ALL)}" for name in names)


def note_changes(state: dict, record: dict, parts: dict) -> None:
    """Print what changed since the checkpoint was written, and what it does to the result.

    parts: what a step is cut into. Checkpoints of early versions do not have it.
    """
    if state["record"]["code"] != record["code"]:
        print(f"note: begun with code {state['record']['code']}, going on with {record['code']}")
    was = state.get("parts", parts)
    changed = [f"{name} {was[name]}, now {now}" for name, now in parts.items() if was[name] != now]
    if changed:
        print(
            f"note: begun with {', '.join(changed)}: "
            "the same training to rounding, no longer bit for bit"
        )
