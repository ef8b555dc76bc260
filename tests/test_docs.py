"""README.md and docs/: every command runs here or says why not, what it prints is what it prints,
links lead somewhere, tables of fields are those of real files, and the examples of extending.md are
carried out on a copy of the repository, whose tests then pass.

The pages run in one world: a tiny target where they say /models/my-model, prompts where they say
/prompts, a data folder of its own, a real server of that target.
"""

import argparse
import contextlib
import dataclasses
import functools
import inspect
import io
import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from safetensors import safe_open

from eyas.cli import build_parser, main
from eyas.config import PROFILES, SETTINGS, Config
from eyas.errors import EyasError
from eyas.evaluation import served
from eyas.files import ROOT, read_json
from eyas.models.drafter import read_record
from eyas.models.target import load_target
from eyas.server.serve import find_server
from eyas.studies import boundaries as layers
from helpers.sweeps import FakeStore, made_counts
from helpers.tiny import make_tiny_target

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))

# How a block says that it does not run here.
MARKS = {
    "gpu": "needs GPUs, or a model that is not here",
    "long": "minutes; LONG says which and why",
    "peer": "needs the environment of another project; tests marked `peer` do it",
    "fails": "runs, and is refused: the message is what the page shows",
    "copy": "runs in a copy of the repository to which the page's examples were applied",
}
LONG = {  # commands of `bash long` blocks, and `make`: why they are not run, and what is
    "make demo": "20 minutes; tests/test_notebooks.py runs the same notebooks, smaller",
    "make test": "it is what runs this",
    "make test-unit": "it is a part of make test",
    "make test-slow": "it holds what takes minutes each",
    "make lint": "it is the first part of make test",
    "make doctor": "it makes .venv first; tests/test_doctor.py runs what it calls",
    "make lab": "it stays; tests/test_setup.py looks at the rules of the Makefile",
    "make report P=reference": "an hour; as make demo",
    "make report P=layers": "35 minutes; tests/test_sweep.py runs a small sweep",
    "python -m eyas evaluate served --profile my.yaml": (
        "two more servers; tests/test_served.py runs it"
    ),
    "python -m papermill notebooks/05_acceptance.ipynb mine-05.ipynb -f my.yaml": (
        "minutes; tests/test_notebooks.py runs notebook 04 so"
    ),
    "python -m jupyterlab mine-05.ipynb": "it stays",
} | {  # the study of one's own
    f"python -m eyas {command.replace('MINE', '--profile my.yaml -p run_name my-layers')}": (
        "a server and fifty trainings; tests/test_sweep.py runs a small sweep"
    )
    for command in (
        "server up MINE -p extra_boundaries all",
        "extract MINE -p extra_boundaries all",
        "parity MINE -p extra_boundaries all",
        "server down MINE",
        "study layers MINE -p epochs 1.0",
        "report MINE -p extra_boundaries all -p epochs 1.0 -p notebooks 06",
    )
}
NOT_RUN = {  # commands that pages name and no page runs: what does
    ("evaluate", "served"): "tests/test_served.py",
    ("job", "follow"): "tests/test_lab.py",
    ("job", "start"): "tests/test_lab.py",
    ("report", "summary"): "tests/test_browser.py",
    ("study", "layers"): "tests/test_sweep.py",
    ("study", "server"): "tests/test_tune.py",
}
# A tiny target has fewer tokens and blocks than the page's model, and a test less time.
SMALLER = {
    "draft_vocab_size: 4096": "draft_vocab_size: 384",
    "head -n 96": "head -n 24",
    "head -n 16": "head -n 6",
    "train_samples: 96": "train_samples: 24",
    "heldout_samples: 16": "heldout_samples: 6",
    "max_new_tok: 48": "max_new_tok: 24",
    "epochs: 3.0": "epochs: 2.0",
    "decode_prompts: 8": "decode_prompts: 4",
    "threads: 1": "threads: 1\nserver_timeout_s: 900.0",
    "decode_new_tok: 32": "decode_new_tok: 16",
    "check_bf16_prompts: 4": "check_bf16_prompts: 2",
}


# ---- reading the pages


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(
        str(make_tiny_target(tmp_path_factory.mktemp("targets") / "tiny", n_blocks=8))
    )


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: its language, the words behind it, its text."""

    language: str
    words: tuple[str, ...]
    text: str

    @property
    def marks(self) -> set[str]:
        return set(self.words) & set(MARKS)

    def commands(self) -> list[str]:
        """Lines of a shell, continued ones joined, comments left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [
            " ".join(line.split()) if "'" not in line else line.strip()
            for line in (re.sub(r"(^|\s)#.*", "", line) for line in lines)
            if line.strip()
        ]


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```([\w-]*)[ ]?([^\n]*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    return [Block(language, tuple(words.split()), text) for language, words, text in found]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def inline(page: Path) -> list[str]:
    """What stands between single backticks."""
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(page))]


def slugs(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.M):
        slug = re.sub(
            r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        ).replace(" ", "-")
        while slug in found:
            slug += "-1"
        found.add(slug)
    return found


def eyas_arguments(command: str) -> list[str] | None:
    """What stands behind `-m eyas`, up to the end of that command of a shell line; None where it is
    another program.
    """
    words = shlex.split(command)
    at = next((i for i in range(len(words) - 1) if words[i : i + 2] == ["-m", "eyas"]), None)
    if at is None or not any(word == "python" or word.endswith("/python") for word in words[:at]):
        return None
    ends = [i for i in range(at, len(words)) if words[i] in ("|", ">", ">>", "&&", ";", "&")]
    return words[at + 2 : ends[0] if ends else len(words)]


def every_command(page: Path, refused: bool = False) -> list[str]:
    """Of blocks and sentences; `refused`: also those that a page shows being refused."""
    return [
        command
        for block in blocks(page)
        if block.language == "bash" and (refused or "fails" not in block.marks)
        for command in block.commands()
    ] + [code for code in inline(page) if code.startswith(("python -m ", "make "))]


# ---- what can be said without running anything


@each_page
def test_blocks_are_of_known_kinds(page):
    """A language, known marks, and no block that nobody looks at."""
    for block in blocks(page):
        assert block.language in ("bash", "text", "yaml", "json", "python", "diff"), block
        assert block.language in ("yaml", "python", "diff", "text") or set(block.words) <= set(
            MARKS
        ), block.words
    assert page.read_text().count("```") == 2 * len(blocks(page))


@each_page
def test_links_lead_somewhere(page):
    """Files of the repository that git has or would take, with anchors that are there."""
    known = set(
        subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
            capture_output=True,
            text=True,
        ).stdout.splitlines()
    )
    for link in re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        path = (page.parent / name).resolve() if name else page
        relative = str(path.relative_to(ROOT))
        assert path.exists() and (
            not known or relative in known or any(k.startswith(relative + "/") for k in known)
        ), f"{page.name}: {link}"
        assert not anchor or anchor in slugs(path), f"{page.name}: {link} has no such heading"


@each_page
def test_named_files_functions_and_settings_exist(page):
    """Paths, dotted names of the library, tests and `-p` settings between backticks."""
    folders = (
        "lib tests notebooks patches benchmarks requirements docs data_manifests reports".split()
    )
    for code in inline(page):
        if re.fullmatch(rf"(?:{'|'.join(folders)})/[\w./*-]+(?:::\w+)?", code) and not re.search(
            r"\.\.\.|[A-Z]{3}", code.partition(".")[0]
        ):
            name, _, function = code.partition("::")
            found = list(ROOT.glob(name.rstrip("/")))
            assert found, f"{page.name}: {code}"
            assert not function or re.search(rf"^def {function}\b", found[0].read_text(), re.M), (
                f"{page.name}: {code}"
            )
        if re.fullmatch(r"eyas(?:\.\w+)+(?:\(\))?", code):
            resolve(code.removesuffix("()"))
        for name in re.findall(r"(?:^|\s)-p ([a-z]\w*)", code):
            assert name in SETTINGS, f"{page.name}: {code}"


def resolve(dotted: str):
    """eyas.module, eyas.module.name, eyas.module.Class.name."""
    return pkgutil.resolve_name(dotted)


@each_page
def test_every_command_is_understood(page):
    """By the parser of the command line, with settings that there are and values that they take;
    `make` targets exist.
    """
    makefile = (ROOT / "Makefile").read_text()
    profiles = {p.stem for p in PROFILES.glob("*.yaml")} | {
        word for p in PAGES for block in blocks(p) for word in block.words if word.endswith(".yaml")
    }
    for command in every_command(page):
        if command.startswith("make "):
            target, *variables = command.split()[1:]
            assert re.search(rf"^{target}:", makefile, re.M), f"{page.name}: {command}"
            assert all(variable.split("=")[0] in ("P", "PYTHON") for variable in variables), (
                f"{page.name}: {command}"
            )
        arguments = eyas_arguments(command)
        if arguments is None:
            continue
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                found = build_parser().parse_args(arguments)
            except SystemExit as end:
                assert end.code == 0, f"{page.name}: {command}: {said.getvalue()}"
                continue
        profile = getattr(found, "profile", "demo")
        assert profile in profiles or profile in ("NAME", "P"), f"{page.name}: {command}"
        given = {}
        for name, value in getattr(found, "p", None) or []:
            assert name in SETTINGS, f"{page.name}: {command}"
            if not re.search(r"\b[A-Z]+\b", value) and not value.startswith("$"):
                given[name] = value
        if given.get("loss") == "brier":  # docs/extending.md adds it
            del given["loss"]
        Config.create(**given)


def test_long_commands_have_a_reason():
    named = {
        command
        for page in PAGES
        for block in blocks(page)
        if "long" in block.marks
        for command in block.commands()
    }
    named |= {
        command for page in PAGES for command in every_command(page) if command.startswith("make ")
    }
    assert named == set(LONG)


@each_page
def test_json_and_yaml_are_whole(page):
    for block in blocks(page):
        if block.language == "json":
            for line in (
                block.text.strip().split("\n")
                if len(block.text.strip().split("\n")) > 1 and block.text.startswith('{"')
                else [block.text]
            ):
                json.loads(line)
        if block.language == "yaml":
            Config.create(**yaml.safe_load(block.text))


def test_every_module_is_listed():
    listed = "".join(block.text for block in blocks(DOCS / "extending.md") if "tree" in block.words)
    library = ROOT / "lib" / "eyas"
    modules = {
        p.relative_to(library).as_posix()
        for p in library.rglob("*.py")
        if p.name not in ("__init__.py", "__main__.py")
    }
    assert modules == set(re.findall(r"\b([\w/]+\.py)\b", listed))


def test_every_kind_of_command_runs_somewhere():
    """What a page only names in a sentence, some page runs: each command of the command line that
    is named at all.
    """

    def kind(arguments: list[str]) -> tuple[str, ...]:
        parser, words = build_parser(), []
        for argument in arguments:
            choices = next(
                (a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)),
                {},
            )
            if argument not in choices:
                break
            parser, words = choices[argument], [*words, argument]
        return tuple(words)

    run, named = set(), {}
    for page in PAGES:
        for block in (b for b in blocks(page) if b.language == "bash"):
            for command in block.commands():
                if arguments := eyas_arguments(command):
                    (run if not block.marks & {"gpu", "long", "peer"} else set()).add(
                        kind(arguments)
                    )
        named |= {
            kind(arguments): f"{page.name}: {command}"
            for command in every_command(page, refused=True)
            if (arguments := eyas_arguments(command))
        }
    missing = {
        words: where for words, where in named.items() if words not in run and words not in NOT_RUN
    }
    assert not missing
    assert set(NOT_RUN) <= set(named), "NOT_RUN names what no page has"


# ---- running them


PYTEST_RUNS = """
import ast, sys, pytest
for arguments in ast.literal_eval(sys.argv[1]):
    if code := pytest.main(arguments):
        sys.exit(f"pytest {arguments} ended with {code}")
"""


class World:
    """A folder in which the commands of the pages run, one after the other."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.said: list[str] = []  # what the last block printed, lines
        for name in ("models", "prompts", "data"):
            (folder / name).mkdir()
        self.environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "lib"),
            "EYAS_DATA": str(folder / "data"),
        }
        make_tiny_target(folder / "models" / "my-model", n_blocks=8, seed=3)

    def here(self, text: str) -> str:
        """A page's text as it is meant here."""
        for name in ("models", "prompts"):
            text = re.sub(rf"(?<![\w./])/{name}/", f"{self.folder}/{name}/", text)
        for old, new in SMALLER.items():
            text = text.replace(old, new)
        if "http://127.0.0.1:30000" in text:
            text = text.replace("http://127.0.0.1:30000", find_server(self.config()).url)
        return text

    def config(self, **overrides) -> Config:
        return Config.load(str(self.folder / "my.yaml"), **overrides)

    def run(self, page: Path) -> None:
        tests = []  # arguments of each pytest command, run in one process when all else has run
        for block in blocks(page):
            if block.language == "yaml" and block.words:
                (self.folder / block.words[0]).write_text(self.here(block.text))
            elif block.language == "bash" and not block.marks & {"gpu", "long", "peer"}:
                self.said = []
                for command in block.commands():
                    if "copy" in block.marks and command.startswith("python -m pytest "):
                        tests.append(shlex.split(command)[3:])
                        continue
                    code, text = self.shell(self.here(command), "copy" in block.marks)
                    self.said += text.replace("\r", "\n").splitlines()
                    assert (code != 0) == ("fails" in block.marks), (
                        f"{page.name}: {command} ended with {code}:\n{text[-3000:]}"
                    )
            elif block.language == "diff":
                self.apply(block)
            elif block.language == "python" and block.words[:1] == ("cell",):
                self.add_cell(block)
            elif block.language == "python":
                code, text = self.python(self.here(block.text), "copy" in block.words)
                self.said = text.splitlines()
                assert code == 0, f"{page.name}:\n{block.text}\n{text[-3000:]}"
            elif block.language == "text" and not block.words:
                self.compare(page, block)
        if tests:
            code, text = self.process([sys.executable, "-c", PYTEST_RUNS, repr(tests)], copy=True)
            assert code == 0, f"{page.name}: {tests}\n{text[-3000:]}"

    # ---- a copy of the repository, for what a page adds to it

    @functools.cached_property
    def copy(self) -> Path:
        folder = self.folder / "copy"
        for name in (
            "lib",
            "tests",
            "notebooks",
            "patches",
            "benchmarks",
            "data_manifests",
            "requirements",
        ):
            shutil.copytree(
                ROOT / name,
                folder / name,
                ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", ".ipynb_checkpoints"),
            )
        for name in ("pyproject.toml", "README.md", "Makefile"):
            shutil.copy(ROOT / name, folder / name)
        shutil.copy(self.folder / "my.yaml", folder / "my.yaml")
        return folder

    def apply(self, block: Block) -> None:
        """The text of the lines with a blank or `-` in front stands in the file once; that of the
        lines with a blank or `+` takes its place.
        """
        path = self.copy / block.words[0]
        lines = block.text.rstrip("\n").split("\n")
        assert all(line[:1] in (" ", "+", "-", "") for line in lines), block
        old, new = ("\n".join(line[1:] for line in lines if line[:1] != mark) for mark in "+-")
        found = path.read_text().count(old)
        assert found == 1, f"{block.words[0]} has {found} times\n{old}"
        path.write_text(path.read_text().replace(old, new))

    def add_cell(self, block: Block) -> None:
        path = self.copy / block.words[1]
        notebook = nbformat.read(path, as_version=4)
        notebook.cells.append(nbformat.v4.new_code_cell(block.text.rstrip("\n")))
        nbformat.write(notebook, path)

    # ---- running

    def python(self, text: str, copy: bool) -> tuple[int, str]:
        if copy:
            return self.process([sys.executable, "-c", text], copy)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(text, "page", "exec"), {"__name__": "page"})
        return 0, out.getvalue()

    def process(self, command: list[str], copy: bool) -> tuple[int, str]:
        environment = self.environment | ({"PYTHONPATH": str(self.copy / "lib")} if copy else {})
        done = subprocess.run(
            command,
            cwd=self.copy if copy else self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        return done.returncode, done.stdout

    def shell(self, command: str, copy: bool) -> tuple[int, str]:
        """Commands of eyas run in this process, which has imported everything already; others, and
        those of the copy, in one of their own.
        """
        arguments = eyas_arguments(command)
        if (
            copy
            or arguments is None
            or not command.startswith("python -m eyas ")
            or re.search(r"[|>;&]", command)
        ):
            return self.process(["bash", "-ec", command], copy)
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            try:
                code = main(arguments)
            except SystemExit as end:
                code = end.code
        return code, out.getvalue()

    def compare(self, page: Path, block: Block) -> None:
        """Each line of the page is a line that was printed, in this order; numbers and names of
        sizes may be others, `...` is anything.
        """

        def plain(line: str) -> str:
            line = line.replace(str(self.folder), "")
            line = re.sub(r"\b0x[0-9a-f]+|\b[0-9a-f]{12,64}\b", "#", line)
            line = re.sub(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", "#", line)
            return " ".join(
                re.sub(
                    r"# (?:[KMGT]iB|bytes|B)\b|# (?:s|min|minutes)(?: # s)?\b", "# unit", line
                ).split()
            )

        said = [plain(line) for line in self.said]
        at = 0
        for line in filter(str.strip, block.text.splitlines()):
            pattern = ".*".join(map(re.escape, plain(line).split("...")))
            found = next((i for i in range(at, len(said)) if re.fullmatch(pattern, said[i])), None)
            assert found is not None, f"{page.name} shows\n  {line}\nprinted was\n  " + "\n  ".join(
                self.said
            )
            at = found + 1


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """After docs/your-model.md, which makes the run that the other pages speak of."""
    folder = tmp_path_factory.mktemp("world")
    made = World(folder)
    before, threads = Path.cwd(), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EYAS_DATA", str(folder / "data"))
        os.chdir(folder)
        try:
            made.run(DOCS / "your-model.md")
            yield made
        finally:
            os.chdir(before)
            torch.set_num_threads(threads)
            with contextlib.suppress(EyasError, OSError):
                server = find_server(made.config())
                if server is not None:
                    server.down()


@pytest.mark.server
@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.stem != "your-model"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_commands_run(page, world):
    """Every block that is not marked; your-model.md has run when the world was made."""
    world.run(page)


# ---- tables of fields


def documented(page: Path, heading: str) -> tuple[set[str], set[str]]:
    """(names, those that are there only sometimes) in the first column of the table below a
    heading.
    """
    text = re.search(
        rf"^#+ {re.escape(heading)}\n(.*?)(?=^#)", page.read_text() + "\n#", re.M | re.S
    ).group(1)
    names, sometimes = set(), set()
    for first, meaning in re.findall(r"^\| (`[^|]+`) \| ([^|]+)", text, re.M):
        found = set(re.findall(r"`([^`]+)`", first))
        names |= found
        if meaning.startswith("only "):
            sometimes |= found
    assert names, f"{page.name}: no table under {heading!r}"
    return names, sometimes


def leaves(value, name: str = "") -> set[str]:
    """Dotted names of the values of a JSON-like value; [] for the objects of a list."""
    if isinstance(value, dict) and value:
        return set().union(
            *(leaves(v, f"{name}.{k}" if name else str(k)) for k, v in value.items())
        )
    if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
        return set().union(*(leaves(v, f"{name}[]") for v in value))
    return {name}


def check_fields(page: Path, heading: str, found: set[str]) -> None:
    """Each real field is in the table, by itself or under its parent, and each of the table is
    real.
    """
    names, sometimes = documented(page, heading)

    def pattern(name: str) -> str:
        return re.sub(r"(?<=[_.])[ib](?=$|\\\.)", r"\\d+", re.escape(name)) + r"(?:$|[.\[])"

    missing = {
        field for field in found if not any(re.match(pattern(name), field) for name in names)
    }
    made_up = {
        name
        for name in names - sometimes
        if not any(re.match(pattern(name), field) for field in found)
    }
    assert not missing and not made_up, (
        f"{page.name}, {heading}: not in the table {sorted(missing)}; in no file {sorted(made_up)}"
    )


def columns(path: Path) -> set[str]:
    return set(pd.read_parquet(path).columns)


def tensors(path: Path) -> set[str]:
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


@pytest.mark.server
def test_fields(world):
    """docs/formats.md against the files of the run that the pages have made."""
    page, run = DOCS / "formats.md", world.config().run_dir
    store, drafter, acceptance = run / "store", run / "drafter", run / "acceptance"
    for folder, names in (
        (store, "manifest data_config verification parity"),
        (acceptance, "acceptance walk speed"),
    ):
        for name in names.split():
            check_fields(page, f"{name}.json", leaves(read_json(folder / f"{name}.json")))
    check_fields(page, "index.parquet", columns(store / "index.parquet"))
    check_fields(page, "A shard", tensors(next((store / "shards").glob("*.safetensors"))))
    check_fields(page, "head.safetensors", tensors(store / "head.safetensors"))
    check_fields(page, "drafter.safetensors", tensors(drafter / "drafter.safetensors"))
    check_fields(page, "metrics.parquet", columns(drafter / "metrics.parquet"))
    for name in ("acceptance", "baselines"):
        check_fields(page, f"{name}.parquet", columns(acceptance / f"{name}.parquet"))
    for path in sorted((ROOT / "reports").glob("*/run.json")):
        check_fields(page, "run.json", leaves(read_json(path)))
    writers = (served.served_record, served._settings, served._position_of_both, served._both_sides)
    source = "".join(map(inspect.getsource, (*writers, served.round_trip, served.check)))
    assert all(f'"{name}"' in source for name in documented(page, "served.json")[0])
    said = read_record(drafter)
    text = page.read_text()
    assert all(f"`{name}`" in text for name in said), sorted(said)


def test_fields_of_a_sweep(target):
    """The tables of a study, from made-up counts and states."""
    text = (DOCS / "formats.md").read_text()
    made = {
        "table": layers.choices_table(
            made_counts(("2 4 5", 0, np.full(3, 2), np.full(3, 4))),
            target,
            FakeStore,
            {(2, 4, 5): "default"},
            0,
        ),
        "forward": layers.forward_selection(
            [1], lambda options: {o: 1.0 for o in options}, lambda choice: 0.0, 1, 1
        ),
    }
    for name, table in made.items():
        row = re.search(rf"^\| `{name}.parquet` \| [^|]+ \| ([^|]+) \|$", text, re.M).group(1)
        assert re.findall(r"`(\w+)`", row) == list(table.columns)
