"""The command line: one screen that reads as the road, old names that lead to the new ones."""

import argparse
import inspect
import re
import shlex

import pytest

from eyas.cli import build_parser, main

ROAD = (
    "doctor plan server prompts extract verify parity train drafter evaluate study report job data "
    "settings"
).split()
COMMANDS = {
    "doctor": "",
    "plan": "",
    "server": "up wait status down command",
    "prompts": "build import show generate",
    "extract": "",
    "verify": "",
    "parity": "",
    "train": "",
    "drafter": "import export layer-ids",
    "evaluate": "offline decode served compare",
    "study": "layers server",
    "report": "index summary",
    "job": "start list follow stop",
    "data": "list rm export import",
    "settings": "",
}
OLD = [  # what was typed -> what the sentence says to type now
    ("target", "doctor --target embedded"),
    ("target -p target '/models/my model'", "doctor --target '/models/my model'"),
    ("target -p run_name x -p target /models/mine", "doctor --target /models/mine"),
    ("profile", "settings"),
    ("profile --explain", "settings"),
    ("profile -p epochs 2", "settings -p epochs 2"),
    ("walk --profile smoke", "evaluate offline --profile smoke"),
    ("decode", "evaluate decode"),
    ("decode -p run_name 'two words'", "evaluate decode -p run_name 'two words'"),
    ("serve-check", "evaluate served"),
    ("compare -p compare_run x", "evaluate compare -p compare_run x"),
    ("export --to vllm", "drafter export --to vllm"),
    ("export --table --blocks 61", "drafter layer-ids --blocks 61"),
    ("import-drafter FOLDER --ids-of vllm", "drafter import FOLDER --ids-of vllm"),
    (
        "store export --to specforge --out F",
        "data export --to specforge --out F",
    ),
    (
        "store import --from specforge F",
        "data import --from specforge F",
    ),
    ("sweep", "study layers"),
    ("tune", "study server"),
    ("index --out F", "report index --out F"),
    ("summary demo", "report summary demo"),
]


def lists_commands(action: argparse.Action) -> bool:
    return isinstance(action, argparse._SubParsersAction)


def commands_below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next((action.choices for action in parser._actions if lists_commands(action)), {})


def runnable(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return every command that runs a function, with its parser."""
    found = {parser.get_default("command"): parser} if parser.get_default("run") else {}
    for below in commands_below(parser).values():
        found |= runnable(below)
    return found


RUNNABLE = runnable(build_parser())


def read_by(function) -> set[str]:
    """Return the arguments that a function reads, or hands on to a function that reads them."""
    source = inspect.getsource(function)
    names = set(re.findall(r"\bargs\.(\w+)", source))
    for called in re.findall(r"\b(\w+)\(args\)", source.partition("\n")[2]):
        names |= read_by(function.__globals__[called])
    return names


def test_help_is_one_screen_that_lists_the_road_in_order(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 0 and len(lines) <= 24
    assert [line.split()[0] for line in lines if re.match(r"  \w", line)] == ROAD


def test_the_commands_are_these():
    top = build_parser()
    found = {name: " ".join(commands_below(below)) for name, below in commands_below(top).items()}
    assert found == COMMANDS and list(found) == ROAD


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_argument_is_read(name):
    """Nothing can be typed that has no effect."""
    parser = RUNNABLE[name]
    declared = {action.dest for action in parser._actions if not lists_commands(action)}
    unread = declared - {"help"} - read_by(parser.get_default("run"))
    assert not unread


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_command_explains_itself(name, capsys):
    """What it does, and what each argument means."""
    parser = RUNNABLE[name]
    assert parser.description.endswith(".") and parser.description[0].isupper()
    assert all(action.help for action in parser._actions if not lists_commands(action))
    with pytest.raises(SystemExit) as end:
        main([*name.split(), "--help"])
    assert end.value.code == 0 and f"usage: python -m eyas {name}" in capsys.readouterr().out


@pytest.mark.parametrize("old, new", OLD)
def test_an_old_command_says_its_new_name_in_one_sentence(old, new, capsys):
    assert main(shlex.split(old)) == 2
    streams = capsys.readouterr()
    assert not streams.out and streams.err.count("\n") == 1
    assert streams.err.endswith(f"has a new name; next: python -m eyas {new}\n")
    assert build_parser().parse_args(shlex.split(new)).run


def test_report_takes_its_options_before_the_name_of_a_command():
    args = build_parser().parse_args(["report", "--out", "F", "summary", "demo"])
    assert str(args.out) == "F" and args.command == "report summary"
    args = build_parser().parse_args(["report", "--profile", "smoke"])
    assert args.out is None and args.command == "report"


@pytest.mark.parametrize("name", ["data", "job"])
def test_data_and_job_alone_list(name, data, capsys):
    assert main([name]) == 0
    alone = capsys.readouterr().out
    assert main([name, "list"]) == 0 and capsys.readouterr().out == alone != ""


def test_a_job_is_named_as_it_is_typed(data, capsys):
    """`job ... study layers`: the words of the command, not a name of its own."""
    assert main(["job", "stop", "study", "layers", "-p", "run_name", "x"]) == 2
    said = capsys.readouterr().err
    assert "run 'x' has no job 'study layers'" in said
    assert "next: python -m eyas job start study layers -p run_name x" in said
    assert main(["job", "start", "study", "server"]) == 2
    assert "one of extract, train, study layers" in capsys.readouterr().err
