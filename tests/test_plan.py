"""What `plan` says before an extraction, and what `data rm` refuses to delete."""

import json

import pytest
import torch

from eyas.cli import main
from eyas.config import Config
from eyas.drafter import FILE
from eyas.errors import EyasError
from eyas.files import write_safetensors
from eyas.plan import Plan, make_plan
from eyas.prompts import encode, load_prompts
from eyas.store import Rows
from eyas.target import Head, load_target
from eyas.trash import PARTS, list_runs, look, remove
from stores import write_store
from test_crashes import write_prompts
from tiny import make_tiny_target


def test_the_kimi_profile_says_the_numbers_of_its_story(capsys):
    """17,285,548 tokens x 4 boundaries x 7,168 x 2 bytes; 2,591 tokens per second."""
    assert main(["plan", "--profile", "kimi-k2.5"]) == 0
    said = capsys.readouterr().out
    assert "10,000 samples, 17,285,548 tokens, boundaries [3, 31, 59, 61]" in said
    assert "923 GiB (991,222,464,512 bytes)" in said and "111 minutes at 2,591 tok/s" in said


def test_a_plan_counts_what_is_there(data, tmp_path):
    folder = make_tiny_target(tmp_path / "tiny")
    path = write_prompts(tmp_path / "prompts.jsonl", 12, 3)
    config = Config.create(run_name="p", target=str(folder), boundaries=(1, 2), prompt_set=str(path), max_length=64, store_fp8=False)
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
    """Run a has a store and a drafter; the drafter of run b says that it was trained from run c's store, and c has no drafter."""
    manifest = {"target": {"rms_norm_eps": 1e-5}, "boundaries": [1, 2], "dtype": "bfloat16", "hidden_size": 4, "prompts": {"hash": None}}
    samples = {name: Rows(name, "train", "x", torch.arange(3), torch.ones(3, dtype=torch.bool), {b: torch.randn(3, 4).bfloat16() for b in (1, 2)}) for name in "ac"}
    stores = {name: write_store(data / "runs" / name / "store", manifest, Head(torch.ones(4), torch.ones(2, 4), 1e-5), [samples[name]]) for name in "ac"}
    for name, made_from in (("b", stores["c"].identity), ("a", "another")):
        described = json.dumps({"config": {}, "record": {"store": made_from}})
        write_safetensors(data / "runs" / name / "drafter" / FILE, {"x": torch.zeros(1)}, {"drafter": described})
    return data / "runs"


def test_a_store_that_a_drafter_names_is_kept(runs, capsys):
    assert look("c", ("store",)).named_by == ("b",) and look("a", ("store",)).named_by == ("a",)
    with pytest.raises(EyasError, match="drafter of run b was trained from this store.*--force"):
        remove(look("c", ("store",)))
    assert (runs / "c" / "store" / "manifest.json").is_file()
    remove(look("c", ("store",)), force=True)
    assert not (runs / "c" / "store").exists()
    remove(look("a", PARTS))  # its drafter goes with it
    assert not (runs / "a" / "store").exists() and not (runs / "a" / "drafter").exists()


def test_nothing_is_removed_without_yes(runs, capsys):
    assert main(["data", "rm", "c"]) == 0 and (runs / "c" / "store").is_dir()
    assert "files, " in (said := capsys.readouterr().out) and "--yes" in said and "run b" in said
    assert main(["data", "rm", "c", "--yes"]) == 2 and (runs / "c" / "store").is_dir()
    assert main(["data", "rm", "c", "--yes", "--force"]) == 0 and not (runs / "c" / "store").exists()
    assert main(["data", "rm", "nobody"]) == 2
    table = list_runs()
    assert set(zip(table["run"], table["part"])) == {("a", "store"), ("a", "drafter"), ("b", "drafter")}
