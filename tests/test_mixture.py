"""Several stores as one: how often each sample is seen, what is never trained on, and what is
refused.
"""

from collections import Counter

import pytest
import torch

from eyas.config import Config
from eyas.errors import EyasError
from eyas.models.target import Head
from eyas.models.vocab import count_tokens
from eyas.store.mixture import Mixture
from eyas.store.reader import Rows, Store
from helpers.stores import write_store

H, V = 4, 50
MANIFEST = {
    "target": {"name": "tiny", "fingerprint": "f" * 64, "rms_norm_eps": 1e-5},
    "boundaries": [1, 2, 4],
    "dtype": "bfloat16",
    "hidden_size": H,
}


def sample(
    id: str,
    split: str = "train",
    topic: str = "",
    prompt=None,
    answer=(7, 8),
    boundaries=(1, 2, 4),
    category="chat",
) -> Rows:
    """Its states are its id and the boundary; its prompt is its own unless it is given."""
    prompt = [1, *id.encode()] if prompt is None else prompt
    ids = torch.tensor([*prompt, *answer]) % V
    states = {
        b: torch.full((len(ids), H), float(b + sum(id.encode()) % 100)).bfloat16()
        for b in boundaries
    }
    return Rows(
        id, split, category, ids, torch.arange(len(ids)) >= len(prompt), states, topic=topic
    )


def write(folder, samples: list[Rows], **changes) -> Store:
    return write_store(
        folder / "store",
        MANIFEST | changes,
        Head(torch.ones(H), torch.ones(V, H), 1e-5),
        samples,
        shard_bytes=300,
    )


@pytest.fixture
def three(tmp_path) -> Mixture:
    """Two samples of weight 1, four of weight 0.5, one of weight 2.25; the ids of the stores
    overlap.
    """
    own, half, more = (
        write(tmp_path / name, [sample(id) for id in ids])
        for name, ids in (("own", "ba"), ("half", "abcd"), ("more", "a"))
    )
    return Mixture([("own", own, 1.0), ("half", half, 0.5), ("more", more, 2.25)])


# ---- how often


def test_weights_over_four_passes(three):
    passes = [
        Counter(three.epoch_keys(three.lengths("train"), epoch, seed=0)) for epoch in range(4)
    ]
    for seen in passes:
        assert seen["a"] == seen["b"] == 1
        assert sorted(seen[f"half/{id}"] for id in "abcd") == [0, 0, 1, 1]
    assert sum(passes, Counter()) == {
        "a": 4,
        "b": 4,
        "half/a": 2,
        "half/b": 2,
        "half/c": 2,
        "half/d": 2,
        "more/a": 9,
    }
    assert [seen["more/a"] for seen in passes] == [
        2,
        3,
        2,
        2,
    ]  # 2.25, 4.5, 6.75 and 9, rounded, half up


def test_a_share_goes_round_before_anything_comes_twice(tmp_path):
    """0.4 of five: two a pass.

    Five passes see each twice, and no window of them sees one twice before all were seen.
    """
    mixture = Mixture(
        [
            ("own", write(tmp_path / "own", [sample("x")]), 1.0),
            ("part", write(tmp_path / "part", [sample(id) for id in "abcde"]), 0.4),
        ]
    )
    passes = [
        [key for key in mixture.epoch_keys(mixture.samples("train"), epoch, seed=3) if key != "x"]
        for epoch in range(5)
    ]
    assert [len(set(seen)) for seen in passes] == [2] * 5
    assert set(Counter(sum(passes, [])).values()) == {2}
    assert len(set(sum(passes[:2], []))) == 4 and len(set(sum(passes[:3], []))) == 5


def test_a_pass_depends_on_seed_and_epoch_and_nothing_else(three):
    keys = three.samples("train")
    first = three.epoch_keys(keys, 1, seed=5)
    assert first == three.epoch_keys(three.lengths("train"), 1, 5)
    assert all(
        three.epoch_keys(keys, 1, seed) == three.epoch_keys(reversed(keys), 1, seed)
        for seed in range(10)
    )
    turned = Mixture(
        [
            (name, three.stores[name], weight)
            for name, weight in (("own", 1.0), ("more", 2.25), ("half", 0.5))
        ]
    )
    assert first == turned.epoch_keys(keys, 1, seed=5)
    assert first != three.epoch_keys(keys, 2, seed=5) and first != three.epoch_keys(keys, 1, seed=6)
    kept = {
        tuple(sorted(key for key in three.epoch_keys(keys, 0, seed) if key.startswith("half")))
        for seed in range(20)
    }
    assert len(kept) > 2  # the seed draws the share too, not only the order
    assert set(three.epoch_keys(["a", "more/a"], 0, seed=0)) == {"a", "more/a"}


def test_one_store_of_weight_1_is_the_store(tmp_path):
    """The order that training from a single store has always had, so that its checkpoints go on."""
    store = write(
        tmp_path / "own",
        [
            sample(f"s{n}", "heldout" if n == 3 else "train", category=f"c{n}")
            for n in (4, 2, 0, 3, 1)
        ],
    )
    mixture = Mixture([("own", store, 1.0)])
    assert (
        mixture.identity == store.identity
        and mixture.boundaries == (1, 2, 4)
        and mixture.manifest == store.manifest
        and mixture.dropped == {"topic": 0, "id": 0, "prompt": 0}
    )
    assert mixture.samples("train") == ["s4", "s2", "s0", "s1"] and mixture.samples("heldout") == [
        "s3"
    ]
    assert (
        mixture.lengths("train") == dict.fromkeys(["s4", "s2", "s0", "s1"], 5)
        and mixture.category("s2") == "c2"
    )
    assert [type(length) for length in mixture.lengths("heldout").values()] == [int]
    for epoch in range(3):
        order = torch.randperm(
            4, generator=torch.Generator().manual_seed(7 * 1_000_003 + epoch)
        ).tolist()
        assert mixture.epoch_keys(mixture.lengths("train"), epoch, seed=7) == [
            ["s0", "s1", "s2", "s4"][n] for n in order
        ]
    assert torch.equal(mixture.read("s3", (2,))["states"][2], store.read("s3", (2,))["states"][2])
    assert torch.equal(
        count_tokens(mixture, mixture.samples("train")), count_tokens(store, store.samples("train"))
    )
    assert torch.equal(mixture.head().lm_head, store.head().lm_head)


# ---- what


def test_a_key_finds_its_store(tmp_path):
    own = write(tmp_path / "own", [sample("a"), sample("h", "heldout")])
    more = write(
        tmp_path / "more",
        [sample("a", prompt=[9, 9, 9], category="code"), sample("b", answer=[5, 6, 7])],
        boundaries=[1, 2, 4],
        dtype="float8_e4m3fn",
    )
    mixture = Mixture([("own", own, 1.0), ("more", more, 1.0)])
    assert mixture.samples("train") == ["a", "more/a", "more/b"] and mixture.lengths("train") == {
        "a": 4,
        "more/a": 5,
        "more/b": 5,
    }
    assert mixture.read("a", (1,))["input_ids"].tolist() == [1, 47, 7, 8] and mixture.read(
        "more/a", (1,)
    )["input_ids"].tolist() == [9, 9, 9, 7, 8]
    assert (
        list(mixture.read("more/b")["states"]) == [1, 2, 4]
        and mixture.read("more/b", (4,))["states"][4].dtype == torch.bfloat16
    )
    assert [mixture.category(key) for key in ("a", "more/a", "h")] == ["chat", "code", "chat"]
    rows = mixture.rows("train").set_index("key")
    assert (
        rows.loc["more/b", ["id", "length", "loss_tok"]].tolist() == ["b", 5, 3]
        and not rows.isna().any().any()
    )
    assert {
        key: (ids.tolist(), mask.tolist()) for key, ids, mask in mixture.texts(["more/b", "a"])
    } == {
        "a": ([1, 47, 7, 8], [False, False, True, True]),
        "more/b": ([1, 48, 5, 6, 7], [False, False, True, True, True]),
    }
    counts = count_tokens(mixture, mixture.samples("train"))
    assert {n: int(count) for n, count in enumerate(counts) if count} == {5: 1, 6: 1, 7: 3, 8: 2}
    with pytest.raises(EyasError, match="'z' is not in the store"):
        mixture.read("more/z", ())


def test_boundaries_are_those_that_all_have(tmp_path):
    own = write(tmp_path / "own", [sample("a")])
    more = write(tmp_path / "more", [sample("a", boundaries=(0, 2, 4))], boundaries=[0, 2, 4])
    mixture = Mixture([("own", own, 1.0), ("more", more, 1.0)])
    assert (
        mixture.boundaries
        == (2, 4)
        == tuple(mixture.read("more/a")["states"])
        == tuple(mixture.read("a")["states"])
    )


def test_the_identity_is_that_of_every_store_and_weight(tmp_path):
    own, more = write(tmp_path / "own", [sample("a")]), write(tmp_path / "more", [sample("b")])
    other = write(tmp_path / "other", [sample("b", answer=[1, 2])])
    mixes = [
        [("own", own, 1.0), ("more", more, 1.0)],
        [("own", own, 1.0), ("more", more, 0.5)],
        [("own", own, 1.0), ("more", other, 1.0)],
        [("own", own, 1.0), ("name", more, 1.0)],
        [("own", own, 1.0), ("more", more, 1.0), ("other", other, 1.0)],
        [("own", own, 1.0)],
        [("own", own, 2.0)],
    ]
    identities = [Mixture(mix).identity for mix in mixes]
    assert len(set(identities)) == len(mixes) and identities == [
        Mixture(mix).identity for mix in mixes
    ]
    assert Mixture([mixes[4][0], mixes[4][2], mixes[4][1]]).identity == identities[4]


# ---- what is held out is never trained on


def mixed(folder, own: list[Rows], more: list[Rows]) -> Mixture:
    return Mixture(
        [("own", write(folder / "own", own), 1.0), ("more", write(folder / "more", more), 1.0)]
    )


def test_a_heldout_topic_of_any_store(tmp_path):
    mixture = mixed(
        tmp_path,
        [
            sample("h", "heldout", "bees"),
            sample("a", topic="bees"),
            sample("b", topic="wine"),
            sample("c", topic="salt"),
        ],
        [sample("i", "heldout", "wine"), sample("d", topic="bees"), sample("e", topic="salt")],
    )
    assert mixture.samples("train") == ["c", "more/e"] and mixture.dropped == {
        "topic": 3,
        "id": 0,
        "prompt": 0,
    }
    assert (
        mixture.samples("heldout")
        == ["h"]
        == list(mixture.lengths("heldout"))
        == list(mixture.rows("heldout")["key"])
    )


def test_an_unknown_topic_is_no_topic(tmp_path):
    mixture = mixed(tmp_path, [sample("h", "heldout"), sample("a")], [sample("b")])
    assert mixture.samples("train") == ["a", "more/b"] and sum(mixture.dropped.values()) == 0


def test_a_heldout_id_of_any_store(tmp_path):
    mixture = mixed(
        tmp_path,
        [sample("h", "heldout"), sample("i", prompt=[3, 4]), sample("a")],
        [sample("i", "heldout"), sample("h", prompt=[4, 5]), sample("b")],
    )
    assert mixture.samples("train") == ["a", "more/b"] and mixture.dropped == {
        "topic": 0,
        "id": 2,
        "prompt": 0,
    }


def test_a_heldout_prompt_of_any_store(tmp_path):
    """The same prompt with another answer; not one that it begins, nor the same text with another
    border.
    """
    own = [
        sample("h", "heldout", prompt=[1, 2, 3], answer=[7]),
        sample("a", prompt=[1, 2, 3], answer=[9, 9]),
        sample("b", prompt=[1, 2]),
        sample("c", prompt=[1, 2, 3, 7]),
        sample("d", prompt=[5, 6]),
    ]
    mixture = mixed(
        tmp_path,
        own,
        [
            sample("i", "heldout", prompt=[5, 6]),
            sample("e", prompt=[1, 2, 3]),
            sample("f", prompt=[5, 5]),
        ],
    )
    assert mixture.samples("train") == ["b", "c", "more/f"] and mixture.dropped == {
        "topic": 0,
        "id": 0,
        "prompt": 3,
    }


@pytest.mark.parametrize("prompt", [[], [1]])
def test_texts_without_a_question_are_compared_whole(tmp_path, prompt):
    """All of them begin with the same nothing, or the same begin-of-text."""
    own = [
        sample("h", "heldout", prompt=prompt, answer=[5, 6, 7]),
        sample("a", prompt=prompt, answer=[5, 6, 8]),
        sample("b", prompt=prompt, answer=[5, 6, 7]),
    ]
    mixture = Mixture([("own", write(tmp_path / "own", own), 1.0)])
    assert mixture.samples("train") == ["a"] and mixture.dropped["prompt"] == 1


def test_a_sample_is_dropped_for_one_reason(tmp_path):
    mixture = mixed(
        tmp_path,
        [sample("h", "heldout", "bees", prompt=[1, 2]), sample("a")],
        [sample("h", topic="bees", prompt=[1, 2])],
    )
    assert mixture.samples("train") == ["a"] and mixture.dropped == {
        "topic": 1,
        "id": 0,
        "prompt": 0,
    }


def test_what_was_not_extracted_is_not_there(tmp_path):
    own = write(
        tmp_path / "own",
        [sample("a"), sample("b"), sample("h", "heldout", "bees"), sample("c", topic="bees")],
    )
    own.index.loc[own.index["id"].isin(["b", "h"]), "state"] = "failed"
    mixture = Mixture([("own", own, 1.0)])
    assert (
        mixture.samples("train") == ["a", "c"]
        and mixture.samples("heldout") == []
        and mixture.dropped["topic"] == 0
    )


# ---- how it is asked for


@pytest.fixture
def runs(data):
    """Runs own, more, code, which are alike; `foreign` has another target, `normed` last states
    after the norm.
    """
    for name in ("own", "more", "code"):
        write(data / "runs" / name, [sample(name)])
    write(
        data / "runs" / "foreign",
        [sample("x")],
        target=MANIFEST["target"] | {"fingerprint": "g" * 64},
    )
    write(data / "runs" / "normed", [sample("x")], last_state="post-norm")


@pytest.mark.parametrize(
    "mix, weights",
    [
        ("", {"own": 1.0}),
        ("more", {"own": 1.0, "more/more": 1.0}),
        ("more:0.25", {"own": 1.0, "more/more": 0.25}),
        (" code : 2 , more ,", {"own": 1.0, "code/code": 2.0, "more/more": 1.0}),
    ],
)
def test_a_mix_is_opened(runs, mix, weights):
    config = Config.create(run_name="own", mix=mix)
    mixture = Mixture.open(config, Store.open(config.store_dir))
    seen = Counter(
        key
        for epoch in range(4)
        for key in mixture.epoch_keys(mixture.samples("train"), epoch, seed=0)
    )
    assert {key: n / 4 for key, n in seen.items()} == weights
    assert list(mixture.stores) == [key.split("/")[0] for key in weights]


@pytest.mark.parametrize(
    "mix, said",
    [
        (
            "more:0",
            "run 'more' the weight 0; expected a number above 0; next: .*-p mix NAME:WEIGHT",
        ),
        ("more:-1", "weight -1"),
        ("more:nan", "weight nan"),
        ("more:inf", "weight inf"),
        ("more:", "weight ''"),
        ("more:two", "weight 'two'"),
        ("more:1:2", "weight '1:2'"),
        (":1", "names a run ''"),
        ("../own", "names a run '../own'"),
        ("..", "names a run '..'"),
        ("more,more:0.5", "a run twice, or the run itself"),
        ("own:2", "a run twice, or the run itself"),
        (
            "nothing",
            "'nothing', which has no store; .*next: python -m eyas extract -p run_name nothing",
        ),
        (
            "more,foreign",
            (
                "store of run 'foreign' is of another target than that of run 'own': "
                "gggggggggggg; expected ffffffffffff"
            ),
        ),
        (
            "normed",
            (
                "run 'normed' is of another side of the final norm than that of run 'own': "
                "post-norm; expected pre-norm"
            ),
        ),
    ],
)
def test_refused(runs, mix, said):
    config = Config.create(run_name="own", mix=mix)
    with pytest.raises(EyasError, match=said):
        Mixture.open(config, Store.open(config.store_dir))
