"""Numbers about states and texts against closed forms, hand-made stores and slow, plain
definitions; and every figure drawn once from such tables.
"""

import itertools
import math

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch

matplotlib.use("Agg")

from eyas.errors import EyasError
from eyas.inspection import stats
from eyas.models.target import Head
from eyas.report import plots
from eyas.store.reader import Rows
from helpers.stores import write_store

HEAD = Head(torch.ones(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]), 1e-6)  # V = 3
IDS, MASK = torch.tensor([0, 1, 1, 2]), torch.tensor([False, False, True, True])
LOW = torch.tensor([[3000.0, 4000.0], [3.0, 4.0], [3.0, 4.0], [3.0, 4.0]], dtype=torch.bfloat16)
HIGH = torch.tensor(
    [[300.0, 400.0], [6.0, 8.0], [8.0, -6.0], [8.0, 6.0]], dtype=torch.bfloat16
)  # cosines with LOW: 1, 1, 0, 0.96


def small_store(folder, samples, dtype="bfloat16"):
    """samples: (id, split, input_ids, loss_mask, {boundary: states})."""
    states = samples[0][4]
    manifest = {
        "target": {"rms_norm_eps": 1e-6},
        "boundaries": sorted(states),
        "dtype": dtype,
        "hidden_size": next(iter(states.values())).shape[1],
    }
    return write_store(
        folder,
        manifest,
        HEAD,
        [Rows(id, split, "chat", ids, mask, states) for id, split, ids, mask, states in samples],
    )


@pytest.fixture
def store(tmp_path):
    """Three samples of 4 tokens, H = 2, boundaries 1 and 3.

    First tokens are huge; other norms are 5 and 10.
    """
    return small_store(
        tmp_path / "store",
        [
            (id, split, IDS, MASK, {1: LOW, 3: HIGH})
            for id, split in (("a", "train"), ("b", "heldout"), ("c", "train"))
        ],
    )


def made_tokens(states: dict[int, torch.Tensor], lengths: list[int]) -> stats.Tokens:
    n = sum(lengths)
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    position = torch.cat([torch.arange(length) for length in lengths])
    return stats.Tokens(
        [f"s{i}" for i in range(len(lengths))],
        sample,
        position,
        torch.arange(n) % 3,
        position > 0,
        states,
    )


def rows(n, width, seed=0):
    return torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---- what is looked at


def test_draws_are_bounded_and_repeat(store, tmp_path):
    assert sorted(stats.draw(store, 0)) == ["a", "b", "c"] and stats.draw(
        store, 0, tok=1
    ) == stats.draw(store, 0, tok=1)
    assert (
        stats.some(store, 9, 0) == ["a", "b", "c"]
        and stats.some(store, 1, 3) == stats.some(store, 1, 3)
        and len(stats.some(store, 1, 3)) == 1
    )
    many = small_store(
        tmp_path / "many", [(f"m{i}", "train", IDS, MASK, {1: LOW}) for i in range(40)]
    )
    assert [len(stats.draw(many, 0, tok=n)) for n in (47, 48, 1)] == [11, 12, 8] and stats.draw(
        many, 0, tok=48
    ) != stats.draw(many, 1, tok=48)
    with pytest.raises(EyasError, match="2 samples"):
        stats.draw(
            small_store(tmp_path / "two", [(id, "train", IDS, MASK, {1: LOW}) for id in "ab"]), 0
        )


def test_read_tokens(store):
    tokens = stats.read_tokens(store, ["b", "a"])
    assert (
        tokens.sample.tolist() == [0] * 4 + [1] * 4
        and tokens.position.tolist() == [0, 1, 2, 3] * 2
        and tokens.input_ids.tolist() == [0, 1, 1, 2] * 2
    )
    assert tokens.predicts.tolist() == [False, True, True, False] * 2 and torch.equal(
        tokens.states[3], torch.cat([HIGH, HIGH])
    )


def test_texts(tmp_path):
    """Two answers: the prompt is what stands before the last one and is not supervised."""
    ids, mask = torch.arange(8), torch.tensor([0, 0, 1, 1, 0, 1, 1, 0], dtype=torch.bool)
    store = small_store(
        tmp_path / "s", [("a", "train", ids, mask, {1: torch.ones(8, 2)})], "float32"
    )
    assert stats.texts(store, ["a"]) == ({"a": [0, 1, 4]}, [[2, 3], [5, 6]])
    assert stats.runs([True, False, True]) == [(0, 1), (2, 3)] and stats.runs([False]) == []


# ---- samples


def test_counts_by_split(store):
    table = stats.counts_by_split(store).set_index("split")
    assert dict(table["supervised_tok"]) == {"heldout": 2, "train": 4} and dict(table["tok"]) == {
        "heldout": 4,
        "train": 8,
    }
    assert table.loc["heldout", "gib"] * 2**30 == pytest.approx(
        4 * (2 * 2 * 2 + 9)
    )  # boundaries, H, bytes of bfloat16; id and mask


class Letters:
    def decode(self, ids, skip_special_tokens=False):
        return "".join("<e> a b & \n".split(" ")[i] for i in ids)


def test_marked_text():
    """Turns end with token 0; a cut answer's end is not marked; empty rests are no turn."""
    sample = {
        "input_ids": torch.tensor([1, 3, 0, 4, 2, 1, 0, 4]),
        "loss_mask": torch.tensor([0, 0, 0, 0, 1, 1, 0, 0], dtype=torch.bool),
    }
    pre = '<pre style="white-space: pre-wrap">'
    assert stats.marked_text(sample, Letters(), 0) == (
        f'<div class="muted">turn 1: 3 tokens, 0 of them '
        f"supervised</div>{pre}a&amp;&lt;e&gt;</pre>\n"
        f'<div class="muted">turn 2: 4 tokens, 2 of them '
        f"supervised</div>{pre}<mark>ba</mark>&lt;e&gt;</pre>"
    )


def test_example(tmp_path):
    turns = torch.tensor([0, 1, 0, 1], dtype=torch.bool)
    store = small_store(
        tmp_path / "s", [("a", "train", IDS, MASK, {1: LOW}), ("b", "train", IDS, turns, {1: LOW})]
    )
    assert stats.example(store, ["a", "b"]) == "b" and stats.example(store, ["a"]) == "a"


# ---- states


def test_boundary_stats(store):
    table = stats.boundary_stats(stats.read_tokens(store, ["a", "b"])).set_index("boundary")
    assert list(table.index) == [1, 3] and list(table["tok"]) == [8, 8]
    assert list(table["norm_p50"]) == [5, 10] and list(table["norm_p95"]) == [5, 10]
    assert table.loc[1, "first_norm_p50"] == pytest.approx(5000, rel=0.01) and table.loc[
        3, "first_norm_p50"
    ] == pytest.approx(500, rel=0.01)
    assert (
        list(table["large"]) == [4 / 16, 4 / 16]
        and list(table["first_largest"]) == [4000, 400]
        and list(table["largest"]) == [4, 8]
    )
    assert list(table["bad"]) == list(table["saturated"]) == list(table["zero_rows"]) == [0, 0]
    unit = np.array(
        [[0.6, 0.8], [0.8, -0.6], [0.8, 0.6]]
    )  # HIGH's later tokens, whatever their length
    p = np.linalg.svd(unit - unit.mean(axis=0), compute_uv=False) ** 2
    p /= p.sum()
    assert table.loc[3, "effective_rank"] == pytest.approx(
        math.exp(-(p * np.log(p)).sum()), rel=1e-5
    )


def test_unhealthy_states_are_counted():
    states = torch.ones(10, 4, dtype=torch.bfloat16)
    states[1, 0], states[2, 1], states[3, 2], states[4] = (
        torch.nan,
        -torch.inf,
        -torch.finfo(torch.bfloat16).max,
        0,
    )
    row = stats.boundary_stats(made_tokens({5: states}, [5, 5])).iloc[0]
    assert (row["bad"], row["saturated"], row["zero_rows"], row["large"]) == (
        2 / 40,
        1 / 40,
        1 / 10,
        1 / 40,
    )


def test_effective_rank():
    """Singular values 3, 2, 1: p = 9/14, 4/14, 1/14.

    Equal ones fill all directions; rotation, scale and more rows than columns change nothing.
    """
    p = np.array([9, 4, 1]) / 14
    expected = math.exp(-(p * np.log(p)).sum())
    q, r = torch.linalg.qr(rows(7, 3)).Q, torch.linalg.qr(rows(5, 5)).Q[:3]
    x = q @ torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)) @ r  # [7, 5]
    assert (
        stats.effective_rank(x)
        == pytest.approx(expected)
        == pytest.approx(stats.effective_rank(100 * x.T))
    )
    assert [
        stats.effective_rank(m) for m in (torch.eye(6), torch.ones(9, 6), torch.zeros(3, 2))
    ] == pytest.approx([6, 1, 0])


def test_massive_activations_do_not_decide():
    """First tokens a thousand times larger change neither rank, maps nor probes; a later token of
    that size hardly moves the rank.
    """
    states = {b: rows(90, 8, b).float() for b in (0, 4)}
    plain, huge = (
        made_tokens(states, [30, 30, 30]),
        made_tokens({b: x.clone() for b, x in states.items()}, [30, 30, 30]),
    )
    for x in huge.states.values():
        x[::30] *= 1000
    head = Head(torch.ones(8), rows(20, 8, 9).float(), 1e-6)
    rank = "effective_rank"
    assert list(stats.boundary_stats(plain)[rank]) == list(stats.boundary_stats(huge)[rank])
    assert np.array_equal(stats.cosine_map(plain, 0), stats.cosine_map(huge, 0)) and np.array_equal(
        stats.cka_map(plain, 0), stats.cka_map(huge, 0)
    )
    pd.testing.assert_frame_equal(stats.probes(plain, head, 0), stats.probes(huge, head, 0))
    huge.states[0][7, 3] = 25_000
    assert stats.boundary_stats(huge)[rank][0] == pytest.approx(
        stats.boundary_stats(plain)[rank][0], rel=0.02
    )


def test_massive_activations():
    states = torch.ones(8, 4)
    states[0, 2], states[4, 2], states[6, 1], states[1, 0] = (
        3000,
        -4000,
        150,
        90,
    )  # rows 0 and 4 are first tokens, of ids 0 and 1
    tokens = made_tokens({3: states, 5: states / 10}, [4, 4])
    table = stats.massive_activations(tokens)
    assert table.drop(columns="times_median").values.tolist() == [
        [
            2,
            True,
            1,
            1,
            (3, 5),
            -4000,
        ],
        [2, True, 0, 1, (3, 5), 3000],
        [1, False, 0, 1, (3,), 150],
    ]
    assert table["times_median"].tolist() == pytest.approx([4000, 3000, 150])
    assert len(stats.massive_activations(made_tokens({3: torch.ones(8, 4)}, [4, 4]))) == 0


# ---- boundaries against each other


def test_cosine_map(store):
    cosines = stats.cosine_map(stats.read_tokens(store, ["a"]), 0)
    assert cosines == pytest.approx(
        np.array([[1, 0.96], [0.96, 1]]), abs=1e-6
    )  # median of 1, 0, 0.96


def test_cka_of_copies_and_of_strangers():
    x = rows(200, 100)
    turned = 7 * x @ torch.linalg.qr(rows(100, 100, 1)).Q + rows(1, 100, 2)
    found = stats.cka([x, turned, rows(200, 100, 3)])
    assert found.diagonal() == pytest.approx(1) and found[0, 1] == pytest.approx(1)
    assert abs(found[0, 2]) < 0.05
    centred = [s - s.mean(dim=0) for s in (x, rows(200, 100, 3))]
    biased = (centred[0].T @ centred[1]).norm() ** 2 / (
        (centred[0].T @ centred[0]).norm() * (centred[1].T @ centred[1]).norm()
    )
    assert biased > 0.3, "what the usual estimator says of strangers when H is half of n"


def test_cka_is_the_unbiased_statistic():
    """HSIC as its definition: the mean of k_ij (l_ij + l_qr - 2 l_iq) over all ordered quadruples
    of different tokens.
    """
    sets = [rows(7, 3), rows(7, 2, 1) ** 3]
    grams = [(s @ s.T).numpy() for s in sets]

    def hsic(k, m):
        return np.mean(
            [
                k[i, j] * (m[i, j] + m[q, r] - 2 * m[i, q])
                for i, j, q, r in itertools.permutations(range(7), 4)
            ]
        )

    expected = hsic(*grams) / math.sqrt(hsic(grams[0], grams[0]) * hsic(grams[1], grams[1]))
    assert stats.cka(sets)[0, 1] == pytest.approx(expected) == pytest.approx(stats.cka(sets)[1, 0])
    with pytest.raises(EyasError, match="3 tokens"):
        stats.cka([rows(3, 2)])


@pytest.mark.parametrize("n", [30, 6])
def test_ridge(n):
    """The same as least squares with the penalty as extra rows, with fewer inputs than rows and
    with more.
    """
    x, y = rows(n, 9) + 5, rows(n, 2, 1) - 3
    for penalty, (weights, bias) in zip((0.1, 2.0), stats.ridge(x, y, (0.1, 2.0))):
        xc, yc = (x - x.mean(dim=0)).numpy(), (y - y.mean(dim=0)).numpy()
        expected = np.linalg.lstsq(
            np.vstack([xc, math.sqrt(n * penalty) * np.eye(9)]),
            np.vstack([yc, np.zeros((9, 2))]),
            rcond=None,
        )[0]
        assert weights.numpy() == pytest.approx(expected) and bias.numpy() == pytest.approx(
            (y.mean(dim=0) - x.mean(dim=0) @ weights).numpy()
        )


def test_r_squared():
    y = torch.tensor([[0.0, 0.0, 5.0], [2.0, 200.0, 5.0]])
    assert stats.r_squared(y, y) == 1 and stats.r_squared(y, y.mean(dim=0)) == 0
    assert stats.r_squared(
        y, torch.tensor([[0.0, 100.0, 5.0], [2.0, 100.0, 4.0]])
    ) == pytest.approx((1 + 0) / 2)  # by column; the constant one says nothing


def test_probes():
    """Boundary 1 is the last state, turned: all of it can be foreseen.

    Boundary 0 is noise: none of it, and the penalty is the largest.
    """
    lengths, last = [40] * 16, rows(640, 6, 1).float()
    turned = last @ torch.linalg.qr(rows(6, 6, 2)).Q.float()
    tokens = made_tokens({0: rows(640, 6, 3).float(), 1: turned, 2: last}, lengths)
    head = Head(torch.linspace(0.5, 1.5, 6), rows(50, 6, 4).float(), 1e-6)
    table = stats.probes(tokens, head, 0).set_index("boundary")
    assert (
        list(table["fit_tok"]) == [10 * 39] * 3
        and list(table["scored_tok"]) == list(table["judged_tok"]) == [4 * 39] * 3
    )
    assert (
        table.loc[1, "r2"] > 0.999 < table.loc[2, "r2"]
        and table.loc[1, "agreement"] > 0.97 < table.loc[2, "agreement"]
    )
    assert (
        abs(table.loc[0, "r2"]) < 0.05
        and table.loc[0, "penalty"] == max(stats.PENALTIES)
        and table.loc[0, "agreement"] < 0.2
    )
    assert (table["low"] <= table["agreement"]).all() and (
        table["agreement"] <= table["high"]
    ).all()
    silent = stats.Tokens(
        tokens.ids,
        tokens.sample,
        tokens.position,
        tokens.input_ids,
        torch.zeros(640, dtype=torch.bool),
        tokens.states,
    )
    with pytest.raises(EyasError, match="supervised"):
        stats.probes(silent, head, 0)


def test_next_token_agreement(store):
    """Token 2 is 1 and the state at 1 points to id 1: agrees.

    Token 3 is 2 and the state at 2 points to id 0: does not.
    """
    assert stats.next_token_agreement(stats.read_tokens(store, ["a"]), HEAD) == (1, 2)


# ---- texts


def test_jaccard():
    generator = np.random.default_rng(0)
    sets = [
        {1, 2, 3},
        {2, 3, 4, 5},
        set(),
        {9},
        *(set(generator.integers(0, 60, 25).tolist()) for _ in range(20)),
    ]
    found = stats.jaccard(sets)
    assert found[0, 1] == pytest.approx(2 / 5) and found[0, 3] == 0 and found[2, 2] == 0
    assert found == pytest.approx(
        np.array([[len(a & b) / max(len(a | b), 1) for b in sets] for a in sets])
    )


def test_shingles():
    assert (
        stats.shingles([1, 2, 3, 2, 3], 2) == {(1, 2), (2, 3), (3, 2)}
        and stats.shingles([7], 5) == {(7,)}
        and stats.shingles([], 5) == set()
    )


def test_similar_prompts():
    """p and q are the same, r has one token more, h is held out and like r; the template's tokens
    before each of them count in none.
    """
    words = {
        "p": list(range(10, 20)),
        "q": list(range(10, 20)),
        "r": list(range(10, 21)),
        "h": list(range(11, 21)),
    }
    words |= {f"x{i}": list(range(100 * i, 100 * i + 9)) for i in range(1, 12)}
    splits = dict.fromkeys(words, "train") | {"h": "heldout"}
    for template in ([], [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]):
        table = stats.similar_prompts(
            {id: template + w for id, w in words.items()}, splits
        ).set_index("id")
        assert list(table.loc[["p", "q", "r"], "same"]) == [1, 1, 0]
        across = (
            4 if template else 0
            # shingles with template and words: shared by p, q and r, not by h, which begins with
            # another word
        )
        assert table.loc["p", "jaccard"] == 1 and table.loc["p", "nearest"] == "q"
        assert table.loc["r", "jaccard"] == pytest.approx((6 + across) / (7 + across))
        assert (
            table.loc["h", "train_jaccard"]
            == table.loc["h", "jaccard"]
            == pytest.approx(6 / (7 + 2 * across))
            and table.loc["h", "nearest"] == "r"
        )
        assert table.loc["x3", "jaccard"] == 0


def test_repetition():
    table = stats.repetition(
        [[1, 2, 1, 2, 1], [5], [1, 2, 3]]
    )  # 12 21 12 21: two were there before
    assert table.values.tolist() == [[2, 4], [0, 2]]


# ---- vocabulary


def test_ceiling_by_hand():
    """Drafts of 2, token 9 outside.

    The prefill gives 1; drafts 2 3 and the bonus 9 (outside: a bonus comes from the target); 4 and
    the bonus 9; 9 fails at once and is its own bonus; 5 is the last: nothing is drafted behind it.
    """
    draftable = torch.ones(10, dtype=torch.bool)
    draftable[9] = False
    row = stats.ceiling([[1, 2, 3, 9, 4, 9, 9, 5]], draftable, 2).iloc[0]
    assert (row["tok"], row["covered"], row["verify_steps"], row["accepted"]) == (8, 5, 4, 4)
    assert stats.ceiling([[1], [9]], draftable, 2)[
        ["accepted", "verify_steps"]
    ].values.tolist() == [[0, 0], [0, 0]]


def test_ceiling_against_a_plain_walk_and_the_formula():
    generator = np.random.default_rng(0)
    draftable = torch.tensor([True, False])
    responses = [
        (generator.random(length) > 0.9).astype(int).tolist() for length in (1, 2, 3, 50, 20_000)
    ]  # coverage .9, independent
    for draft_length in (1, 3, 5):
        found = stats.ceiling(responses, draftable, draft_length)
        for ids, row in zip(responses, found.itertuples()):
            at = steps = accepted = 0
            while at < len(ids) - 1:
                hits = 0
                while (
                    hits < draft_length
                    and at + 1 + hits < len(ids)
                    and draftable[ids[at + 1 + hits]]
                ):
                    hits += 1
                steps, accepted, at = steps + 1, accepted + hits, at + hits + 1
            assert (row.verify_steps, row.accepted) == (steps, accepted)
        total = found.iloc[-1]
        assert (total["accepted"] + total["verify_steps"]) / total["verify_steps"] == pytest.approx(
            sum(0.9**i for i in range(draft_length + 1)), rel=0.01
        )


def test_ceilings():
    counts = torch.tensor([5, 3, 2, 0])
    table = stats.ceilings([[0, 0, 0, 0, 1, 0], [0, 2, 0]], counts, 2, 3, 0).set_index(
        "draft_vocab_size"
    )
    assert list(table.index) == [2, 4]
    assert (
        table.loc[2, "coverage"] == pytest.approx(8 / 9)
        and table.loc[4, "coverage"] == 1
        and table.loc[4, "formula"] == 4
    )
    # D = 2: 3 drafts and the bonus, then the last token by itself; a miss, then the last token. D =
    # 4: the same, and both drafts of the short one.
    assert table.loc[2, "acceptance_length"] == pytest.approx(
        (3 + 1 + 0 + 1 + 4) / 4
    ) and table.loc[4, "acceptance_length"] == pytest.approx((3 + 1 + 2 + 3) / 3)
    assert table.loc[2, "formula"] == pytest.approx(1 + 8 / 9 + (8 / 9) ** 2 + (8 / 9) ** 3)


# ---- two stores


def test_token_errors():
    x, y = (
        torch.tensor([[3.0, 4.0], [1.0, 0.0], [2.0, 2.0]]),
        torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 1.0]]),
    )
    error, cosine = stats.token_errors(x, y)
    assert error.tolist() == pytest.approx(
        [0, math.sqrt(5) / 2, 1]
    ) and cosine.tolist() == pytest.approx([1, 0, 1])


def test_drift(tmp_path):
    """Boundary 1 is the same, 3 differs by less than one rounding, 5 by more; one sample has other
    ids, one another mask, two are in one store only.
    """
    base = rows(4, 2).to(torch.bfloat16).float()

    def sample(id, factor=1.0, ids=IDS, mask=MASK):
        return (
            id,
            "train",
            ids,
            mask,
            {1: base, 3: base * (1 + 0.002 * (factor > 1)), 5: base * factor},
        )

    here = small_store(
        tmp_path / "here", [sample("a"), sample("b"), sample("c"), sample("only")], "float32"
    )
    there = small_store(
        tmp_path / "there",
        [
            sample("a", 1.01),
            sample("b", 1.01, ids=IDS + 1),
            sample("c", 1.01, mask=~MASK),
            sample("other"),
        ],
        "float32",
    )
    for store in (here, there):
        store.manifest["dtype"] = (
            # the bound comes from it; the states above are finer, so that the errors are exact
            "bfloat16"
        )
    found = stats.drift(here, there, 0)
    assert (
        found.samples,
        found.only_here,
        found.only_there,
        found.other_ids,
        found.other_mask,
    ) == (3, 1, 1, 1, 1) and found.rounding == 2**-8
    table = found.table.set_index("boundary")
    assert (
        list(table["tok"]) == [6, 6, 6]
        and list(table["identical"]) == [1, 0, 0]
        and list(table["parts"]) == [False, False, True]
    )
    assert list(table["error_p50"]) == pytest.approx(
        [0, 0.002 / 1.002, 0.01 / 1.01], rel=1e-3
    ) and list(table["cosine_p01"]) == pytest.approx([1, 1, 1])
    assert (
        "boundary 3 is the first that is not bit for bit the same everywhere; boundary 5 "
        "is the first that parts"
    ) in str(found)
    assert "all boundaries are bit for bit the same; no boundary parts" in str(
        stats.drift(here, here, 0)
    )
    others = small_store(tmp_path / "others", [sample("a", ids=IDS + 1)], "float32")
    assert "1 of 1 common samples have other token ids" in str(
        stats.drift(here, others, 0)
    ) and "no states were compared" in str(stats.drift(here, others, 0))
    with pytest.raises(EyasError, match="0 samples"):
        stats.drift(here, small_store(tmp_path / "strangers", [sample("z")], "float32"), 0)


def test_drift_of_fp8_is_one_rounding(tmp_path):
    states = {1: rows(50, 64).to(torch.bfloat16)}
    ids, mask = torch.arange(50), torch.arange(50) > 9
    plain, small = (
        small_store(tmp_path / dtype, [("a", "train", ids, mask, states)], dtype)
        for dtype in ("bfloat16", "float8_e4m3fn")
    )
    found = stats.drift(plain, small, 0)
    assert (
        found.rounding == 2**-4
        and not found.table["parts"].any()
        and 0.01 < found.table["error_p50"][0] < 2**-4
    )


# ---- figures


def interval(value, low=None, high=None):
    return {"value": value, "low": low, "high": high}


def test_every_plot_draws(store):
    """Each gives its axes, takes given ones, and shows the numbers that it got; without interval or
    held-out rows too.
    """
    metrics = pd.DataFrame(
        [
            {
                "step": s,
                "split": split,
                "draft_step": k,
                "loss": 3.0 - k,
                "accuracy": 0.25 * (k + 1),
                "slots": 10 * (k + 1),
            }
            for s in range(4)
            for split in ("train", "heldout")
            for k in range(2)
        ]
    )
    ax = plots.plot_loss(metrics)
    assert ax.get_lines()[-1].get_ydata() == pytest.approx([(3.0 * 10 + 2.0 * 20) / 30] * 4)
    assert plots.plot_draft_accuracy(metrics[metrics["split"] == "train"]).get_lines()[
        0
    ].get_ydata() == pytest.approx([0.25] * 4)
    judged = metrics.assign(acceptance_length=[np.nan] * (len(metrics) - 2) + [1.25] * 2)
    assert plots.plot_heldout_acceptance(judged).get_lines()[0].get_ydata() == pytest.approx([1.25])
    rows = [
        {"question": "mask", "variant": name, "difference": difference}
        for name, difference in (
            ("none", None),
            ("worse", {"value": -0.2, "low": -0.3, "high": -0.1}),
            ("either", {"value": 0.1, "low": -0.1, "high": 0.3}),
        )
    ]
    ax = plots.plot_ablations(rows)
    assert [t.get_text() for t in ax.get_yticklabels()] == [
        "mask: either",
        "mask: worse",
    ] and ax.containers[1].lines[0].get_xdata() == [-0.2]
    by_position = [
        {
            "position": i,
            "unconditional": interval(0.5 / i, 0.1, 0.6),
            "conditional": interval(0.5 if i == 1 else None),
        }
        for i in (1, 2)
    ]
    assert plots.plot_acceptance_by_position(by_position).get_lines()[
        0
    ].get_ydata() == pytest.approx([0.5, 0.25])
    categories = [
        {"category": c, "prompts": 2, "acceptance_length": interval(v, v, v)}
        for c, v in (("chat", 1.8), ("code", 1.5))
    ]
    assert [
        t.get_text() for t in plots.plot_acceptance_by_category(categories).get_yticklabels()
    ] == ["code (2)", "chat (2)"]
    _, given = matplotlib.pyplot.subplots()
    assert plots.plot_coverage(np.array([0, 6, 3, 1]), 2, given) is given
    assert (
        given.get_lines()[0].get_ydata() == pytest.approx([0.6, 0.9, 1, 1])
        and "90.0%" in given.texts[0].get_text()
    )
    assert [t.get_text() for t in plots.plot_categories(store.index).get_yticklabels()] == ["chat"]
    plots.plot_lengths(store.index)
    matplotlib.pyplot.close("all")


def test_every_plot_of_the_inspection_draws(store):
    tokens = stats.read_tokens(store, ["a", "b", "c"])
    table = stats.boundary_stats(tokens)
    ax = plots.plot_state_norms(table)
    assert ax.get_yscale() == "log" and ax.get_lines()[0].get_ydata() == pytest.approx([5, 10])
    assert plots.plot_largest(table, stats.LARGE).get_lines()[0].get_ydata() == pytest.approx(
        [4000, 400]
    )
    assert plots.plot_effective_rank(table, 2).get_ylabel() == "directions, of 2"
    left, right = plots.panels(2)
    assert [
        t.get_text()
        for t in plots.plot_boundary_map(np.array([[1, 0.5], [0.5, 1]]), (1, 3), "CKA", left).texts
    ] == ["1.00", "0.50", "0.50", "1.00"]
    assert not plots.plot_boundary_map(np.eye(31), tuple(range(31)), "CKA", right).texts
    probes = pd.DataFrame(
        {
            "boundary": [1, 3],
            "r2": [0.1, 1.0],
            "agreement": [0.2, 1.0],
            "low": [None, 0.9],
            "high": [None, 1.0],
            "constant": [0.1, 0.1],
        }
    )
    assert plots.plot_probes(probes.astype(float)).get_ylim()[0] == 0
    assert (
        plots.plot_histogram([0.1, 0.9], "share", "prompts", "Title", 0.8).get_ylabel()
        == "prompts, log scale"
    )
    ceilings = stats.ceilings([[0, 1, 0, 2]], torch.tensor([3, 2, 1, 0]), 2, 3, 0)
    assert "D = 2: 75.0%" in plots.plot_heldout_coverage(ceilings, 2).texts[0].get_text()
    assert plots.plot_ceiling(ceilings, 2, 3).texts[0].get_text().startswith("D = 2: ")
    drift = stats.drift(store, store, 0)
    assert (
        plots.plot_drift(drift.table, drift.rounding).get_yscale()
        == plots.plot_drift_cosine(drift.table).get_yscale()
        == "log"
    )
    matplotlib.pyplot.close("all")
