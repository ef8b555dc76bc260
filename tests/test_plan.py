"""What `plan` says before an extraction, and what `data rm` refuses to delete."""

import json
import os
import re

import pytest
import torch

from eyas.capture.plan import Plan, make_plan
from eyas.cli import main
from eyas.config import PROFILES, Config
from eyas.data_folder import list_runs, look, remove
from eyas.errors import EyasError
from eyas.files import RUN_PARTS, write_json, write_safetensors
from eyas.models.drafter import FILE
from eyas.models.target import Head, load_target
from eyas.prompts.chat_template import encode
from eyas.prompts.prompt_set import load_prompts
from eyas.server.serve import started_ticks
from eyas.store.reader import Rows
from helpers.prompts import write_prompts
from helpers.stores import write_store
from helpers.tiny import make_tiny_target


def test_the_kimi_profile_says_the_numbers_of_its_story(capsys):
    """17,285,548 tokens x 4 boundaries x 7,168 x 2 bytes; 2,591 tokens per second."""
    profile = (PROFILES / "kimi-k2.5.yaml").read_text()
    command = re.search(r"# python -m eyas (plan .*)\n# +(.*)", profile)  # as its head says
    assert main(f"{command[1]} {command[2]}".split()) == 0
    said = capsys.readouterr().out
    assert "10,000 samples, 17,285,548 tokens, boundaries [3, 31, 59, 61]" in said
    assert "923 GiB (991,222,464,512 bytes)" in said and "111 minutes at 2,591 tok/s" in said


def test_a_plan_counts_what_is_there(data, tmp_path):
    folder = make_tiny_target(tmp_path / "tiny")
    path = write_prompts(tmp_path / "prompts.jsonl", 12, 3)
    config = Config.create(
        run_name="p",
        target=str(folder),
        boundaries=(1, 2),
        prompt_set=str(path),
        max_length=64,
        store_fp8=False,
    )
    plan = make_plan(config)
    tokenizer = load_target(str(folder)).tokenizer()
    tok = sum(len(encode(c, tokenizer, 64).input_ids) for c in load_prompts(path).conversations)
    assert (plan.samples, plan.tok, plan.boundaries) == (15, tok, (1, 2, 4))
    assert plan.states_bytes == tok * 3 * 64 * 2 and plan.bytes == plan.states_bytes + tok * 9
    assert plan.seconds is None and "not known yet" in str(plan)
    fp8 = make_plan(Config.create(**{**config.__dict__, "store_fp8": True}))
    assert fp8.bytes == tok * (3 * (64 + 4) + 9)


def test_files_and_time_of_a_plan():
    plan = Plan(10, 1000, (1, 2), 100, "bfloat16", 100_000, 10**6, 50.0)
    assert (plan.bytes, plan.shards, plan.seconds) == (1000 * (2 * 200 + 9), 5, 20.0)


@pytest.fixture
def runs(data):
    """Run a has a store and a drafter; the drafter of run b says that it was trained from run c's
    store, and c has no drafter.
    """
    manifest = {
        "target": {"rms_norm_eps": 1e-5},
        "boundaries": [1, 2],
        "dtype": "bfloat16",
        "hidden_size": 4,
        "prompts": {"hash": None},
    }
    samples = {
        name: Rows(
            name,
            "train",
            "x",
            torch.arange(3),
            torch.ones(3, dtype=torch.bool),
            {b: torch.randn(3, 4).bfloat16() for b in (1, 2)},
        )
        for name in "ac"
    }
    stores = {
        name: write_store(
            data / "runs" / name / "store",
            manifest,
            Head(torch.ones(4), torch.ones(2, 4), 1e-5),
            [samples[name]],
        )
        for name in "ac"
    }
    for name, made_from in (("b", stores["c"].identity), ("a", "another")):
        described = json.dumps({"config": {}, "record": {"store": made_from}})
        write_safetensors(
            data / "runs" / name / "drafter" / FILE, {"x": torch.zeros(1)}, {"drafter": described}
        )
    return data / "runs"


def test_a_store_that_a_drafter_names_is_kept(runs, capsys):
    assert look("c", ("store",)).named_by == ("b",) and look("a", ("store",)).named_by == ("a",)
    with pytest.raises(EyasError, match="drafter of run b was trained from this store.*--force"):
        remove(look("c", ("store",)))
    assert (runs / "c" / "store" / "manifest.json").is_file()
    remove(look("c", ("store",)), force=True)
    assert not (runs / "c" / "store").exists()
    remove(look("a", RUN_PARTS))  # its drafter goes with it
    assert not (runs / "a" / "store").exists() and not (runs / "a" / "drafter").exists()


def test_nothing_is_removed_without_yes(runs, capsys):
    assert main(["data", "rm", "c"]) == 0 and (runs / "c" / "store").is_dir()
    assert "files, " in (said := capsys.readouterr().out) and "--yes" in said and "run b" in said
    assert main(["data", "rm", "c", "--yes"]) == 2 and (runs / "c" / "store").is_dir()
    assert (
        main(["data", "rm", "c", "--yes", "--force"]) == 0 and not (runs / "c" / "store").exists()
    )
    assert main(["data", "rm", "nobody"]) == 2
    table = list_runs()
    assert set(zip(table["run"], table["part"])) == {
        ("a", "store"),
        ("a", "drafter"),
        ("b", "drafter"),
    }


def test_only_runs_are_removed(runs, tmp_path, capsys):
    (tmp_path / "data" / "store").mkdir()
    (runs / "store").mkdir()
    for name in ("..", ".", "", "../runs/a", str(runs / "a"), "a/"):
        assert main(["data", "rm", name, "--yes", "--force"]) == 2, name
    assert (
        (tmp_path / "data" / "store").is_dir()
        and (runs / "store").is_dir()
        and (runs / "a" / "store" / "manifest.json").is_file()
    )


def test_a_store_that_is_a_link_goes_with_what_it_points_to(runs, tmp_path):
    (runs / "c" / "store").rename(tmp_path / "elsewhere")
    (runs / "c" / "store").symlink_to(tmp_path / "elsewhere")
    removal = look("c", ("store",))
    assert removal.files > 3 and "store" in list(list_runs().query("run == 'c'")["part"])
    remove(removal, force=True)
    assert not (tmp_path / "elsewhere").exists() and not (runs / "c" / "store").is_symlink()


def test_the_folder_of_a_server_that_is_up_is_kept(runs):
    write_json(
        runs / "c" / "server" / "server.json",
        {"url": "http://127.0.0.1:1", "pid": os.getpid(), "started": started_ticks(os.getpid())},
    )
    with pytest.raises(
        EyasError, match="the server of run 'c' is up.*python -m eyas server down -p run_name c"
    ):
        remove(look("c", RUN_PARTS), force=True)
    assert (runs / "c" / "store" / "manifest.json").is_file()
    write_json(
        runs / "c" / "server" / "server.json",
        {"url": "http://127.0.0.1:1", "pid": os.getpid(), "started": 0},
    )
    remove(look("c", RUN_PARTS), force=True)
    assert not list((runs / "c").iterdir())


@pytest.mark.parametrize(
    "settings, said",
    [
        (["boundaries", "[a"], "boundaries = '[a'"),
        (["seed", "nan"], "seed = 'nan'"),
        (["spool_gib", "inf"], "spool_gib = 'inf'"),
        (["extra_boundaries", "99"], "boundaries [99] are outside"),
        (["extra_boundaries", "-1"], "boundaries [-1] are outside"),
        (["server_url", ","], "server_url = ','"),
        (["server_url", "nonsense"], "server_url = 'nonsense'"),
        (["target", "/nowhere"], "no model folder '/nowhere'"),
    ],
)
def test_bad_settings_are_said(data, capsys, settings, said):
    sizes = [] if settings[0] == "target" else ["--blocks", "61", "--hidden-size", "7168"]
    counts = ["--samples", "10", "--tok", "1000"]
    command = ["plan", "--profile", "kimi-k2.5", *sizes, *counts, "-p", *settings]
    assert main(command) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [["--tok", "-5"], ["--tok-per-s", "-2"], ["--tok-per-s", "nan"], ["--blocks", "x"]]
)
def test_figures_of_a_plan_that_are_none_are_refused(capsys, option):
    with pytest.raises(SystemExit):
        main(["plan", *option])
    assert f"argument {option[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"epochs: [", b"\xff\xfe", b"- 1"])
def test_a_profile_that_is_none_is_said(tmp_path, capsys, content):
    (tmp_path / "mine.yaml").write_bytes(content)
    assert (
        main(["plan", "--profile", str(tmp_path / "mine.yaml")]) == 2
        and "eyas: mine.yaml is not" in capsys.readouterr().err
    )


def test_a_command_that_a_message_names_is_for_the_run_at_hand(data, capsys, tmp_path):
    assert main(["parity", "-p", "run_name", "two words"]) == 2
    assert (
        "next: python -m eyas extract, with -p run_name 'two words' as here"
        in capsys.readouterr().err
    )
    assert (
        main(
            [
                "server",
                "up",
                "-p",
                "server_url",
                "http://127.0.0.1:1",
                "-p",
                "threads",
                "1",
                "-p",
                "target",
                str(make_tiny_target(tmp_path / "tiny")),
                "-p",
                "boundaries",
                "[1,2]",
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert (
        "next: python -m eyas server up -p server_url '', with -p threads 1" in said
        and said.count("server_url") == 2
    )


def test_a_disk_that_refuses_is_said_without_a_traceback(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("EYAS_DATA", str(tmp_path / "file"))
    assert (
        main(["doctor", "--target", str(make_tiny_target(tmp_path / "tiny"))]) == 2
        and "Not a directory" in capsys.readouterr().err
    )
