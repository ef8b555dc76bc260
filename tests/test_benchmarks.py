"""The pure parts of the hand-run benchmarks.

That a peer's drafter is converted rightly is checked by quality.py itself, against the peer's own
forward pass.
"""

import sys

import numpy as np
import pytest
import torch

from eyas.files import ROOT
from eyas.intervals import difference_interval, ratio_interval
from eyas.models.drafter import DraftCache, Drafter
from eyas.store.reader import Rows, Store
from helpers.drafters import BOUNDARIES, SHAPE, make_drafter
from helpers.stores import write_store

sys.path.insert(0, str(ROOT / "benchmarks"))
import contestants
import quality
import trainer


def test_difference_interval_against_a_bootstrap_written_out():
    generator = np.random.default_rng(3)
    bottoms = generator.integers(5, 20, (2, 30))
    tops = bottoms + generator.integers(0, 9, (2, 30))
    found = difference_interval((tops[0], bottoms[0]), (tops[1], bottoms[1]), seed=1)
    draws = [generator.integers(0, 30, 30) for _ in range(4000)]
    drawn = [
        tops[0][d].sum() / bottoms[0][d].sum() - tops[1][d].sum() / bottoms[1][d].sum()
        for d in draws
    ]
    assert found.value == tops[0].sum() / bottoms[0].sum() - tops[1].sum() / bottoms[1].sum()
    assert (found.low, found.high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.02)
    same = difference_interval((tops[0], bottoms[0]), (tops[0], bottoms[0]), seed=1)
    assert (same.value, same.low, same.high) == (0, 0, 0), "what is hard for both cancels out"
    assert found.high - found.low > 0 and difference_interval(([1], [2]), ([1], [1]), 0).low is None
    assert difference_interval(([1, 1], [0, 0]), ([1, 1], [1, 1]), 0).value is None
    assert ratio_interval(tops[0], bottoms[0], 1).value == tops[0].sum() / bottoms[0].sum()


def test_a_part_of_a_store(tmp_path):
    from types import SimpleNamespace

    manifest = {
        "target": {"name": "t", "fingerprint": "f", "rms_norm_eps": 1e-5},
        "boundaries": [1],
        "dtype": "bfloat16",
        "hidden_size": 8,
        "prompts": {"hash": None},
    }
    head = SimpleNamespace(norm_weight=torch.ones(8), lm_head=torch.ones(4, 8), eps=1e-5)
    samples = [
        Rows(
            f"s{i}",
            "heldout" if i == 3 else "train",
            "chat",
            torch.zeros(5 + i, dtype=torch.int64),
            torch.arange(5 + i) >= 5,
            {1: torch.ones(5 + i, 8).bfloat16()},
        )
        for i in range(8)
    ]
    store = write_store(tmp_path / "store", manifest, head, samples)
    ids = contestants.choose(store, "loss_tok", 7)
    assert "s3" not in ids and "s0" not in ids, "held out, and without a supervised token"
    loss_tok = [int(store.row(id)["loss_tok"]) for id in ids]
    assert sum(loss_tok[:-1]) < 7 <= sum(loss_tok) and ids == contestants.choose(
        store, "loss_tok", 7
    )
    assert len(contestants.choose(store, "length", 10**6)) == 6
    part = contestants.part(Store.open(store.folder), ids)
    assert (
        part.samples() == sorted(ids)
        and part.samples("heldout") == []
        and len(part.read(ids[0])["input_ids"]) == int(store.row(ids[0])["length"])
    )


def test_operators_by_part():
    seconds = {
        "aten::mm": 3.0,
        "aten::bmm": 1.0,
        "aten::index_select": 0.5,
        "Optimizer.step#AdamW.step": 0.25,
        "aten::mul": 2.0,
        "Norm": 0.1,
    }
    found = trainer.by_part({name: (s, 1) for name, s in seconds.items()})
    assert (
        list(found)[:2] == ["matrix products, attention", "other arithmetic"]
        and sum(s for s, _ in found.values()) == 6.85
    )
    assert found["matrix products, attention"] == (4.0, [("aten::mm", 3.0), ("aten::bmm", 1.0)])
    assert (
        found["optimiser and clipping"][0] == 0.25
        and found["Python inside of autograd functions"][0] == 0.1
        and found["gather, scatter, masks"][0] == 0.5
    )


def test_flops_of_attention():
    assert (
        contestants.attention_flops((1, 4, 10, 16), (1, 2, 30, 16), (1, 2, 30, 16))
        == 2 * 4 * 10 * 30 * 32
    )
    assert (
        contestants.attention_backward_flops(
            None, (1, 4, 10, 16), (1, 2, 10, 16), (1, 2, 10, 16), None, None, 0.0, True
        )
        == 4 * 10 * 10 * 32 * 5 // 2
    )


def test_the_norms_of_speculators_by_hand():
    """One slot: it attends to itself alone, so its attended values are its own."""
    plain = make_drafter().float()
    drafter = Drafter(quality.normed(SHAPE), plain.vocab).float()
    with torch.no_grad():
        for p in drafter.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    states, token = torch.randn(1, len(BOUNDARIES) * SHAPE.target_hidden_size), torch.tensor([1])

    def norm(x, module):
        return x / (x.square().mean(-1, keepdim=True) + SHAPE.rms_norm_eps).sqrt() * module.weight

    layer = drafter.layers[0]
    hidden = norm(norm(states, drafter.input_norm) @ drafter.fc.weight.T, layer.hidden_norm)
    x = torch.cat([norm(drafter.embed_tokens.weight[token], layer.input_layernorm), hidden], dim=-1)
    values = (
        (x @ layer.self_attn.v_proj.weight.T)
        .view(SHAPE.n_kv_heads, 1, -1)
        .expand(-1, SHAPE.n_heads // SHAPE.n_kv_heads, -1)
        .reshape(1, -1)
    )
    middle = hidden + values @ layer.self_attn.o_proj.weight.T
    out = middle + layer.mlp(norm(middle, layer.post_attention_layernorm))
    found = drafter.extend(token, drafter.fuse(states), DraftCache())
    torch.testing.assert_close(found, out)
    torch.testing.assert_close(drafter.feed_back(found), norm(out, drafter.norm))
    torch.testing.assert_close(
        drafter.logits(found), norm(out, drafter.norm) @ drafter.lm_head.weight.T
    )
    assert isinstance(drafter, Drafter)
