"""The drafter: step by step as in training, saved and loaded, and the start from the target's
weights.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.errors import EyasError
from eyas.models.drafter import (
    FILE,
    DraftCache,
    DrafterConfig,
    initial_drafter,
    load_drafter,
    read_record,
    save_drafter,
)
from eyas.models.target import load_target
from eyas.models.vocab import DraftVocab
from eyas.training.batch import pack
from eyas.training.steps import Steps
from helpers.drafters import BOUNDARIES, H, V, make_drafter, make_sample
from helpers.tiny import make_tiny_target


@pytest.mark.parametrize(
    "switches", [{}, {"fc_norm": True, "norm_output": True}], ids=["plain", "norms"]
)
def test_extend_with_a_cache_equals_training_at_the_same_slots(switches):
    """What serving computes, slot by slot with keys and values kept and rolled back, is what
    training unrolls.
    """
    drafter, n_steps = make_drafter(**switches), 4
    sample = make_sample([0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0])
    batch = pack(
        [make_sample([0, 1, 1, 1, 0], seed=1), sample],
        BOUNDARIES,
        drafter.vocab,
        n_steps,
        torch.float64,
    )
    start = batch.spans[1][0]
    with torch.no_grad():
        outs = Steps(drafter, batch, n_steps, torch.float64).out
    trained = [
        {
            int(slot) - start: out
            for slot, run, out in zip(batch.active, batch.run, outs[s])
            if slot >= start and run > s
        }
        for s in range(n_steps)
    ]
    assert [sorted(t) for t in trained] == [
        [2, 3, 4, 5, 6, 9, 10],
        [2, 3, 4, 5, 9],
        [2, 3, 4],
        [2, 3],
    ]  # by hand from the mask
    cache, ids = DraftCache(), sample.input_ids
    hidden = drafter.fuse(sample.at(BOUNDARIES))  # [T, H]
    true = torch.cat(
        [drafter.extend(ids[1:4], hidden[:3], cache), drafter.extend(ids[4:], hidden[3:-1], cache)]
    )  # [T-1, H], in two parts
    for slot in trained[0]:
        torch.testing.assert_close(true[slot], trained[0][slot], rtol=0, atol=1e-12)
    for slot in trained[1]:
        again = DraftCache()
        out = drafter.extend(ids[1 : slot + 2], hidden[: slot + 1], again)[-1:]
        for s in range(1, n_steps):
            if slot in trained[s]:
                out = drafter.extend(ids[slot + 1 + s, None], drafter.feed_back(out), again)
                torch.testing.assert_close(out[0], trained[s][slot], rtol=0, atol=1e-12)


def test_cache_rolled_back():
    drafter = make_drafter()
    g = torch.Generator().manual_seed(0)
    ids, hidden = (
        torch.randint(0, V, (9,), generator=g),
        torch.randn(9, H, generator=g, dtype=torch.float64),
    )
    cache = DraftCache()
    whole = drafter.extend(ids, hidden, cache)
    assert cache.length == 9
    cache.truncate(4)
    drafter.extend(ids[:2], hidden[5:7], cache)  # drafts that are thrown away
    cache.truncate(4)
    torch.testing.assert_close(
        drafter.extend(ids[4:], hidden[4:], cache), whole[4:], rtol=0, atol=1e-12
    )
    with pytest.raises(ValueError, match="truncate"):
        cache.truncate(10)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(
        str(make_tiny_target(tmp_path_factory.mktemp("targets") / "tiny", n_blocks=6))
    )


@pytest.fixture
def saved(target, tmp_path):
    config = DrafterConfig.from_target(target, (2, 3), 100)
    drafter = initial_drafter(
        config, DraftVocab(torch.arange(0, 500, 5), target.vocab_size), target, seed=0
    )
    save_drafter(
        drafter,
        tmp_path / "drafter",
        {"target": {"name": target.name, "fingerprint": target.fingerprint}, "steps": 7},
    )
    return drafter, tmp_path / "drafter"


def test_saved_and_loaded(saved, target):
    drafter, folder = saved
    again = load_drafter(folder, target)
    assert (
        again.config == drafter.config
        and torch.equal(again.vocab.ids, drafter.vocab.ids)
        and read_record(folder)["steps"] == 7
    )
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert (
        "embed_tokens.weight" not in load_file(folder / FILE)
        and not again.embed_tokens.weight.requires_grad
    )


def test_starts_from_the_targets_own_weights(saved, target):
    drafter, h = saved[0], target.hidden_size
    block, head = target.last_block(), target.head()
    layer = drafter.layers[0]
    assert torch.equal(drafter.lm_head.weight, head.lm_head[drafter.vocab.ids]) and torch.equal(
        drafter.norm.weight, head.norm_weight
    )
    assert torch.equal(layer.mlp.up_proj.weight, block["mlp.up_proj.weight"].float())
    assert torch.equal(layer.hidden_norm.weight, block["input_layernorm.weight"].float())
    assert torch.equal(
        layer.self_attn.k_proj.weight[:, h:], block["self_attn.k_proj.weight"].float()
    )
    states = torch.randn(3, 2 * h)
    assert torch.equal(drafter.fuse(states), states[:, h:])  # the last boundary passes through


def test_starts_at_random_where_that_is_asked_for(saved, target):
    drafter = initial_drafter(saved[0].config, saved[0].vocab, target, seed=0, from_target=False)
    again, other = (
        initial_drafter(saved[0].config, saved[0].vocab, target, seed=seed, from_target=False)
        for seed in (0, 1)
    )
    assert torch.equal(
        drafter.embed_tokens.weight, saved[0].embed_tokens.weight
    )  # what SGLang gives it when it serves
    assert torch.equal(drafter.fc.weight, again.fc.weight) and not torch.equal(
        drafter.fc.weight, other.fc.weight
    )
    for name in ("fc.weight", "lm_head.weight", "layers.0.mlp.up_proj.weight"):
        assert not torch.equal(drafter.state_dict()[name], saved[0].state_dict()[name]), name


def test_a_norm_before_fc_gives_back_the_size_that_it_took(target):
    config = DrafterConfig.from_target(target, (2, 3), 100, fc_norm=True)
    drafter = initial_drafter(
        config, DraftVocab(torch.arange(0, 500, 5), target.vocab_size), target, seed=0, last_rms=7.0
    )
    states = torch.randn(3, 2 * target.hidden_size) * 7
    last = states[:, target.hidden_size :]
    torch.testing.assert_close(
        drafter.fuse(states),
        7.0 * last / last.square().mean(-1, keepdim=True).sqrt(),
        rtol=1e-4,
        atol=1e-4,
    )


def test_config_from_target(target):
    config = DrafterConfig.from_target(target, (2, 3), 100)
    assert (
        config.n_heads,
        config.n_kv_heads,
        config.head_dim,
        config.hidden_size,
        config.intermediate_size,
        config.rope_theta,
    ) == (4, 2, 16, 64, 128, 10000.0)
    with pytest.raises(EyasError, match="outside"):
        DrafterConfig.from_target(target, (2, 7), 100)
    with pytest.raises(EyasError, match="draft vocabulary of 513"):
        DrafterConfig.from_target(target, (2, 3), 513)


def test_refused_with_what_is_wrong(saved, target, tmp_path):
    _, folder = saved
    with pytest.raises(
        EyasError,
        match=(
            "no drafter in 'drafter' of run 'theirs'.*eyas train -p run_name "
            "theirs.*drafter import FOLDER -p run_name theirs"
        ),
    ):
        load_drafter(tmp_path / "theirs" / "drafter", target)
    other = load_target(str(make_tiny_target(tmp_path / "other", n_blocks=6, seed=1)))
    with pytest.raises(EyasError, match="another target: tiny"):
        load_drafter(folder, other)
    weights = load_file(folder / FILE)
    described = {
        "config": DrafterConfig.from_target(target, (2, 3), 100).__dict__,
        "record": {"target": {"fingerprint": target.fingerprint}},
    }
    save_file(
        weights | {"fc.weight": weights["fc.weight"][:, 1:].contiguous()},
        folder / FILE,
        metadata={"drafter": json.dumps(described)},
    )
    with pytest.raises(EyasError, match=r"fc.weight of the drafter is of shape \[64, 127\]"):
        load_drafter(folder, target)
    del weights["lm_head.weight"]
    save_file(weights, folder / FILE, metadata={"drafter": json.dumps(described)})
    with pytest.raises(EyasError, match="lm_head.weight of the drafter is missing"):
        load_drafter(folder, target)
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:100])
    with pytest.raises(EyasError, match="can't be read"):
        load_drafter(folder, target)
