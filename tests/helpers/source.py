"""What the source of eyas imports, read without running it."""

import ast
from pathlib import Path

from eyas.files import ROOT


def source_of(module: str) -> Path:
    return ROOT / "lib" / "eyas" / f"{module.replace('.', '/')}.py"


def place(module: str, name: str) -> tuple[str, str | None]:
    return (f"{module}.{name}", None) if source_of(f"{module}.{name}").is_file() else (module, name)


def imports_of(tree: ast.Module) -> dict[str, tuple[str, str | None]]:
    """Names of eyas that are imported somewhere in it: name -> (module, its name there; None: the
    module itself).
    """
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("eyas."):
            found |= {
                a.asname or a.name: place(node.module.removeprefix("eyas."), a.name)
                for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module == "eyas":
            found |= {a.asname or a.name: (a.name, None) for a in node.names}
    return found
