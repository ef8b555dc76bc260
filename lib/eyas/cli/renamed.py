"""The commands of earlier versions: what each one is called now."""

import shlex

from eyas.cli.options import PROG

RENAMED = {
    "compare": "evaluate compare",
    "decode": "evaluate decode",
    "export --table": "drafter layer-ids",
    "export": "drafter export",
    "import-drafter": "drafter import",
    "index": "report index",
    "profile --explain": "settings",
    "profile": "settings",
    "serve-check": "evaluate served",
    "store export": "data export",
    "store import": "data import",
    "store": "data",
    "summary": "report summary",
    "sweep": "study layers",
    "target": "doctor --target",
    "tune": "study server",
    "walk": "evaluate offline",
}


def renamed(words: list[str]) -> str:
    """Return one sentence with the new form of an old command; "" where the command is none."""
    for length in (2, 1):
        old = " ".join(words[:length])
        if old in RENAMED:
            break
    else:
        return ""
    rest = words[length:]
    if old == "target":
        rest = [_named_target(rest)]
    command = " ".join([PROG, RENAMED[old], *map(shlex.quote, rest)])
    return f"the command `{old}` has a new name; next: {command}"


def _named_target(words: list[str]) -> str:
    """Return the target that `-p target NAME` gave, or the embedded one."""
    for i, word in enumerate(words):
        if word == "-p" and words[i + 1 : i + 2] == ["target"] and len(words) > i + 2:
            return words[i + 2]
    return "embedded"
