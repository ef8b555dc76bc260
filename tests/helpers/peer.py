"""Another project's package, in an environment of its own (nothing of theirs is imported here)."""

import os
import subprocess

import pytest
import torch


def peer(variable: str, install: str, code: str, *arguments: str):
    """Run code with the Python that the variable names; return the tensors it leaves in `found`."""
    python = os.environ.get(variable)
    if not python:
        # Goes when the peer can share an environment with this lock (speculators and specforge pin
        # other versions of its packages).
        pytest.skip(
            f"{variable} names no Python; python3.11 -m venv PEER && PEER/bin/pip install "
            f"{install}; {variable}=PEER/bin/python make test"
        )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1"
    }
    done = subprocess.run(
        [python, "-c", f"import sys, torch\n{code}\ntorch.save(found, sys.argv[1])", *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(arguments[0], weights_only=True)
