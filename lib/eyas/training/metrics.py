"""Metrics of a training run: metrics.parquet, and the same numbers as TensorBoard event files."""

import math
import time
from pathlib import Path

import pandas as pd

from eyas.files import write_atomic

METRICS_S = 5.0  # how often metrics.parquet is written again
COLUMNS = [
    "step",
    "epoch",
    "split",
    "draft_step",
    "loss",
    "accuracy",
    "slots",
    "tok",
    "seconds",
    "acceptance_length",
]


class Metrics:
    """The rows of metrics.parquet: one for each optimizer step or evaluation, and draft step."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.rows: list[dict] = []
        self._written_s = 0.0
        self._board = None

    def open_board(self, step: int) -> None:
        """Open the event files. What they have after optimizer step `step` is written again."""
        from tensorboardX import SummaryWriter

        self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1)

    def close_board(self) -> None:
        self._board.close()

    @property
    def table(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows, columns=COLUMNS)

    @property
    def last_acceptance_length(self) -> float:
        """Return that of the last row, NaN where there is none."""
        return self.rows[-1]["acceptance_length"] if self.rows else math.nan

    def add(
        self,
        step: int,
        epoch: int,
        split: str,
        loss: list[float],  # sums by draft step
        hits: list[int],
        slots: list[int],
        tok: int,
        seconds: float,
        learning_rate: float,
        length: float = math.nan,
    ) -> None:
        """Add a row for each draft step. The learning rate goes to the event files only."""
        added = []
        for s, n in enumerate(slots):
            mean_loss = loss[s] / n if n else math.nan
            accuracy = hits[s] / n if n else math.nan
            values = (step, epoch, split, s, mean_loss, accuracy, int(n), tok, seconds, length)
            added.append(dict(zip(COLUMNS, values)))
        self.rows += added
        if self._board is None:
            return
        for s, row in enumerate(added):
            for name in ("loss", "accuracy"):
                self._board.add_scalar(f"{split}/{name}/draft_step_{s}", row[name], step)
        scalars = {
            f"{split}/tok_per_s": tok / seconds,
            f"{split}/acceptance_length": length,
            "learning_rate": learning_rate,
        }
        for name, value in scalars.items():
            if not math.isnan(value):
                self._board.add_scalar(name, value, step)

    def write(self, now: bool = True) -> None:
        """Write metrics.parquet again: now, or if the last time is METRICS_S ago."""
        if now or time.monotonic() - self._written_s > METRICS_S:
            path = self.folder / "metrics.parquet"
            write_atomic(path, lambda temporary: self.table.to_parquet(temporary, index=False))
            self._written_s = time.monotonic()
