"""Numbers about states on a store whose right values are known by hand, and every figure drawn once from such tables."""

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch

matplotlib.use("Agg")

from eyas import plots, stats
from eyas.store import Rows
from eyas.target import Head
from stores import write_store


@pytest.fixture
def store(tmp_path):
    """Two samples of 4 tokens, H = 2, boundaries 1 and 3. First tokens are huge; other norms are 5 and 10 and point the same way."""
    head = Head(torch.ones(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]), 1e-6)  # V = 3
    manifest = {"target": {"rms_norm_eps": 1e-6}, "boundaries": [1, 3], "dtype": "bfloat16", "hidden_size": 2}
    low = torch.tensor([[3000.0, 4000.0], [3.0, 4.0], [3.0, 4.0], [3.0, 4.0]], dtype=torch.bfloat16)
    high = torch.tensor([[300.0, 400.0], [6.0, 8.0], [8.0, -6.0], [8.0, 6.0]], dtype=torch.bfloat16)  # cosines with low: 1, 0, 0.96
    ids, mask = torch.tensor([0, 1, 1, 2]), torch.tensor([False, False, True, True])
    return write_store(tmp_path / "store", manifest, head, [Rows(id, split, "chat", ids, mask, {1: low, 3: high}) for id, split in (("a", "train"), ("b", "heldout"))])


def test_state_stats(store):
    table = stats.state_stats(store, ["a", "b"]).set_index("boundary")
    assert list(table.index) == [1, 3] and list(table["tok"]) == [8, 8] and list(table["samples"]) == [2, 2]
    assert list(table["norm_p50"]) == [5, 10] and list(table["norm_p95"]) == [5, 10]
    assert table.loc[1, "first_norm_p50"] == pytest.approx(5000, rel=0.01) and table.loc[3, "first_norm_p50"] == pytest.approx(500, rel=0.01)
    assert table.loc[1, "cosine_p50"] == pytest.approx(0.96, abs=1e-4) and np.isnan(table.loc[3, "cosine_p50"])
    assert list(table["large"]) == [4 / 16, 4 / 16] and table.loc[1, "largest"] == 4000 and list(table["bad"]) == [0, 0]


def test_next_token_agreement(store):
    """Token 2 is 1 and the state at 1 points to id 1: agrees. Token 3 is 2 and the state at 2 points to id 0: does not."""
    assert stats.next_token_agreement(store, ["a"]) == (1, 2)


def test_some_is_bounded_and_repeats(store):
    assert stats.some(store, 5, 0) == ["a", "b"] and stats.some(store, 5, 0, "heldout") == ["b"]
    assert stats.some(store, 1, 3) == stats.some(store, 1, 3) and len(stats.some(store, 1, 3)) == 1


def test_counts_by_split(store):
    table = stats.counts_by_split(store.index).set_index("split")
    assert dict(table["supervised_tok"]) == {"heldout": 2, "train": 2} and dict(table["tok"]) == {"heldout": 4, "train": 4}


def test_marked_text():
    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return "".join("<|s|> a b&".split(" ")[i] for i in ids)

    sample = {"input_ids": torch.tensor([0, 1, 2, 0]), "loss_mask": torch.tensor([False, True, True, False])}
    assert stats.marked_text(sample, Tokenizer()) == '<pre style="white-space: pre-wrap">&lt;|s|&gt;<mark>ab&amp;</mark>&lt;|s|&gt;</pre>'


def interval(value, low=None, high=None):
    return {"value": value, "low": low, "high": high}


def test_every_plot_draws(store):
    """Each gives its axes, takes given ones, and shows the numbers that it got; without interval or held-out rows too."""
    metrics = pd.DataFrame([{"step": s, "split": split, "draft_step": k, "loss": 3.0 - k, "accuracy": 0.25 * (k + 1), "slots": 10 * (k + 1)}
                            for s in range(4) for split in ("train", "heldout") for k in range(2)])
    ax = plots.plot_loss(metrics)
    assert ax.get_lines()[-1].get_ydata() == pytest.approx([(3.0 * 10 + 2.0 * 20) / 30] * 4)
    assert plots.plot_draft_accuracy(metrics[metrics["split"] == "train"]).get_lines()[0].get_ydata() == pytest.approx([0.25] * 4)
    by_position = [{"position": i, "unconditional": interval(0.5 / i, 0.1, 0.6), "conditional": interval(0.5 if i == 1 else None)} for i in (1, 2)]
    assert plots.plot_acceptance_by_position(by_position).get_lines()[0].get_ydata() == pytest.approx([0.5, 0.25])
    categories = [{"category": c, "prompts": 2, "acceptance_length": interval(v, v, v)} for c, v in (("chat", 1.8), ("code", 1.5))]
    assert [t.get_text() for t in plots.plot_acceptance_by_category(categories).get_yticklabels()] == ["code (2)", "chat (2)"]
    assert plots.plot_state_norms(stats.state_stats(store, ["a"])).get_yscale() == "log"
    _, given = matplotlib.pyplot.subplots()
    assert plots.plot_coverage(np.array([0, 6, 3, 1]), 2, given) is given
    assert given.get_lines()[0].get_ydata() == pytest.approx([0.6, 0.9, 1, 1]) and "90.0%" in given.texts[0].get_text()
    assert [t.get_text() for t in plots.plot_categories(store.index).get_yticklabels()] == ["chat"]
    plots.plot_lengths(store.index)
    matplotlib.pyplot.close("all")
