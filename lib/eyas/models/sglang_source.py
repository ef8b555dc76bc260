"""Find out what the model classes of the installed SGLang can do, from their source.

They are not imported: that takes tens of seconds and needs a platform. Only the standard library is
used, so that `python -m eyas doctor` can check a target where little is installed.
"""

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SETTER = "set_eagle3_layers_to_capture"
MULTIMODAL = "multimodal_model_archs"
Place = tuple[str, str]  # (model file without .py, dots for folders, class)


@dataclass(frozen=True)
class Family:
    """Describe an architecture as SGLang serves it. None or empty: there is none."""

    file: str
    stack: str | None  # the class with `layers` and `norm`
    # Its decoder block, which the capture plugin hooks: it has an `attn_boundary`, and its forward
    # takes hidden_states and forward_batch.
    block: str | None
    setter: str | None  # the class whose `set_eagle3_layers_to_capture` it has


@functools.cache
def _entries() -> dict[str, str]:
    """Return {architecture: model file}."""
    spec = importlib.util.find_spec("sglang")
    entries: dict[str, str] = {}
    if spec is None:
        return entries
    folder = Path(spec.submodule_search_locations[0], "srt", "models")
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        entry = re.search(r"^EntryClass = (\[[^]]*\]|\w+)", text, re.MULTILINE)
        if entry:
            entries |= dict.fromkeys(re.findall(r"\w+", entry[1]), path.stem)
    return entries


@functools.cache
def multimodal_architectures() -> frozenset[str]:
    """Return the architectures for which SGLang loads a processor beside the tokenizer.

    They are the list `multimodal_model_archs` of srt/configs/model_config.py.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        return frozenset()
    folder = Path(spec.submodule_search_locations[0], "srt", "configs")
    for node in ast.parse((folder / "model_config.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == MULTIMODAL:
            parts = ast.walk(node.value)  # the list has expressions too, so it is not evaluated
            return frozenset(part.value for part in parts if isinstance(part, ast.Constant))
    return frozenset()


@functools.cache
def _module(file: str) -> tuple[dict[str, ast.ClassDef], dict[str, Place]]:
    """Return the classes of a model file, and what it imports from other model files."""
    spec = importlib.util.find_spec("sglang")
    classes: dict[str, ast.ClassDef] = {}
    imports: dict[str, Place] = {}
    folder = Path(spec.submodule_search_locations[0], "srt", "models")
    path = Path(folder, *file.split(".")).with_suffix(".py")
    if not path.is_file():
        return classes, imports
    prefix = "sglang.srt.models."
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            classes[node.name] = node
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(prefix):
            module = node.module.removeprefix(prefix)
            for alias in node.names:
                imports[alias.asname or alias.name] = (module, alias.name)
    return classes, imports


def _class(place: Place) -> ast.ClassDef:
    return _module(place[0])[0][place[1]]


def architectures() -> list[str]:
    """Return all architectures of the installed SGLang."""
    return sorted(_entries())


@functools.cache
def family(architecture: str) -> Family | None:
    """Describe an architecture; None if SGLang does not have it."""
    if architecture not in _entries():
        return None
    file = _entries()[architecture]
    start = _find((file, architecture))
    if start is None:  # its class is not in SGLang's models
        return Family(file, None, None, None)
    stacks = (p for p in _used(start) if _assigns(p, "layers") and _assigns(p, "norm"))
    stack = next(stacks, None)
    block = None
    if stack:
        block = next((p for p in _used(stack) if _is_block(_class(p))), None)
    setter = next((p for p in _lineage(start) if SETTER in _methods(_class(p))), None)
    return Family(file, *(place and place[1] for place in (stack, block, setter)))


def _find(place: Place, imported: bool = False) -> Place | None:
    """Return where a name of a file is defined, if it is a class of the models.

    `imported`: do not look in this file.
    """
    classes, imports = _module(place[0])
    if place[1] in classes and not imported:
        return place
    return _find(imports[place[1]]) if place[1] in imports else None


def _lineage(place: Place) -> list[Place]:
    """Return a class and its bases among the models, nearest first."""
    file, class_name = place
    lineage = [place]
    for name in map(ast.unparse, _class(place).bases):
        # `class LlamaDecoderLayer(LlamaDecoderLayer)`: a base of the same name is imported
        base = _find((file, name), imported=name == class_name)
        if base:
            lineage += _lineage(base)
    return lineage


def _used(start: Place) -> Iterator[Place]:
    """Yield a class, its bases, and the model classes that these name anywhere, nearest first."""
    seen = set()
    waiting = [start]
    while waiting:
        place = waiting.pop(0)
        if place in seen:
            continue
        seen.add(place)
        yield place
        names = {node.id for node in ast.walk(_class(place)) if isinstance(node, ast.Name)}
        named = [_find((place[0], name)) for name in sorted(names)]
        waiting += [other for other in (*_lineage(place), *named) if other and other not in seen]


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}


def _assigned(node: ast.ClassDef) -> set[str]:
    """Return X of every `self.X = ...`, also within a tuple."""
    return {
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and getattr(n.value, "id", "") == "self"
    }


def _assigns(place: Place, name: str) -> bool:
    return any(name in _assigned(_class(one)) for one in _lineage(place))


def _is_block(node: ast.ClassDef) -> bool:
    forward = _methods(node).get("forward")
    return (
        "attn_boundary" in _assigned(node)
        and forward is not None
        and {"hidden_states", "forward_batch"} <= {a.arg for a in forward.args.args}
    )
