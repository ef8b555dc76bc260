"""Read and write SpecForge's files: rows_{g}-{g+2000}/data_{i}.ckpt, also as .ckpt.gz."""

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

ROWS_OF_A_FOLDER = 2000  # as SpecForge has it


class SpecForge:
    """Read a folder of SpecForge's files."""

    norm = POST
    id_is_boundary_minus = 1

    def __init__(self, source: Path, n_states: int, hidden_size: int):
        self.n_states = n_states
        self.hidden_size = hidden_size
        self.paths = numbered(
            source,
            [*source.glob("data_*.ckpt*"), *source.glob("*/data_*.ckpt*")],
            r"data_(\d+)\.ckpt(?:\.gz)?",
        )
        self.numbers = list(self.paths)
        self.missing: list[int] = []

    @classmethod
    def said_boundaries(cls, source: Path) -> None:
        """Return None: the files do not name their layers."""

    def open(self, number: int) -> Sample:
        """Map a file and return its sample. Raise EyasError if it is torn or of other shapes."""
        path = self.paths[number]
        content = unpickled(path, ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state"))
        last = without_batch(content["hidden_state"])
        aux = without_batch(content["aux_hidden_state"])  # [T, n*H]
        whole = (
            isinstance(aux, torch.Tensor) and aux.ndim == 2 and aux.shape[1] % self.hidden_size == 0
        )
        states = [*(aux.split(self.hidden_size, dim=1) if whole else [aux]), last]
        return checked(
            path.name,
            Sample(number, content["input_ids"], content["loss_mask"], states),
            self.n_states,
            self.hidden_size,
        )

    read = open


def write_specforge(
    folder: Path, samples: Iterator[Sample], store: Store, boundaries: tuple[int, ...]
) -> None:
    """Write the samples as SpecForge's files."""
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
