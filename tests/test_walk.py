"""The offline walk against texts that are built draft by draft with the drafter's cache, so that
every hit is known beforehand.
"""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from eyas.config import Config
from eyas.errors import EyasError
from eyas.evaluation.acceptance import DRAFTER, SAMPLED, Acceptance, Prompt
from eyas.evaluation.decode import EagleDraft, TargetStream, Trace, load_model, speculative_decode
from eyas.evaluation.offline import (
    against_decoding,
    agreement,
    expected_walk,
    jump,
    leading_hits,
    overlaps,
    run_walk,
    sampled_walk,
    walk,
    walk_texts,
)
from eyas.models.drafter import DraftCache, Drafter, DrafterConfig
from eyas.models.target import Head, load_target
from eyas.models.vocab import DraftVocab
from eyas.store.reader import Rows, Store
from helpers import stores
from helpers.taught import make_prompts, teach
from helpers.tiny import make_tiny_target

BOUNDARIES = (1, 3, 4)
HIDDEN, VOCAB, LENGTH = 16, 40, 3


@pytest.fixture(scope="module")
def drafter():
    torch.manual_seed(1)
    config = DrafterConfig(
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=30,
        n_heads=4,
        n_kv_heads=2,
        head_dim=4,
        intermediate_size=24,
        rms_norm_eps=1e-5,
        rope_theta=1000.0,
        max_position_embeddings=128,
        boundaries=BOUNDARIES,
    )
    made = Drafter(config, DraftVocab(torch.arange(5, 35), VOCAB)).eval()
    for name, weight in made.named_parameters():
        if "norm" in name:
            weight.data.uniform_(
                0.5, 1.5
            )  # a norm left at 1 would hide one that is forgotten or doubled
    return made


@torch.no_grad()
def drafts_after(drafter, ids: list[int], states: torch.Tensor, n_drafts: int) -> list[int]:
    """What serving would draft with `ids` committed: an empty cache, all committed slots, then its
    own outputs one by one.
    """
    cache = DraftCache()
    out = drafter.extend(torch.tensor(ids[1:]), drafter.fuse(states[: len(ids) - 1]), cache)[-1:]
    drafts = [int(drafter.vocab.ids[drafter.logits(out).argmax()])]
    while len(drafts) < n_drafts:
        out = drafter.extend(torch.tensor(drafts[-1:]), out, cache)
        drafts.append(int(drafter.vocab.ids[drafter.logits(out).argmax()]))
    return drafts


def make_text(
    drafter, generator, n_prompt: int, hits: list[int], last: int = 0
) -> tuple[list[int], torch.Tensor]:
    """A text whose response makes the walk accept exactly `hits`; with `last`, the response ends
    inside a run of that many accepted drafts.
    """
    states = torch.randn(200, len(BOUNDARIES) * HIDDEN, generator=generator).bfloat16().float()
    ids = torch.randint(
        0, VOCAB, (n_prompt + 1,), generator=generator
    ).tolist()  # prompt and the token that the prefill gives
    for n in hits:
        drafts = drafts_after(drafter, ids, states, LENGTH)
        wrong = (
            (drafts[n] + 1) % VOCAB if n < LENGTH else 1
        )  # the bonus token; 0 to 4 are outside the draft vocabulary
        ids += [*drafts[:n], wrong]
    if last:
        ids += drafts_after(drafter, ids, states, LENGTH)[:last]
    return ids, states[: len(ids)]


@pytest.mark.parametrize("n_prompt", [1, 2, 23])
def test_hits_and_jumps_are_those_that_the_text_was_built_with(drafter, n_prompt):
    generator = torch.Generator().manual_seed(n_prompt)
    for hits, last in (
        ([0, 3, 1, 0, 2, 3, 3, 0], 0),
        ([3, 3, 3], 2),
        ([], 1),
        ([], 3),
        ([2], 1),
        ([], 0),
    ):
        ids, states = make_text(drafter, generator, n_prompt, hits, last)
        found = leading_hits(drafter, torch.tensor(ids), states, n_prompt, LENGTH)
        proposed, accepted = jump(found, LENGTH)
        assert accepted.tolist() == hits + [last] * bool(last)
        # only a step near the end is cut: where the response had fewer tokens left than drafts
        left = np.cumsum([0, *(h + 1 for h in hits)])[: len(proposed)]
        assert proposed.tolist() == [min(LENGTH, len(ids) - n_prompt - 1 - at) for at in left]


def test_hits_of_every_slot_equal_a_loop_from_scratch(drafter):
    generator = torch.Generator().manual_seed(5)
    ids, states = make_text(drafter, generator, 6, [3, 0, 1, 3, 2, 0, 0, 3], 2)
    found = leading_hits(drafter, torch.tensor(ids), states, 6, LENGTH)
    slow = []
    for at in range(6, len(ids) - 1):
        drafts, wanted = (
            drafts_after(drafter, ids[: at + 1], states, LENGTH),
            ids[at + 1 : at + 1 + LENGTH],
        )
        slow.append(
            next((i for i, (a, b) in enumerate(zip(drafts, wanted)) if a != b), len(wanted))
        )
    assert found.tolist() == slow


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_overlaps_equal_a_loop_from_scratch(drafter, temperature):
    """Each point by itself: a cache, the stored tokens fed one by one, both distributions over all
    V tokens in float64.
    """
    generator = torch.Generator().manual_seed(7)
    n, start = 17, 5
    ids = torch.randint(0, VOCAB, (n,), generator=generator)
    states, last = (
        torch.randn(n, len(BOUNDARIES) * HIDDEN, generator=generator),
        3 * torch.randn(n, HIDDEN, generator=generator),
    )
    head = Head(
        torch.rand(HIDDEN, generator=generator) + 0.5,
        torch.randn(VOCAB, HIDDEN, generator=generator),
        1e-5,
    )
    found = overlaps(drafter, head, ids, states, last, start, LENGTH, temperature)
    assert found.shape == (n - 1 - start, LENGTH)
    for point in range(n - 1 - start):
        cache, out = DraftCache(), None
        for step in range(LENGTH):
            at = start + 1 + point + step  # the token that is drafted
            if at >= n:
                assert np.isnan(found[point, step])
                continue
            if step == 0:
                out = drafter.extend(ids[1:at], drafter.fuse(states[: at - 1]), cache)[-1:]
            else:
                out = drafter.extend(ids[at - 1 : at], drafter.feed_back(out), cache)
            q = torch.zeros(VOCAB, dtype=torch.float64)
            q[drafter.vocab.ids] = (drafter.logits(out)[0].double() / temperature).softmax(-1)
            x = last[at - 1].double()
            x = x / (x.square().mean() + 1e-5).sqrt() * head.norm_weight.double()
            p = (head.lm_head.double() @ x / temperature).softmax(-1)
            assert found[point, step] == pytest.approx(torch.minimum(p, q).sum().item(), abs=1e-5)
    assert np.nanmax(found) > 2 * np.nanmin(found)


def test_expected_walk_equals_an_enumeration():
    """Every course of acceptances by itself, with its probability."""
    generator = np.random.default_rng(4)
    for n, k in ((1, 3), (2, 3), (7, 3), (9, 1), (8, 4)):
        chances = generator.uniform(0.05, 0.95, (n, k))
        for t in range(n):
            chances[t, min(k, n - t) :] = np.nan
        total = {"verify_steps": 0.0, "accepted": 0.0} | {
            f"{name}_{i + 1}": 0.0 for name in ("reached", "accepted") for i in range(k)
        }
        courses = [(0, 1.0, [])]  # next point, probability, hits of the steps so far
        while courses:
            t, probability, steps = courses.pop()
            if t >= n:
                for point, hits in steps:
                    total["verify_steps"] += probability
                    total["accepted"] += probability * hits
                    for i in range(k):
                        total[f"accepted_{i + 1}"] += probability * (hits > i)
                        total[f"reached_{i + 1}"] += probability * (
                            hits >= i and i < min(k, n - point)
                        )
                continue
            left = min(k, n - t)
            for hits in range(left + 1):
                course = np.prod(chances[t, :hits]) * (
                    1.0 if hits == left else 1 - chances[t, hits]
                )
                courses.append((t + hits + 1, probability * course, [*steps, (t, hits)]))
        found = expected_walk(chances)
        assert {name: found[name] for name in total} == pytest.approx(total)
        assert (
            found["all_hits"] == pytest.approx(np.nansum(np.cumprod(chances, axis=1)))
            and found["all_slots"] == n
        )
    # certain hits and certain misses: the greedy walk
    hits = np.array([2, 0, 0, 1, 3, 0, 2, 1])
    chances = (np.arange(3) < hits[:, None]).astype(float)
    _, accepted = jump(np.minimum(hits, 8 - np.arange(8)), 3)
    assert (found := expected_walk(chances))["accepted"] == accepted.sum() and found[
        "verify_steps"
    ] == len(accepted)


def write_store(folder, drafter, samples) -> Store:
    """samples: id -> (split, prompt tokens, hits)."""
    generator = torch.Generator().manual_seed(9)
    head = Head(
        torch.ones(HIDDEN), torch.zeros(VOCAB, HIDDEN), 1e-5
    )  # p is the same for every token
    manifest = {
        "boundaries": list(BOUNDARIES),
        "target": {"rms_norm_eps": 1e-5},
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "prompts": {"hash": None},
    }
    rows = []
    for id, (split, n_prompt, hits) in samples.items():
        ids, states = make_text(drafter, generator, n_prompt, hits)
        line_break = torch.tensor([3])  # after the end of the turn, not supervised
        mask = torch.tensor([False] * n_prompt + [True] * (len(ids) - n_prompt) + [False])
        states = (
            torch.cat([states, torch.zeros(1, states.shape[1])]).bfloat16().split(HIDDEN, dim=-1)
        )
        rows.append(
            Rows(
                id,
                split,
                "chat",
                torch.cat([torch.tensor(ids), line_break]),
                mask,
                dict(zip(BOUNDARIES, (s.contiguous() for s in states))),
            )
        )
    return stores.write_store(folder, manifest, head, rows)


def test_walk_is_on_the_device_of_the_profile(data, drafter, monkeypatch):
    config = Config.create(run_name="t", speculative_num_steps=LENGTH, threads=1, device="cuda")
    store = write_store(config.store_dir, drafter, {"a": ("heldout", 4, [3, 0, 2])})
    asked = []
    monkeypatch.setattr(
        Drafter, "to", lambda self, device: asked.append(device) or self
    )  # there may be no GPU here
    run_walk(config, drafter, store)
    assert asked == ["cuda"]


def test_walk_of_a_store(data, drafter):
    config = Config.create(run_name="t", speculative_num_steps=LENGTH, threads=1)
    store = write_store(
        config.store_dir,
        drafter,
        {
            "a": ("heldout", 4, [3, 0, 2]),
            "b": ("train", 4, [3, 3]),
            "c": ("heldout", 9, [0, 0, 1, 3]),
        },
    )
    table = walk(drafter, store, ["a", "c"], LENGTH)
    assert (
        list(table["id"]) == ["a", "c"]
        and list(table["verify_steps"]) == [3, 4]
        and list(table["accepted"]) == [5, 4]
    )
    record = run_walk(config, drafter, store)
    assert record == json.loads((config.acceptance_dir / "walk.json").read_text())
    assert (
        record["counts"]["samples"],
        record["counts"]["verify_steps"],
        record["counts"]["accepted"],
    ) == (2, 7, 9)
    assert record["acceptance_length"]["value"] == pytest.approx(16 / 7)
    assert record["accepted_per_step"]["value"] == pytest.approx(9 / 7)
    # by hand, from the hits [3, 0, 2] and [0, 0, 1, 3]: a draft at position i+1 is reached when i
    # were accepted. The last but one token of a
    # response is followed by its last one only, so the steps [2] (3 tokens left: all 3 drafts) and
    # [3] (4 left) are whole.
    assert [p["accepted"] for p in record["by_position"]] == [4, 3, 2]
    assert [p["reached"] for p in record["by_position"]] == [7, 4, 3]
    assert [p["proposed"] for p in record["by_position"]] == [7, 7, 7]
    # the over-stating figure counts every slot
    hits = [
        leading_hits(
            drafter,
            s["input_ids"][:-1],
            torch.cat([s["states"][b] for b in BOUNDARIES], -1)[:-1],
            p,
            LENGTH,
        )
        for s, p in ((store.read("a"), 4), (store.read("c"), 9))
    ]
    assert record["all_slots_acceptance_length"]["value"] == pytest.approx(
        1 + np.concatenate(hits).mean()
    )
    # only the first four tokens: of "a" ([3, 0, 2]) the first and three drafts, of "c" ([0, 0, 1,
    # 3]) two without a hit and a draft
    cut = walk(drafter, store, ["a", "c"], LENGTH, max_tok=4)
    assert (
        list(cut["response_tok"]) == [4, 4]
        and list(cut["verify_steps"]) == [1, 3]
        and list(cut["accepted"]) == [3, 1]
    )
    # sampled: p is 1/40 everywhere, so a draft is accepted with probability sum min(1/40, q) <
    # 30/40, whatever the text
    sampled = sampled_walk(drafter, store, ["a", "c"], LENGTH, 1.0)
    assert record["sampled"]["counts"]["accepted"] == pytest.approx(sampled["accepted"].sum())
    assert record["sampled"]["acceptance_length"]["value"] == pytest.approx(
        1 + sampled["accepted"].sum() / sampled["verify_steps"].sum()
    )
    assert all(0 < p["conditional"]["value"] < 30 / 40 for p in record["sampled"]["by_position"])
    # tokens outside the draft vocabulary (below 5, from 35 on), the first of a response left out
    outside = sum(
        int(((s["input_ids"][p + 1 : -1] < 5) | (s["input_ids"][p + 1 : -1] >= 35)).sum())
        for s, p in ((store.read("a"), 4), (store.read("c"), 9))
    )
    assert record["counts"]["outside_vocab_tok"] == outside > 0


def test_offline_minus_real_by_hand(data, drafter, monkeypatch):
    config = Config.create(run_name="t", speculative_num_steps=LENGTH, decode_new_tok=7, threads=1)
    store = write_store(
        config.store_dir,
        drafter,
        {
            "a": ("heldout", 4, [3, 0, 2]),
            "c": ("heldout", 9, [0, 0, 1, 3]),
            "d": ("heldout", 5, [1, 1]),
            "t": ("train", 4, [3]),
        },
    )
    ids = {id: store.read(id)["input_ids"] for id in "ac"}
    texts = {
        "c": ids["c"][9:16].tolist(),
        "x": [1, 2],
        "a": [*ids["a"][4:10].tolist(), 99],
    }  # c as stored, x not stored, a parts at its last token
    prompts = pd.DataFrame({"id": list(texts), "verify_steps": [4, 1, 2], "accepted": [3, 1, 6]})
    drawn = pd.DataFrame(
        {"id": ["x", "a"], "method": SAMPLED, "verify_steps": [1, 5], "accepted": [0, 2]}
    )
    acceptance = Acceptance(
        {},
        prompts,
        drawn,
        {
            "float32": {
                DRAFTER: [Trace(tokens, []) for tokens in texts.values()],
                SAMPLED: [Trace([3], []), Trace([4], [])],
            }
        },
    )
    own = []
    monkeypatch.setattr(
        "eyas.evaluation.offline.walk_texts",
        lambda target, drafter, *rest: (
            own.append(rest)
            or pd.DataFrame(
                {"accepted": [1.5, 0.5], "verify_steps": [1.0, 3.0], "all_hits": 1, "all_slots": 1}
            )
        ),
    )
    made = [Prompt("a", "x", [7]), Prompt("c", "x", [8]), Prompt("x", "x", [9])]
    found = against_decoding(config, None, drafter, store, made, acceptance)
    assert found == json.loads((config.acceptance_dir / "offline.json").read_text())
    assert (
        found["prompts"],
        found["same_text"],
        found["greedy"]["prompts"],
        found["sampled"]["prompts"],
    ) == (2, 1, 2, 1)
    # of seven tokens: a [3, 0, then one token is left: 1] and c [0, 0, 1, then two are left: 2]
    offline, real = (3 + 0 + 1 + 3 + 0 + 0 + 1 + 2 + 4) / 7, (3 + 4 + 6 + 2) / 6
    assert found["greedy"]["offline"]["value"] == pytest.approx(offline) and found["greedy"][
        "decoded"
    ]["value"] == pytest.approx(real)
    assert found["greedy"]["difference"]["value"] == pytest.approx(offline - real)
    assert (
        found["greedy"]["same_text_difference"]["value"]
        == pytest.approx((3 + 4) / 4 - (3 + 4) / 4)
        == 0
    )
    assert (
        found["sampled"]["decoded"]["value"] == 7 / 5
        and found["sampled"]["difference"]["low"] is None
    )
    assert own == [([[9], [7]], [[3], [4]], LENGTH, 1.0)] and found["sampled_texts"]["difference"][
        "value"
    ] == pytest.approx(6 / 4 - 8 / 6)
    assert "over 2 prompts" in agreement(found) and "too few prompts to tell" in agreement(found)
    apart = {"value": -0.5, "low": -0.6, "high": -0.4, "level": 0.95}
    assert "1 of 2 texts are the same" in agreement(
        found | {"greedy": found["greedy"] | {"difference": apart}}
    )
    alone = against_decoding(
        config,
        None,
        drafter,
        store,
        made,
        Acceptance(
            {}, prompts.iloc[1:2], drawn.iloc[:0], {"float32": {DRAFTER: [Trace([1, 2], [])]}}
        ),
    )
    assert alone["greedy"] is alone["sampled"] is alone["sampled_texts"] is None and agreement(
        alone
    ).startswith("no decoded prompt")


def test_sampled_estimate_of_texts_of_its_own(tmp_path):
    """The chance of each first draft, from a model and a drafter that run over the prefix alone;
    and speculative sampling itself, drawn many times.
    """
    target = load_target(str(make_tiny_target(tmp_path / "tiny", n_blocks=6)))
    model = load_model(target, torch.float32, "cpu")
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    prompts = make_prompts(lengths=(4,))
    made = teach(target, model, prompts, (1, 3, 6))
    method = EagleDraft(made, 2, rejection_sampling=True)
    traces = [speculative_decode(model, method, prompts[0], 12, 1.0, seed) for seed in range(25)]
    found = walk_texts(target, made, prompts * 25, [t.tokens for t in traces], 2, 1.0)
    steps, accepted = (
        sum(len(t.steps) for t in traces),
        np.array([sum(len(s.accepted) for s in t.steps) for t in traces]),
    )
    real, estimate = accepted.sum() / steps, found["accepted"].sum() / found["verify_steps"].sum()
    assert 0.1 < real < 1.9 and estimate == pytest.approx(
        real, abs=4 * accepted.std() * len(traces) ** 0.5 / steps
    )
    text = traces[0].tokens
    logits = model(torch.tensor([[*prompts[0], *text[:1]]])).logits[0, -1]
    with TargetStream(model, (1, 3, 6)) as stream, torch.no_grad():
        states = stream.forward(prompts[0], keep=1)[1]
        out = made.extend(
            torch.tensor([*prompts[0][1:], text[0]]), made.fuse(states), DraftCache()
        )[-1:]
        q = torch.zeros(target.vocab_size).index_put(
            (made.vocab.ids,), made.logits(out)[0].softmax(-1)
        )
    assert walk_texts(target, made, prompts, [text], 2, 1.0)["accepted_1"][0] > 0
    alone = walk_texts(target, made, prompts, [text[:2]], 2, 1.0)  # one draft, of the second token
    assert (
        alone["accepted"][0]
        == pytest.approx(torch.minimum(logits.softmax(-1), q).sum().item(), abs=1e-5)
        and alone["verify_steps"][0] == 1
    )


def test_nothing_to_walk(data, drafter):
    config = Config.create(run_name="t", speculative_num_steps=LENGTH, threads=1)
    store = write_store(config.store_dir, drafter, {"b": ("train", 4, [1])})
    with pytest.raises(EyasError, match="no held-out sample"):
        run_walk(config, drafter, store)
