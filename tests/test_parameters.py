"""The parameters cell: what a reader, papermill and `report` put into it; which settings a notebook
reads, and that what it calls exists.
"""

import ast
import importlib
import json
from pathlib import Path

import nbformat
import papermill
import pytest

from eyas.config import Config
from eyas.effects import READS
from eyas.errors import EyasError
from eyas.files import ROOT
from eyas.report.parameters import (
    injected_parameters,
    notebook_config,
    resolved_settings,
    settings_read,
)

CELL = 'profile: str = "demo"  # profile\nepochs: float = None  # epochs\nseed: int = None  # seed'
SHOW = "from eyas.report.parameters import notebook_config\nconfig = notebook_config(globals())"


def write_notebook(
    path: Path, cell: str = CELL, code: str = SHOW, eyas: dict | None = None
) -> Path:
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(cell, metadata={"tags": ["parameters"]}),
            nbformat.v4.new_code_cell(code),
        ],
        metadata={"kernelspec": {"name": "python3", "display_name": "", "language": "python"}}
        | ({} if eyas is None else {"eyas": eyas}),
    )
    nbformat.write(notebook, path)
    return path


def test_none_is_as_the_profile_says_and_a_value_counts_more(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("run_name: mine\nepochs: 5.0\nseed: 4\n")
    assert notebook_config({"profile": "smoke", "epochs": None}) == Config.load("smoke")
    changed = notebook_config({"profile": str(mine), "epochs": None, "seed": 7, "other": 3})
    assert (changed.run_name, changed.epochs, changed.seed) == ("mine", 5.0, 7)
    with pytest.raises(EyasError, match="seed = 'two'"):
        notebook_config({"profile": "demo", "seed": "two"})
    with pytest.raises(EyasError, match="no profile 'demmo'"):
        notebook_config({"profile": "demmo"})


@pytest.mark.kernel
def test_papermill_hands_on_settings_that_the_cell_does_not_declare(tmp_path):
    """As `papermill -f profile.yaml` does, and refuses a name that no setting has."""
    show = SHOW + "\nprint(config.epochs, config.seed, config.train_samples, config.run_name)"
    path = write_notebook(tmp_path / "one.ipynb", code=show)
    given = {"run_name": "mine", "epochs": 5.0, "train_samples": 7}
    papermill.execute_notebook(path, tmp_path / "out.ipynb", given, progress_bar=False)
    executed = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    assert executed.cells[-1].outputs[0].text == "5.0 0 7 mine\n"
    with pytest.raises(papermill.PapermillExecutionError, match="epochs"):
        papermill.execute_notebook(path, tmp_path / "out.ipynb", {"epocs": 5.0}, progress_bar=False)


def test_a_name_of_the_notebooks_own_is_no_unknown_setting():
    sources = ["profile = 'demo'\nmine = 1", "# Parameters\nmine = 2\nseed = 3"]
    assert notebook_config({"mine": 2, "seed": 3, "In": sources}).seed == 3
    with pytest.raises(EyasError, match="unknown setting minee"):
        notebook_config({"minee": 2, "In": ["mine = 1", "# Parameters\nminee = 2"]})


def test_which_settings_a_notebook_reads(tmp_path):
    read = settings_read(
        write_notebook(tmp_path / "a.ipynb", eyas={"settings": ["train", "compare_run"]})
    )
    assert read == READS["train"] | {"compare_run", "epochs", "seed"}
    assert "max_total_tok" in settings_read(write_notebook(tmp_path / "b.ipynb")), "all of them"
    old = write_notebook(tmp_path / "c.ipynb", 'run_name: str = "demo"  # run')
    assert settings_read(old) == {"run_name"}
    wrong = write_notebook(tmp_path / "d.ipynb", eyas={"settings": ["trian"]})
    with pytest.raises(EyasError, match="'trian'"):
        settings_read(wrong)


def test_a_report_resolves_as_the_notebook_does(tmp_path):
    """A value that was saved in the cell counts more than the profile's, and less than -p."""
    cell = CELL.replace("float = None", "float = 3.0")
    path = write_notebook(tmp_path / "a.ipynb", cell, eyas={"settings": ["train"]})
    profile = {"run_name": "mine", "epochs": 5.0, "batch_tok": 64}
    for overrides, epochs in (({}, 3.0), ({"epochs": "9"}, 9.0)):
        settings = resolved_settings(path, profile, overrides)
        assert (settings["epochs"], settings["batch_tok"], settings["seed"]) == (epochs, 64, 0)
        given = {"run_name": "mine", "epochs": 9.0, "batch_tok": 64}
        injected = injected_parameters(path, "mine.yaml", given, set(overrides))
        assert injected.pop("profile") == str(Path("mine.yaml").absolute())
        assert injected == {name: given[name] for name in overrides}
        (tmp_path / "mine.yaml").write_text(json.dumps(profile))
        here = {"profile": str(tmp_path / "mine.yaml"), "epochs": 3.0, "seed": None} | injected
        assert notebook_config(here).epochs == settings["epochs"]


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_what_a_notebook_calls_exists(path):
    """Each name that a cell takes from a module of eyas, in cells that only a long run reaches."""
    cells = nbformat.read(path, as_version=4).cells
    tree = ast.parse("\n".join(c.source for c in cells if c.cell_type == "code"))
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "eyas":
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                names[alias.asname or alias.name] = getattr(module, alias.name)
    assert names
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        owner = names.get(node.value.id)
        assert owner is None or hasattr(owner, node.attr), f"{node.value.id}.{node.attr}"
