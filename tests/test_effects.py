"""A setting that has an effect is obeyed, and one that has none is said to have none."""

import argparse
import ast
import functools
import inspect
import json
import re
import sys
from pathlib import Path

import pandas as pd
import pytest

from eyas.cli import build_parser, main
from eyas.config import Config
from eyas.effects import READS
from eyas.models.drafter import read_record
from eyas.models.target import load_target
from eyas.store.reader import Store
from helpers.runs import equal, options, weights_of
from helpers.source import imports_of, source_of
from helpers.stores import write_random_store
from helpers.tiny import make_tiny_target


def functions(parser: argparse.ArgumentParser) -> dict[str, tuple[str, str]]:
    """Return the module of eyas and the function of every command below this parser."""
    found = {}
    if run := parser.get_default("run"):
        name = parser.get_default("command")
        found[name] = (run.__module__.removeprefix("eyas."), run.__name__)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                found |= functions(below)
    return found


FUNCTIONS = functions(build_parser())
STARTS = {
    name: FUNCTIONS[name]
    for name in READS
    if not name.startswith(("job ", "server wait", "server status", "server down"))
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(
        str(make_tiny_target(tmp_path_factory.mktemp("targets") / "tiny", n_blocks=6))
    )


@functools.cache
def module(name: str):
    """(syntax tree, its functions and classes, their texts, what it imports) of a module of eyas;
    None where there is none.
    """
    path = source_of(name)
    if not path.is_file():
        return None
    tree = ast.parse(path.read_text())
    defined = {
        node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    return (
        tree,
        defined,
        {n: ast.unparse(node) for n, node in defined.items()},
        imports_of(tree) | {n: (name, n) for n in defined},
    )


@functools.cache
def named(text: str) -> frozenset[str]:
    """Settings that a text reads from a configuration, also by way of Config's properties and
    methods.
    """
    names = set(
        re.findall(
            r"(?<![.\w])(?:config|run|serving|self\.config|config_of\(args\))\.([a-z_0-9]+)", text
        )
    )
    found = names & set(Config.__dataclass_fields__)
    for name in names - set(Config.__dataclass_fields__):
        member = inspect.getattr_static(Config, name, None)
        member = member.fget if isinstance(member, property) else member
        if inspect.isfunction(member) and name not in ("options", "describe"):
            found |= named(inspect.getsource(member).replace("self.", "config."))
    return frozenset(found)


def reached(start: tuple[str, str]) -> set[str]:
    """Settings that the code which a command reaches reads, by names alone: too many rather than
    too few.
    """
    found, seen, waiting = set(), set(), {start}
    while waiting:
        place = waiting.pop()
        known = module(place[0])
        if (
            place in seen
            or place[0] in ("config", "report.run", "jobs")
            or known is None
            or place[1] not in known[1]
        ):
            continue
        seen.add(place)
        _, defined, texts, names = known
        if re.search(
            r"(config|run): Config\b|config_of\(args\)|def \w+\(config[,)]", texts[place[1]]
        ):
            found |= named(texts[place[1]])
        own = {
            n.id
            for n in ast.walk(defined[place[1]])
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }  # a variable is no function
        for node in ast.walk(defined[place[1]]):
            if isinstance(node, ast.Name) and node.id in names.keys() - own:
                waiting.add(names[node.id])
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and names.get(node.value.id, ("", ""))[1] is None
            ):
                waiting.add((names[node.value.id][0], node.attr))
    return found


@pytest.mark.parametrize("command", STARTS)
def test_the_table_names_what_the_commands_code_reads(command):
    """The table lacks nothing that is reached: it would call a setting with an effect idle."""
    missing = reached(STARTS[command]) - READS[command]
    assert not missing, f"{command} reads {sorted(missing)}"


BY_NAME = {  # read by getattr with a table of names, or in processes of their own
    "train": set(READS["train"]),
    "study layers": set(READS["train"]),
    "study server": set(READS["study server"]),
}


@pytest.mark.parametrize("command", STARTS)
def test_the_table_names_nothing_that_is_not_read(command):
    extra = READS[command] - reached(STARTS[command]) - BY_NAME.get(command, set())
    assert not extra, f"nothing that {command} reaches reads {sorted(extra)}"


class Reads:
    """Records which settings are read from a Config, but for its own checks and copies."""

    def __init__(self, monkeypatch):
        self.names: set[str] = set()
        plain = Config.__getattribute__

        def read(config, name):
            if name in Config.__dataclass_fields__:
                caller = sys._getframe(1).f_code
                checks = caller.co_name.startswith("check_") or caller.co_name == "verified_tok"
                if not checks and Path(caller.co_filename).name != "dataclasses.py":
                    self.names.add(name)
            return plain(config, name)

        monkeypatch.setattr(Config, "__getattribute__", read)


def test_what_commands_really_read_is_in_the_table(data, target, monkeypatch, capsys):  # noqa: F811
    write_random_store(Config.create(run_name="x").store_dir, target)
    questions = data / "questions.jsonl"
    questions.write_text(
        json.dumps(
            {
                "id": "q",
                "category": "chat",
                "topic": "",
                "split": "heldout",
                "messages": [{"role": "user", "content": "Hi"}],
            }
        )
        + "\n"
    )
    few = {
        "eval_set": str(questions),
        "decode_new_tok": "8",
        "baseline_prompts": "1",
        "check_bf16_prompts": "1",
        "speed_steps": "1",
        "speed_topk": "1",
    }
    settings = options(target, "x", prompt_set=str(questions), **few)
    for command in (
        "plan",
        "prompts show",
        "train",
        "evaluate offline",
        "evaluate decode",
        "drafter export",
        "server command",
    ):
        with monkeypatch.context() as patch:
            reads = Reads(patch)
            assert main([*command.split(), *settings]) == 0
        assert reads.names and reads.names <= READS[command], (
            f"{command} reads {sorted(reads.names - READS[command])}"
        )


@pytest.mark.parametrize(
    "setting, value",
    [
        ("max_length", "64"),
        ("prompt_set", "/nowhere/file.jsonl"),
        ("speculative_num_steps", "2"),
        ("drafter_run", "other"),
    ],
)
def test_a_setting_without_effect_is_said(data, target, capsys, setting, value):  # noqa: F811
    """When a training starts, and when it goes on."""
    write_random_store(Config.create(run_name="x").store_dir, target)
    for _ in range(2):
        assert main(["train", *options(target, "x", **{setting: value})]) == 0
        said = capsys.readouterr().err
        assert (
            f"note: setting {setting} has no effect on `train`" in said
            and said.count("no effect") == 1
        )


def test_a_setting_with_an_effect_is_not_said_to_have_none(data, target, capsys):  # noqa: F811
    write_random_store(Config.create(run_name="x").store_dir, target)
    for command in ("train", "evaluate offline", "drafter export"):
        few = ["-p", "run_name", "x", "-p", "target", str(target.folder)]
        settings = options(target, "x") if command == "train" else few
        assert main([*command.split(), *settings]) == 0
        assert "no effect" not in capsys.readouterr().err


def test_train_samples_and_heldout_samples_are_obeyed(data, target, capsys):  # noqa: F811
    """The training of a part is that of a store which has only that part; with as many as the store
    has, it is that of the whole store.
    """
    write_random_store(
        Config.create(run_name="whole").store_dir, target, n_samples=12
    )  # heldout: s5, s11
    write_random_store(
        Config.create(run_name="part").store_dir, target, n_samples=8
    )  # the first 8 of them
    for run, settings in (("whole", {"train_samples": "7", "heldout_samples": "1"}), ("part", {})):
        assert main(["train", *options(target, run, **settings)]) == 0
    said = capsys.readouterr().out
    assert (
        "train_samples 7: the first of the store's 10 train samples" in said
        and "heldout_samples 1: the first of the store's 2 heldout samples" in said
    )
    assert "train_samples 1,000: the store was made with 7" in said
    whole, part = (Config.create(run_name=name).drafter_dir for name in ("whole", "part"))
    assert equal(
        weights_of(whole / "drafter.safetensors"), weights_of(part / "drafter.safetensors")
    )
    tables = [
        pd.read_parquet(folder / "metrics.parquet").drop(columns="seconds")
        for folder in (whole, part)
    ]
    pd.testing.assert_frame_equal(*tables)
    assert (
        read_record(whole)["settings"]["train_samples"] == 7
        and "train_samples" not in read_record(part)["settings"]
    )
    assert len(Store.open(Config.create(run_name="whole").store_dir).samples("train")) == 10
    assert main(["train", *options(target, "whole")]) == 2
    assert (
        "another training: train_samples 7, now all of the store, heldout_samples 1, now "
        "all of the store"
    ) in capsys.readouterr().err
    assert main(["train", *options(target, "part", train_samples="7", heldout_samples="1")]) == 0
    assert "trained already" in capsys.readouterr().out
