"""Settings of a small training as command-line options, and the weights that it leaves."""

from pathlib import Path

import torch
from safetensors.torch import load_file

D = 40


def options(target, run_name: str, **settings) -> list[str]:
    values = {
        "run_name": run_name,
        "target": str(target.folder),
        "boundaries": "2,3",
        "threads": "1",
        "draft_vocab_size": str(D),
        "norm_output": "false",
        "batch_tok": "64",
        "epochs": "1.0",
        "without_parity": "true",
        **settings,
    }
    return [word for name, value in values.items() for word in ("-p", name, str(value))]


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
