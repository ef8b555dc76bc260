"""Which weights of a training are exported and judged: said, and one setting away.

Through the commands.
"""

import json

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import eyas.training.trainer
from eyas.cli import main
from eyas.config import Config
from eyas.models.drafter import read_record
from eyas.models.target import load_target
from eyas.training.trainer import Training
from eyas.training.ttt import Losses
from helpers.runs import equal, options, weights_of
from helpers.stores import write_random_store
from helpers.tiny import make_tiny_target

LENGTHS = [1.2, 1.7, 1.4]  # of the held-out evaluations, one an epoch: the second is the best


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(
        str(make_tiny_target(tmp_path_factory.mktemp("targets") / "tiny", n_blocks=6))
    )


@pytest.fixture
def trained(data, target, monkeypatch):  # noqa: F811
    """A finished run whose held-out acceptance is best after the second of three passes; gives its
    configuration.
    """
    config = Config.create(run_name="x", target=str(target.folder))
    write_random_store(config.store_dir, target)
    said = iter(LENGTHS)

    def judge(self, keys):
        counts = pd.DataFrame({"accepted": [round(100 * (next(said) - 1))], "verify_steps": [100]})
        return Losses(torch.tensor(1.0), [10.0] * 3, [5] * 3, [10] * 3), 20, counts

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_judge", judge)
        assert main(["train", *options(target, "x", epochs="3.0")]) == 0
    return config


def steps_of(config) -> tuple[int, int]:
    """(optimiser step of the best evaluation, of the last), from the metrics."""
    judged = pd.read_parquet(config.drafter_dir / "metrics.parquet").query(
        "split == 'heldout' and draft_step == 0"
    )
    assert judged["acceptance_length"].tolist() == pytest.approx(LENGTHS)
    return int(judged["step"].iloc[1]), int(judged["step"].iloc[2])


def test_train_and_export_say_which_weights_these_are(trained, target, capsys):  # noqa: F811
    best, last = steps_of(trained)
    text = f"best at step {best} (1.700), last at step {last} (1.400); this drafter is the "
    assert main(["train", *options(target, "x", epochs="3.0")]) == 0
    assert text + "last; the best: -p drafter_weights best" in capsys.readouterr().out
    run = ["-p", "run_name", "x", "-p", "target", str(target.folder)]
    for weights, name in (
        ("final", "last; the best: -p drafter_weights best\n"),
        ("best", "best\n"),
    ):
        for engine in ("sglang", "vllm"):
            assert (
                main(["drafter", "export", "--to", engine, *run, "-p", "drafter_weights", weights])
                == 0
            )
            assert text + name in capsys.readouterr().out


def test_the_best_weights_are_one_setting_away(trained, target, capsys):  # noqa: F811
    """`drafter export`, `evaluate offline` and `evaluate decode` use them, say so in
    what they write, and leave what is there of
    the last ones.
    """
    folder = trained.drafter_dir
    assert not equal(
        weights_of(folder / "drafter.safetensors"), weights_of(folder / "best.safetensors")
    )
    questions = trained.run_dir / "questions.jsonl"
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
    best, last = steps_of(trained)
    for weights, file, where, step in (
        ("final", "drafter", "", last),
        ("best", "best", "best_weights", best),
    ):
        settings = options(target, "x", drafter_weights=weights, **few)
        for command in ("drafter export", "evaluate offline", "evaluate decode"):
            assert main([*command.split(), *settings]) == 0
        out, ours = trained.export_dir / where, weights_of(folder / f"{file}.safetensors")
        exported = load_file(out / "model.safetensors")
        assert all(
            torch.equal(exported[name], weight)
            for name, weight in ours.items()
            if name != "vocab.ids"
        )
        said = json.loads((out / "config.json").read_text())["eyas_export"]
        assert (said["drafter_weights"], said["steps"], said["run_name"]) == (weights, step, "x")
        for name in ("walk", "acceptance"):
            record = json.loads((trained.acceptance_dir / where / f"{name}.json").read_text())
            assert record["settings"]["drafter_weights"] == weights
    assert not list(trained.run_dir.rglob("earlier-*"))


def test_weights_that_are_not_there_are_refused(data, target, capsys):  # noqa: F811
    config = Config.create(run_name="x", target=str(target.folder))
    write_random_store(config.store_dir, target, n_samples=5)  # none is held out
    assert main(["train", *options(target, "x")]) == 0
    assert "best at step" not in capsys.readouterr().out
    assert (
        main(
            [
                "drafter",
                "export",
                "-p",
                "run_name",
                "x",
                "-p",
                "target",
                str(target.folder),
                "-p",
                "drafter_weights",
                "best",
            ]
        )
        == 2
    )
    assert "no best weights in run 'x'" in capsys.readouterr().err


def test_a_training_that_stops_early_says_so(data, target, monkeypatch, capsys):  # noqa: F811
    config = Config.create(run_name="x", target=str(target.folder))
    write_random_store(config.store_dir, target)
    said = iter([1.7, 1.4, 1.3, 1.9])

    def judge(self, keys):
        counts = pd.DataFrame({"accepted": [round(100 * (next(said) - 1))], "verify_steps": [100]})
        return Losses(torch.tensor(1.0), [10.0] * 3, [5] * 3, [10] * 3), 20, counts

    monkeypatch.setattr(eyas.training.trainer.Training, "_judge", judge)
    assert main(["train", *options(target, "x", epochs="4.0", patience="2")]) == 0
    steps = read_record(config.drafter_dir)["steps"]
    out = capsys.readouterr().out
    assert (
        f"best at step {steps} (1.700), last at step {3 * steps} (1.300); this drafter is "
        f"the best\n"
    ) in out
