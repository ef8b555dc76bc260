"""Train what only benchmarks/ablations.py changes, and keep it apart from the settings."""

import sys

import pytest
import torch
from safetensors.torch import load_file

from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import ROOT
from eyas.models.drafter import read_record
from eyas.models.target import load_target
from eyas.store.reader import Store
from eyas.training.trainer import Ablation, train
from helpers.stores import write_random_store
from helpers.tiny import make_tiny_target

sys.path.insert(0, str(ROOT / "benchmarks"))
from ablations import BASE_SETTINGS, VARIANTS, prepare

# Settings that the record of a drafter has named since before some of them left Config
RECORDED = """
    seed boundaries draft_vocab_size draft_steps step_decay epochs batch_tok learning_rate
    warmup_ratio train_dtype mix loss loss_mean mask_shift fc_norm norm_output initial_weights
    eval_steps patience
""".split()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(
        str(make_tiny_target(tmp_path_factory.mktemp("tiny") / "target", n_blocks=6))
    )


def config_of(**values) -> Config:
    small = {"boundaries": (2, 3), "threads": 1, "draft_vocab_size": 40, "epochs": 2.0}
    return Config.create(**{**small, "batch_tok": 64, "without_parity": True, **values})


@pytest.mark.parametrize("ablation", [{"mask_shift": 0}, {"loss_mean": "grid"}], ids=str)
def test_an_ablation_trains_another_drafter_and_its_record_says_so(data, target, ablation):
    write_random_store(Config.create(run_name="x").store_dir, target)
    store = Store.open(Config.create(run_name="x").store_dir)
    weights = {}
    for run, changed in (("plain", {}), ("ablated", ablation)):
        folder = train(config_of(run_name=run), store, target, ablation=Ablation(**changed))
        weights[run] = load_file(folder / "drafter.safetensors")
        settings = read_record(folder)["settings"]
        assert sorted(settings) == sorted(RECORDED)
        expected = {"mask_shift": 1, "loss_mean": "slots"} | changed
        assert {name: settings[name] for name in expected} == expected
    assert any(
        not torch.equal(weights["plain"][n], weights["ablated"][n]) for n in weights["plain"]
    )
    with pytest.raises(EyasError, match=f"another training: {next(iter(ablation))}"):
        train(config_of(run_name="ablated"), store, target)  # not continued as something else


def test_every_variant_is_one_that_can_be_trained():
    kinds = set()
    for variants in VARIANTS.values():
        for choices in variants.values():
            for settings in choices:
                config, ablation = prepare(BASE_SETTINGS, settings)
                for name, value in settings.items():
                    of = ablation if hasattr(ablation, name) else config
                    assert getattr(of, name) == value
                    kinds.add(type(of))
    assert kinds == {Config, Ablation}
