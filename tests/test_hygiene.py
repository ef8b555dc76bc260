"""The tree itself: notebooks stripped, thin and in agreement with Config; profiles whole; no path
of somebody's machine in any file.
"""

import argparse
import ast
import inspect
import re
import subprocess
from pathlib import Path

import nbformat
import pytest

from eyas.cli import build_parser
from eyas.config import PROFILES, SETTINGS, Config, read_profile
from eyas.files import ROOT
from eyas.report.notebook import declared_parameters
from eyas.report.parameters import settings_read
from eyas.report.run import NOTEBOOKS
from helpers.source import imports_of, source_of

FIELDS = SETTINGS
HEAD = ("**Question.**", "**Answer.**", "**Inputs.**", "**Outputs.**", "**Time.**", "**GPU.**")
paths = sorted(NOTEBOOKS.glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", paths, ids=lambda p: p.stem)


def read(path: Path):
    return nbformat.read(path, as_version=4)


def test_the_five_notebooks_are_there():
    assert [p.stem for p in paths][:5] == [
        "01_server_setup",
        "02_extraction",
        "03_shard_inspection",
        "04_training",
        "05_acceptance",
    ]


@each_notebook
def test_stripped(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata["kernelspec"]["name"] == "python3"
    assert set(notebook.metadata) <= {"eyas", "kernelspec", "language_info"} and set(
        notebook.metadata.get("language_info", {})
    ) <= {"name"}
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags"}
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


@each_notebook
def test_head(path):
    head = read(path).cells[0]
    assert head.cell_type == "markdown" and head.source.startswith("# ")
    for part in HEAD:
        assert part in head.source
    assert "python -m eyas" in head.source, "the command that makes each input"


NOTE = "# None: as the profile says. Any other setting can be changed by one more line here."


@each_notebook
def test_parameters(path):
    """A profile and at most 12 settings, each with type and meaning, whose value is None (as the
    profile says); the next cell makes the Config.
    """
    cells = [c for c in read(path).cells if c.cell_type == "code"]
    tagged = [i for i, c in enumerate(cells) if "parameters" in c.metadata.get("tags", [])]
    assert tagged == [0], "the first screen"
    profile, note, *lines = cells[0].source.splitlines()
    assert profile.startswith('profile: str = "demo"  # ') and note == NOTE
    for line in lines:
        assert re.fullmatch(r"[a-z_0-9]+: (str|int|float|bool|tuple) = None  # \S.+", line), line
        assert len(line) <= 120, line
    declared = declared_parameters(path)
    assert len(declared) <= 1 + 12
    kinds = dict(re.findall(r"^(\w+): (\w+)", "\n".join(lines), re.M))
    for name, kind in kinds.items():
        assert name in FIELDS, name
        assert type(FIELDS[name].default).__name__ == kind, name
        assert name in settings_read(path), f"{name} is declared and not read"
    assert cells[1].source.endswith("config, answer = open_notebook(globals())")


@each_notebook
def test_no_variable_has_the_name_of_a_setting(path):
    """Else the cell that makes the Config, run again, would take the variable for the setting."""
    for cell in read(path).cells:
        if cell.cell_type == "code" and "parameters" not in cell.metadata.get("tags", []):
            tree = ast.parse(cell.source)
            names = {
                n.id
                for n in ast.walk(tree)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
            names |= {
                alias.asname or alias.name
                for n in ast.walk(tree)
                if isinstance(n, (ast.Import, ast.ImportFrom))
                for alias in n.names
            }
            assert not names & {*FIELDS, "profile"}, cell.source


@each_notebook
def test_no_cell_builds_a_table(path):
    """Masks, merges and groups are functions of lib/eyas, which have tests."""
    for cell in read(path).cells:
        if cell.cell_type == "code":
            built = re.search(r"\.(merge|groupby|assign|pivot|nlargest|isin|query)\(", cell.source)
            assert not built, f"{built.group()} belongs in lib/eyas: {cell.source}"


@each_notebook
def test_the_answer_is_said_once(path):
    """At the top of the notebook, and first on its page: by a cell that is tagged so."""
    saying = [c for c in read(path).cells if "answer.says(" in c.source]
    assert len(saying) == 1
    if path.stem != "sweep_training":
        assert "headline" in saying[0].metadata.tags


@each_notebook
def test_no_definitions(path):
    for cell in read(path).cells:
        if cell.cell_type == "code":
            for node in ast.walk(ast.parse(cell.source)):
                assert not isinstance(
                    node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
                ), f"a function belongs in lib/eyas: {cell.source}"


@each_notebook
def test_every_setting_used_is_known_to_be_read(path):
    """A changed setting that a called function reads, and that the metadata do not name, would not
    run the notebook again.
    """
    own = "\n".join(c.source for c in read(path).cells if c.cell_type == "code")
    used, seen, waiting = settings_of(own), set(), set(imports_of(ast.parse(own)).values())
    waiting |= {
        ("cli", f"_{command}") for command in re.findall(r'start\(config, "(\w+)"\)', own)
    }  # a job runs that command
    while waiting:
        module, name = waiting.pop()
        source = source_of(module)
        if (module, name) in seen or module in ("config", "report.run") or not source.is_file():
            continue
        seen.add((module, name))
        tree = ast.parse(source.read_text())
        defined = {
            node.name: node
            for node in tree.body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        }
        if name not in defined:
            continue
        text = ast.unparse(defined[name])
        if "config: Config" in text:
            used |= settings_of(text) | settings_of(text, r"self\.config")
        known = imports_of(tree) | {other: (module, other) for other in defined}
        for node in ast.walk(defined[name]):
            if isinstance(node, ast.Name) and node.id in known:
                waiting.add(known[node.id])
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and known.get(node.value.id, ("", ""))[1] is None
            ):
                waiting.add((known[node.value.id][0], node.attr))
    missing = used - settings_read(path)
    assert not missing, (
        f"{path.stem} calls {sorted(seen, key=str)}; its metadata do not name {sorted(missing)}"
    )


def settings_of(source: str, owner: str = "config") -> set[str]:
    """Settings that `config.NAME` reads, also by way of Config's path properties
    (`drafter.config.NAME` is something else).
    """
    names = set(re.findall(rf"(?<![.\w]){owner}\.([a-z_0-9]+)", source))
    for name in [n for n in names if isinstance(getattr(Config, n, None), property)]:
        names |= settings_of(inspect.getsource(getattr(Config, name).fget), "self")
    return names & set(FIELDS)


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.yaml")), ids=lambda p: p.stem)
def test_profiles(path):
    """Each loads, is named as its run, is understood as it stands by `papermill -f` (no string
    where a number is meant), and every setting has a notebook.
    """
    values = read_profile(path.stem)
    assert Config.load(path.stem).run_name == path.stem
    for name, value in values.items():
        coerced = getattr(Config.load(path.stem), name)
        assert (list(coerced) if isinstance(coerced, tuple) else coerced) == value, (
            f"{name}: {value!r}"
        )
        assert not isinstance(value, str) or isinstance(FIELDS[name].default, str), (
            f"{name}: {value!r} is a string"
        )
    assert set(values) - {"notebooks"} <= set().union(
        *(settings_read(p) for p in paths)
    )  # that one is for report


def test_profiles_that_have_to_be_there():
    assert {"smoke", "demo", "reference", "kimi-k2.5"} <= {p.stem for p in PROFILES.glob("*.yaml")}


def test_no_machine_paths():
    """Nothing tracked (or about to be) names a folder of the machine that it was made on."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    )
    wrong = []
    pattern = re.compile(
        rf"(?<![\w.~-])/(?:root|home|Users|work|workspace|mnt|scratch)/\w|"
        rf"{re.escape(str(ROOT))}(?![\w-])"
    )
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix not in (".png", ".parquet", ".safetensors"):
            found = pattern.search(path.read_text(encoding="utf-8", errors="replace"))
            if found:
                wrong.append(f"{name}: {found.group(0)}")
    assert not wrong


def test_every_command_that_is_named_exists():
    """`python -m eyas COMMAND --flag` in messages, notebooks and documents: the command and its
    flags are the parser's.
    """
    parser = build_parser()
    texts = {
        p: p.read_text()
        for folder in ("lib", "notebooks", "patches", "benchmarks")
        for p in (ROOT / folder).rglob("*")
        if p.suffix in (".py", ".ipynb", ".md", ".yaml")
    }
    texts |= {p: p.read_text() for p in (ROOT / "README.md", ROOT / "Makefile")}
    wrong, seen = [], set()
    for path, text in texts.items():
        for words in re.findall(
            r"python -m eyas ((?:[a-z-]+ ?)+(?:[A-Z.]+ )?(?:-p \w+ \S+ )*(?:--[a-z-]+)?)", text
        ):
            command, *rest = words.split()
            here = parser
            while (
                choices := next(
                    (a.choices for a in here._actions if isinstance(a, argparse._SubParsersAction)),
                    None,
                )
            ) and command in choices:
                here, command = choices[command], rest.pop(0) if rest else ""
            if here is parser:
                wrong.append(f"{path.relative_to(ROOT)}: {words}")
                continue
            seen.add(words.split()[0])
            options = {option for action in here._actions for option in action.option_strings}
            wrong += [
                f"{path.relative_to(ROOT)}: {words}"
                for word in [command, *rest]
                if word.startswith("--") and word not in options
            ]
    assert not wrong
    assert {"extract", "verify", "server", "train", "parity"} <= seen


def test_no_test_module_imports_another():
    """What several test modules use is in tests/helpers."""
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not [name for name in names if name.startswith("test_")], path.name


def calls_of(tree: ast.AST, function: str) -> list[ast.Call]:
    """Return the calls of a function by the name that the source gives it."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function
    ]


def test_clients_that_threads_share_have_no_bound_of_their_own():
    """serve.LIMITS says why. A client that only streams one answer is alone."""
    paths = [*ROOT.glob("lib/eyas/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    seen = 0
    for path in [*paths, ROOT / "tests" / "test_server.py"]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        alone = [
            call
            for node in ast.walk(tree)
            if isinstance(node, ast.With) and ".stream(" in ast.unparse(node.items[-1])
            for item in node.items
            for call in calls_of(item, "httpx.Client")
        ]
        for call in calls_of(tree, "httpx.Client"):
            seen += 1
            given = {word.arg: ast.unparse(word.value) for word in call.keywords}
            assert given.get("limits") == "LIMITS" or call in alone, f"{path.name}:{call.lineno}"
    assert seen > 2
