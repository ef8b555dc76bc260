"""Read and write the files of speculators 0.3 and 0.4.

They are data_{i}.pt, sample_lengths.json and data_config.json.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch

from eyas import __version__
from eyas.errors import EyasError
from eyas.files import write_json
from eyas.store.formats.common import (
    LENGTHS,
    PRE,
    Sample,
    checked,
    numbered,
    read_described,
    torch_save,
    unpickled,
)
from eyas.store.reader import Store


class SpeculatorsV1:
    """Read a folder of these files."""

    norm = PRE
    id_is_boundary_minus = 1

    def __init__(self, source: Path, n_states: int, hidden_size: int):
        self.n_states = n_states
        self.hidden_size = hidden_size
        self.paths = numbered(source, source.glob("data_*.pt"), r"data_(\d+)\.pt")
        self.numbers = list(self.paths)
        self.lengths: dict[int, int] = {}
        if (source / LENGTHS).is_file():
            lengths = read_described(source, source / LENGTHS)
            self.lengths = {int(n): tok for n, tok in lengths.items() if n.isdecimal()}
        self.missing = sorted(set(self.lengths) - set(self.paths))

    @classmethod
    def said_boundaries(cls, source: Path) -> tuple[int, ...] | None:
        """Return the boundaries that data_config.json names, with the last one; None if none."""
        path = source / "data_config.json"
        config = read_described(source, path) if path.is_file() else {}
        block = config.get("hidden_states")
        ids = block.get("layer_ids") if isinstance(block, dict) else None
        if not isinstance(ids, list) or not ids or not all(isinstance(x, int) for x in ids):
            return None
        return tuple(x + cls.id_is_boundary_minus for x in ids)

    def open(self, number: int) -> Sample:
        """Map a file and return its sample. Raise EyasError if it is torn or of other shapes."""
        path = self.paths[number]
        content = unpickled(path, ("input_ids", "hidden_states", "loss_mask"))
        states = content["hidden_states"]
        if not isinstance(states, (list, tuple)):
            states = []
        sample = checked(
            path.name,
            Sample(number, content["input_ids"], content["loss_mask"], list(states)),
            self.n_states,
            self.hidden_size,
        )
        if self.lengths.get(number, len(sample.input_ids)) != len(sample.input_ids):
            raise EyasError(
                f"{path.name} holds {len(sample.input_ids)} tokens,"
                f" {LENGTHS} says {self.lengths[number]}",
                "files of one run",
                "make this file again",
            )
        return sample

    read = open


def write_speculators_v1(
    folder: Path, samples: Iterator[Sample], store: Store, boundaries: tuple[int, ...]
) -> None:
    """Write the samples as files of speculators 0.3 and 0.4."""
    lengths = {}
    for sample in samples:
        torch_save(
            folder / f"data_{sample.number}.pt",
            {
                "input_ids": sample.input_ids,
                "hidden_states": sample.states,
                "loss_mask": sample.loss_mask,
            },
        )
        lengths[str(sample.number)] = len(sample.input_ids)
    write_json(folder / "sample_lengths.json", lengths)
    manifest = store.manifest
    width = manifest["hidden_size"]
    last = store.boundaries[-1]
    layer_ids = [b - SpeculatorsV1.id_is_boundary_minus for b in (*boundaries, last)]
    description = "outputs of these decoder layers; the last one before the final norm"
    write_json(
        folder / "data_config.json",
        {
            "version": "2.0",
            "generated_at": datetime.now(UTC).isoformat(),
            "speculators_version": None,
            "reproducibility": {
                "command": f"eyas {__version__}: data export",
                "gpu": None,
                "package_versions": {
                    "torch": torch.__version__,
                    "vllm": None,
                    "transformers": None,
                    "speculators": None,
                    manifest["engine"]["name"]: manifest["engine"]["version"],
                },
            },
            "model": {
                "target_model_path": manifest["target"]["name"],
                "tensor_parallel_size": None,
                "gpu_memory_utilization": None,
                "hidden_size": width,
            },
            "data": {
                "train_data_path": f"eyas store of run {store.folder.parent.name}",
                "seq_length": manifest["prompts"]["max_length"],
                "max_samples": None,
                "num_samples": len(lengths),
                "seed": manifest["prompts"].get("seed"),
                "chat_template_note": "the tokenizer's own chat template",
            },
            "hidden_states": {
                "layer_ids": layer_ids,
                "description": description,
            },
            "generation": {"cache_dir": None},
            "format": {
                "file_pattern": "data_{idx}.pt",
                "data_format_version": 1,
                "schema": {
                    "input_ids": {
                        "dtype": "torch.long",
                        "shape": "[seq_len]",
                        "description": "token ids",
                    },
                    "hidden_states": {
                        "dtype": f"list[{sample.states[0].dtype}]",
                        "shape": f"list of [seq_len, {width}]",
                        "num_tensors": len(boundaries) + 1,
                        "description": "one tensor for each of layer_ids",
                    },
                    "loss_mask": {
                        "dtype": "torch.long",
                        "shape": "[seq_len]",
                        "description": "1 where the token is the target's own, 0 elsewhere",
                    },
                },
            },
        },
    )
