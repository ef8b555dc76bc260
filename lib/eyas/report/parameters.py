"""Turn the parameters cell of a notebook into its Config, and say which settings a notebook reads.

- A notebook declares `profile` and the few settings that it is about, with the value None.
  None means: as the profile says. A reader changes a value in the cell.
- papermill adds a cell of its own after it (`-p NAME VALUE`, `-f profile.yaml`). That cell may hold
  settings that the notebook does not declare: they count too, and an unknown name is an EyasError.
- `notebook_config(globals())` puts these on top of the profile: the last value of a name counts.
- The notebook's metadata name what it reads: `"settings": ["train", "compare_run"]`, each a command
  of `eyas.effects.READS` or a setting. `python -m eyas report` compares these settings with those
  of the last run.
"""

import ast
from html import escape
from pathlib import Path
from typing import Any

from eyas.config import SETTINGS, Config
from eyas.effects import READS
from eyas.errors import EyasError
from eyas.files import read_json
from eyas.report.notebook import declared_parameters

PROFILE = "profile"  # the one declared name that is no setting
INJECTED = "# Parameters"  # how papermill begins the cell that it adds
ANSWER = '<div class="eyas-answer">'  # how the HTML of an answer begins
WAITING = "The answer appears here when all cells have run."


def open_notebook(namespace: dict[str, Any]) -> tuple[Config, "Answer"]:
    """Return the Config and the place of the answer; print the settings, and draw figures as SVG.

    Call it as `open_notebook(globals())` in the cell after the parameters cell.
    """
    from matplotlib_inline.backend_inline import set_matplotlib_formats

    set_matplotlib_formats("svg")
    answer = Answer()
    config = notebook_config(namespace)
    shown = {*config.changed, *namespace}
    print(config.describe(name for name in SETTINGS if name in shown))
    return config, answer


def notebook_config(namespace: dict[str, Any]) -> Config:
    """Return the Config of a notebook from its profile and the settings among its variables.

    EyasError: no such profile, a value that the setting does not take, a name in the cell that
    papermill added which is neither a setting nor a name that the notebook declares.
    """
    changed = {
        name: value for name, value in namespace.items() if name in SETTINGS and value is not None
    }
    unknown = {name: namespace.get(name) for name in _undeclared(namespace.get("In", ()))}
    return Config.load(namespace.get(PROFILE, "demo"), **changed, **unknown)


def _undeclared(sources: list[str]) -> set[str]:
    """Return the names that the last cell of papermill sets, but for settings and names of before.

    `sources` are the cells that IPython has executed, in order.
    """
    known, undeclared = {PROFILE, *SETTINGS}, set()
    for source in sources:
        if source.startswith(INJECTED):
            undeclared = _assigned(source) - known
        else:
            known |= _assigned(source)
    return undeclared


def _assigned(source: str) -> set[str]:
    """Return the names that the statements of a cell assign; none where it is not plain Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a magic command
        return set()
    names = set()
    for statement in tree.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            names |= {
                node.id
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
    return names


class Answer:
    """The place at the top of a notebook where its answer appears when the cells have run.

    In JupyterLab it replaces a line under the parameters. A page shows what `says` prints instead.
    """

    def __init__(self):
        from IPython.display import HTML, display

        self._place = display(HTML(_answer_html(WAITING)), display_id=True)

    def says(self, text: str) -> None:
        """Print the answer here and show it at the top of the notebook."""
        from IPython.display import HTML

        print(text)
        if self._place is not None:  # None outside of a notebook
            self._place.update(HTML(_answer_html(text)))


def _answer_html(text: str) -> str:
    return f"{ANSWER}<b>Answer.</b> {escape(text).replace(chr(10), '<br>')}</div>"


# ---- what a notebook file declares and reads


def settings_read(path: Path) -> frozenset[str]:
    """Return the names of the settings that the notebook reads, as its metadata say.

    Without such metadata: all settings where it declares a profile, else those that it declares.
    EyasError: a name in the metadata that is neither a command of `eyas.effects` nor a setting.
    """
    declared = set(declared_parameters(path))
    entries = (read_json(path)["metadata"].get("eyas") or {}).get("settings")
    if entries is None:
        return frozenset(SETTINGS) if PROFILE in declared else frozenset(declared)
    names = declared - {PROFILE}
    for entry in entries:
        if entry not in READS and entry not in SETTINGS:
            raise EyasError(
                f"the metadata of {path.name} name the settings of {entry!r}",
                "a command of eyas.effects.READS or the name of a setting",
                f"change `settings` in the metadata of {path.name}",
            )
        names |= READS.get(entry, {entry})
    return frozenset(names)


def resolved_settings(
    path: Path, profile: dict[str, Any], overrides: dict[str, Any]
) -> dict[str, Any]:
    """Return the value of each setting that the notebook reads, when `report` runs it.

    `profile` holds the settings of the profile, `overrides` those of `-p`. A value that stands in
    the parameters cell counts more than the profile's where the notebook declares a profile.
    """
    declared = declared_parameters(path)
    cell = {name: value for name, value in declared.items() if value is not None}
    if cell.pop(PROFILE, None) is None:
        values = cell | profile | overrides
    else:
        values = profile | cell | overrides
    config = Config.create(**values)
    return {name: plain(getattr(config, name)) for name in sorted(settings_read(path))}


def injected_parameters(
    path: Path, profile: str, given: dict[str, Any], overrides: set[str]
) -> dict[str, Any]:
    """Return what papermill adds to the notebook: the profile and `-p` where it declares a profile.

    Else all of `given`, the settings of profile and `-p` that the notebook declares.
    """
    if PROFILE not in declared_parameters(path):
        return given
    if profile.endswith((".yaml", ".yml")):  # the kernel works in another folder
        profile = str(Path(profile).absolute())
    return {PROFILE: profile} | {n: value for n, value in given.items() if n in overrides}


def plain(value: Any) -> Any:
    """Return a tuple as a list: papermill makes a string of a tuple."""
    return list(value) if isinstance(value, tuple) else value
