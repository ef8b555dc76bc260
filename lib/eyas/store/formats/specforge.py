"""SpecForge: rows_{g}-{g+2000}/data_{i}.ckpt, also as .ckpt.gz."""

from collections.abc import Iterator
from pathlib import Path

import torch

from eyas.store.formats.common import (
    POST,
    Sample,
    checked,
    numbered,
    torch_save,
    unpickled,
    without_batch,
)
from eyas.store.reader import Store

ROWS_OF_A_FOLDER = 2000  # SpecForge's


class SpecForge:
    norm, id_is_boundary_minus = POST, 1

    def __init__(self, source: Path, n_states: int, hidden_size: int):
        self.n_states, self.hidden_size = n_states, hidden_size
        self.paths = numbered(
            source,
            [*source.glob("data_*.ckpt*"), *source.glob("*/data_*.ckpt*")],
            r"data_(\d+)\.ckpt(?:\.gz)?",
        )
        self.numbers, self.missing = list(self.paths), []

    @classmethod
    def said_boundaries(cls, source: Path) -> None:
        """Nothing in the files says which layers they are."""

    def open(self, number: int) -> Sample:
        path = self.paths[number]
        found = unpickled(path, ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state"))
        last, aux = (without_batch(found[name]) for name in ("hidden_state", "aux_hidden_state"))
        whole = (
            isinstance(aux, torch.Tensor) and aux.ndim == 2 and aux.shape[1] % self.hidden_size == 0
        )
        states = [*(aux.split(self.hidden_size, dim=1) if whole else [aux]), last]
        return checked(
            path.name,
            Sample(number, found["input_ids"], found["loss_mask"], states),
            self.n_states,
            self.hidden_size,
        )

    read = open


def write_specforge(
    folder: Path, samples: Iterator[Sample], store: Store, boundaries: tuple[int, ...]
) -> None:
    for sample in samples:
        first = sample.number // ROWS_OF_A_FOLDER * ROWS_OF_A_FOLDER
        torch_save(
            folder / f"rows_{first}-{first + ROWS_OF_A_FOLDER}" / f"data_{sample.number}.ckpt",
            {
                "input_ids": sample.input_ids,
                "loss_mask": sample.loss_mask,
                "hidden_state": sample.states[-1][None],
                "aux_hidden_state": torch.cat(sample.states[:-1], dim=1)[None],
            },
        )
