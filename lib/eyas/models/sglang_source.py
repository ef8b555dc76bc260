"""What the model classes of the SGLang that is installed can do, read from their source without importing it (importing takes tens of seconds and a platform).

Nothing but the standard library is needed, so `python -m eyas doctor` can say of a target whether it is supported where little is installed.
"""

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SETTER = "set_eagle3_layers_to_capture"
Place = tuple[str, str]  # (model file without .py, dots for folders, class)


@dataclass(frozen=True)
class Family:
    """An architecture as SGLang serves it. None or empty: there is none."""

    file: str
    stack: str | None  # the class with `layers` and `norm`
    block: (
        str | None
    )  # its decoder block with an `attn_boundary`, whose forward takes hidden_states and forward_batch: what the capture plugin hooks
    setter: str | None  # the class whose `set_eagle3_layers_to_capture` it has


@functools.cache
def _entries() -> dict[str, str]:
    """Architecture -> model file."""
    spec, found = importlib.util.find_spec("sglang"), {}
    for path in (
        sorted(Path(spec.submodule_search_locations[0], "srt", "models").glob("*.py"))
        if spec
        else []
    ):
        if last := re.search(
            r"^EntryClass = (\[[^]]*\]|\w+)", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            found |= dict.fromkeys(re.findall(r"\w+", last[1]), path.stem)
    return found


@functools.cache
def _module(file: str) -> tuple[dict[str, ast.ClassDef], dict[str, Place]]:
    """The classes of a model file, and what it imports from other model files."""
    spec, classes, imports = importlib.util.find_spec("sglang"), {}, {}
    path = Path(spec.submodule_search_locations[0], "srt", "models", *file.split(".")).with_suffix(
        ".py"
    )
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []:
        if isinstance(node, ast.ClassDef):
            classes[node.name] = node
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "sglang.srt.models."
        ):
            imports |= {
                a.asname or a.name: (node.module.removeprefix("sglang.srt.models."), a.name)
                for a in node.names
            }
    return classes, imports


def _class(place: Place) -> ast.ClassDef:
    return _module(place[0])[0][place[1]]


def architectures() -> list[str]:
    return sorted(_entries())


@functools.cache
def family(architecture: str) -> Family | None:
    """None where SGLang has no such model."""
    if architecture not in _entries():
        return None
    file = _entries()[architecture]
    if (start := _find((file, architecture))) is None:  # taken from somewhere else
        return Family(file, None, None, None)
    stack = next(
        (place for place in _used(start) if _assigns(place, "layers") and _assigns(place, "norm")),
        None,
    )
    block = (
        next((place for place in _used(stack) if _is_block(_class(place))), None) if stack else None
    )
    setter = next((place for place in _lineage(start) if SETTER in _methods(_class(place))), None)
    return Family(file, *(place and place[1] for place in (stack, block, setter)))


def _find(place: Place, imported: bool = False) -> Place | None:
    """Where a name of a file is defined, if it is a class of the models; `imported`: not in this file."""
    classes, imports = _module(place[0])
    if place[1] in classes and not imported:
        return place
    return _find(imports[place[1]]) if place[1] in imports else None


def _lineage(place: Place) -> list[Place]:
    """A class and its bases among the models, nearest first."""
    bases = [
        _find((place[0], name), imported=name == place[1])
        for name in map(ast.unparse, _class(place).bases)
    ]  # `class LlamaDecoderLayer(LlamaDecoderLayer)`
    return [place, *(one for base in bases if base for one in _lineage(base))]


def _used(start: Place) -> Iterator[Place]:
    """A class, its bases, and the model classes that these name anywhere, nearest first."""
    found, waiting = set(), [start]
    while waiting:
        place = waiting.pop(0)
        if place in found:
            continue
        found.add(place)
        yield place
        names = {node.id for node in ast.walk(_class(place)) if isinstance(node, ast.Name)}
        waiting += [
            one
            for one in (*_lineage(place), *(_find((place[0], name)) for name in sorted(names)))
            if one and one not in found
        ]


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}


def _assigned(node: ast.ClassDef) -> set[str]:
    """X of every `self.X = ...`, also within a tuple."""
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
