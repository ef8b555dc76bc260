"""No command replaces in silence what another command made or imported."""

import dataclasses
import json

import pytest
import torch

from eyas.cli import main
from eyas.config import Config
from eyas.files import sha256_file
from eyas.models.drafter import Drafter, DrafterConfig, ImportedConfig, load_drafter, read_record
from eyas.models.export import export_sglang, export_speculators
from eyas.models.import_drafter import import_drafter
from eyas.models.target import load_target
from eyas.models.vocab import DraftVocab
from helpers.runs import D, equal, options, weights_of
from helpers.stores import write_random_store
from helpers.tiny import make_tiny_target

N_BLOCKS = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(
        str(make_tiny_target(tmp_path_factory.mktemp("targets") / "tiny", n_blocks=N_BLOCKS))
    )


def their_drafter(target, seed: int = 4, **parts) -> Drafter:
    """A random drafter of a draft vocabulary and an MLP that no training of ours would choose."""
    torch.manual_seed(seed)
    ids = torch.arange(0, 2 * D, 2)
    shape = dataclasses.asdict(DrafterConfig.from_target(target, (2, 3), D)) | {
        "intermediate_size": 96,
        "boundaries": (2, 3),
    }
    config = ImportedConfig(**shape, **parts) if parts else DrafterConfig(**shape)
    drafter = Drafter(config, DraftVocab(ids, target.vocab_size))
    for name, weight in drafter.named_parameters():
        weight.data.uniform_(0.5, 1.5) if "norm" in name else weight.data.normal_(
            std=weight.shape[-1] ** -0.5
        )
    drafter.embed_tokens.weight.data.copy_(target.embedding().float())
    return drafter.eval()


@pytest.fixture
def imported(data, target, tmp_path):
    """A run with a store and an imported drafter; gives its configuration."""
    config = Config.create(run_name="x", target=str(target.folder), boundaries=(2, 3))
    write_random_store(config.store_dir, target)
    folder = export_sglang(their_drafter(target), target, tmp_path / "theirs")
    assert (
        main(
            [
                "drafter",
                "import",
                str(folder),
                "-p",
                "run_name",
                "x",
                "-p",
                "target",
                str(target.folder),
            ]
        )
        == 0
    )
    return config


def test_training_does_not_replace_an_imported_drafter(imported, target, capsys):
    path = imported.drafter_dir / "drafter.safetensors"
    before = path.read_bytes()
    for start in ("target", "random"):
        assert main(["train", *options(target, "x", initial_weights=start)]) == 2
        said = capsys.readouterr().err
        assert (
            "was imported from 'theirs'" in said
            and "-p initial_weights drafter" in said
            and "drafter import FOLDER -p run_name ANOTHER" in said
        )
    assert path.read_bytes() == before and not (imported.drafter_dir / "checkpoints").exists()


def test_training_continues_an_imported_drafter_and_keeps_it(imported, target, capsys):
    """It has the drafter's own shape and vocabulary, starts at its very weights, and is never lost:
    also when the same command runs again.
    """
    before = (imported.drafter_dir / "drafter.safetensors").read_bytes()
    theirs = weights_of(imported.drafter_dir / "drafter.safetensors")
    command = ["train", *options(target, "x", initial_weights="drafter", learning_rate="1e-12")]
    assert main(command) == 0
    assert (
        "continues the drafter of run 'x', imported from 'theirs', which is kept as "
        "imported.safetensors"
    ) in capsys.readouterr().out
    kept = imported.drafter_dir / "imported.safetensors"
    assert kept.read_bytes() == before
    trained, record = load_drafter(imported.drafter_dir, target), read_record(imported.drafter_dir)
    assert trained.config.intermediate_size == 96 and trained.vocab.ids.tolist() == list(
        range(0, 2 * D, 2)
    )
    ours = weights_of(imported.drafter_dir / "drafter.safetensors")
    assert ours.keys() == theirs.keys() and not equal(ours, theirs)
    for name, weight in theirs.items():  # a step of a learning rate that is nearly nothing
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-9)
    said = record["continued_from"]
    assert (
        said["run_name"] == "x"
        and said["kept_as"] == "imported.safetensors"
        and said["record"]["imported"]["folder"] == "theirs"
    )
    assert said["sha256"] == sha256_file(kept) and "imported" not in record
    for other in (command, ["train", *options(target, "x")]):
        main(other)
        assert (
            equal(weights_of(imported.drafter_dir / "drafter.safetensors"), ours)
            and kept.read_bytes() == before
        )
    assert (
        "of another drafter shape: intermediate_size 96" in (said := capsys.readouterr().err)
        and "and with it the imported drafter" in said
    )


def test_a_continued_training_learns(imported, target, capsys):
    """The loss falls: the gradient is that of the imported drafter's shape and vocabulary."""
    assert main(["train", *options(target, "x", initial_weights="drafter", epochs="8.0")]) == 0
    import pandas as pd

    loss = (
        pd.read_parquet(imported.drafter_dir / "metrics.parquet")
        .query("split == 'train'")
        .groupby("step")["loss"]
        .mean()
    )
    assert loss.iloc[-3:].mean() < 0.9 * loss.iloc[:3].mean()


def test_training_continues_the_drafter_of_another_run_which_stays(imported, target):
    mine = dataclasses.replace(imported, run_name="mine")
    write_random_store(mine.store_dir, target)
    before = (imported.drafter_dir / "drafter.safetensors").read_bytes()
    assert (
        main(["train", *options(target, "mine", initial_weights="drafter", drafter_run="x")]) == 0
    )
    assert (imported.drafter_dir / "drafter.safetensors").read_bytes() == before
    said = read_record(mine.drafter_dir)["continued_from"]
    assert said["run_name"] == "x" and said["sha256"] == sha256_file(
        imported.drafter_dir / "drafter.safetensors"
    )
    assert not (mine.drafter_dir / "imported.safetensors").exists()


@pytest.mark.parametrize(
    "setting, value, text",
    [
        ("boundaries", "3", "boundaries 2,3, not 3"),
        ("draft_vocab_size", "41", "draft_vocab_size 40, not 41"),
        ("fc_norm", "true", "fc_norm False, not True"),
        ("norm_output", "true", "norm_output False, not True"),
    ],
)
def test_settings_that_the_continued_drafter_decides_are_refused_by_name(
    imported, target, capsys, setting, value, text
):
    assert (
        main(["train", *options(target, "x", initial_weights="drafter", **{setting: value})]) == 2
    )
    said = capsys.readouterr().err
    assert text in said and f"-p {setting} {text.split()[1].rstrip(',')}" in said
    assert not (imported.drafter_dir / "imported.safetensors").exists()


def test_what_cannot_be_continued_is_refused_by_name(data, target, tmp_path, capsys):
    config = Config.create(run_name="odd", target=str(target.folder))
    write_random_store(config.store_dir, target)
    command = ["train", *options(target, "odd", initial_weights="drafter")]
    assert main(command) == 2 and "run 'odd' has no imported drafter" in capsys.readouterr().err
    theirs = export_speculators(
        their_drafter(target, norm_before_residual=True), target, tmp_path / "residual", 3
    )
    import_drafter(theirs, target, config.drafter_dir)
    assert (
        main(command) == 2
        and "norm_before_residual, which training does not compute" in capsys.readouterr().err
    )


def test_a_finished_drafter_is_not_replaced_by_one_of_other_settings(data, target, capsys):
    """Also where its checkpoints were removed to save room; the same training may be made again,
    with the same bytes.
    """
    config = Config.create(run_name="x", target=str(target.folder))
    write_random_store(config.store_dir, target)
    assert main(["train", *options(target, "x")]) == 0
    path = config.drafter_dir / "drafter.safetensors"
    before = path.read_bytes()
    for checkpoint in (config.drafter_dir / "checkpoints").iterdir():
        checkpoint.unlink()
    assert main(["train", *options(target, "x", learning_rate="1e-4")]) == 2
    assert (
        "learning_rate 0.002, now 0.0001" in capsys.readouterr().err and path.read_bytes() == before
    )
    assert main(["train", *options(target, "x")]) == 0
    assert "this very training" in capsys.readouterr().out and path.read_bytes() == before


def test_the_export_of_another_drafter_is_kept(data, target, capsys):
    """The run's drafter was removed and trained anew: what may be served from the old export is
    still there.
    """
    config = Config.create(run_name="x", target=str(target.folder))
    write_random_store(config.store_dir, target)
    run = ["-p", "run_name", "x", "-p", "target", str(target.folder)]
    assert main(["train", *options(target, "x")]) == 0
    for engine, folder in (("sglang", config.export_dir), ("vllm", config.export_dir / "vllm")):
        assert (
            main(["drafter", "export", "--to", engine, *run]) == 0
            and main(["drafter", "export", "--to", engine, *run]) == 0
        )
        assert not (folder / "earlier-1").exists(), "the same drafter again"
    before = weights_of(config.export_dir / "model.safetensors")
    assert main(["data", "rm", "x", "--part", "drafter", "--yes"]) == 0
    assert main(["train", *options(target, "x", seed="1")]) == 0
    capsys.readouterr()
    for engine, folder in (("sglang", config.export_dir), ("vllm", config.export_dir / "vllm")):
        assert main(["drafter", "export", "--to", engine, *run]) == 0
        assert "was of another drafter; kept in runs/x/export/" in capsys.readouterr().out
        assert (folder / "earlier-1" / "config.json").is_file() and (
            folder / "earlier-1" / "model.safetensors"
        ).is_file()
    assert equal(weights_of(config.export_dir / "earlier-1" / "model.safetensors"), before)
    assert not equal(weights_of(config.export_dir / "model.safetensors"), before)


def test_results_of_other_settings_or_another_drafter_are_kept(data, target, capsys):
    config = Config.create(run_name="x", target=str(target.folder))
    write_random_store(config.store_dir, target)
    assert main(["train", *options(target, "x")]) == 0
    questions = data / "questions.jsonl"
    questions.write_text(
        "".join(
            json.dumps(
                {
                    "id": f"q{i}",
                    "category": "chat",
                    "topic": "",
                    "split": "heldout",
                    "messages": [{"role": "user", "content": "Hi " * i}],
                }
            )
            + "\n"
            for i in (1, 2, 3)
        )
    )
    few = {
        "eval_set": str(questions),
        "decode_new_tok": "8",
        "decode_prompts": "2",
        "baseline_prompts": "1",
        "check_bf16_prompts": "1",
        "speed_steps": "2",
        "speed_topk": "1",
    }
    folder = config.acceptance_dir
    assert (
        main(["evaluate", "offline", *options(target, "x")]) == 0
        and main(["evaluate", "decode", *options(target, "x", **few)]) == 0
    )
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(before) == {
        "walk.json",
        "acceptance.json",
        "acceptance.parquet",
        "baselines.parquet",
        "speed.json",
    }
    assert (
        main(["evaluate", "offline", *options(target, "x")]) == 0
        and main(["evaluate", "decode", *options(target, "x", **few)]) == 0
    )
    assert not (folder / "earlier-1").exists(), "the same again"
    assert main(["evaluate", "offline", *options(target, "x", speculative_num_steps="2")]) == 0
    assert (
        "walk.json was of speculative_num_steps 3, now 2; kept in runs/x/acceptance/earlier-1"
        in capsys.readouterr().out
    )
    assert (folder / "earlier-1" / "walk.json").read_bytes() == before["walk.json"]
    assert main(["evaluate", "decode", *options(target, "x", **few | {"decode_prompts": "3"})]) == 0
    assert "2 judged, now 3; kept in runs/x/acceptance/earlier-2" in capsys.readouterr().out
    assert {path.name for path in (folder / "earlier-2").iterdir()} == set(before) - {"walk.json"}
    assert (
        main(["data", "rm", "x", "--part", "drafter", "--yes"]) == 0
        and main(["train", *options(target, "x", seed="1")]) == 0
    )
    assert main(["evaluate", "offline", *options(target, "x", speculative_num_steps="2")]) == 0
    assert (
        "walk.json was of drafter_sha256" in capsys.readouterr().out
        and (folder / "earlier-3" / "walk.json").is_file()
    )
