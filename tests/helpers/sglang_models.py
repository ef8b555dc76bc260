"""SGLang's own models: their source, read without imports, and one that runs beside a drafter."""

import ast
import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eyas.models.layer_ids import FAMILIES, SGLANG

MODELS = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt" / "models"
SETTER = "set_eagle3_layers_to_capture"
FAMILY_NAMES = [name for family in FAMILIES[SGLANG].values() for name in family]


@functools.cache
def sglang_classes() -> tuple[dict, dict, dict]:
    """Of every model file: classes (file, name) -> node, entry classes name -> file, names imported
    from other model files.
    """
    classes, entries, imports = {}, {}, {}
    for path in sorted(MODELS.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                classes[path.stem, node.name] = node
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "sglang.srt.models."
            ):
                imports |= {
                    (path.stem, a.asname or a.name): (node.module.rsplit(".", 1)[1], a.name)
                    for a in node.names
                }
            elif (
                isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "EntryClass"
            ):
                entries |= dict.fromkeys(
                    [e.id for e in getattr(node.value, "elts", [node.value])], path.stem
                )
    return classes, entries, imports


def find_method(file: str, owner: str, name: str = SETTER) -> ast.FunctionDef | None:
    """The method of a class or of its nearest base that has one."""
    classes, _, imports = sglang_classes()
    place = (file, owner) if (file, owner) in classes else imports.get((file, owner))
    if place not in classes:
        return None
    own = next(
        (n for n in classes[place].body if isinstance(n, ast.FunctionDef) and n.name == name), None
    )
    return own or next(
        filter(
            None, (find_method(place[0], ast.unparse(base), name) for base in classes[place].bases)
        ),
        None,
    )


def run_sglang(
    folder: Path, target, token_ids: torch.Tensor, states: torch.Tensor, tmp_path: Path
) -> tuple[dict, dict]:
    """What SGLang's own model gives for the export (sglang_drafter.py), and which of its parameters
    the loader left alone.
    """
    save_file(
        {"embedding": target.embedding().float(), "token_ids": token_ids, "states": states},
        tmp_path / "in.safetensors",
    )
    command = [
        sys.executable,
        str(Path(__file__).with_name("sglang_drafter.py")),
        str(folder),
        str(tmp_path / "in.safetensors"),
        str(tmp_path / "out.safetensors"),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "SGLANG_PLATFORM": "", "SGLANG_PLUGINS": ""},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(tmp_path / "out.safetensors"), json.loads(done.stdout.strip().splitlines()[-1])
