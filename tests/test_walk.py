"""The offline walk against texts that are built draft by draft with the drafter's cache, so that every hit is known beforehand."""

import json

import numpy as np
import pytest
import torch

import stores
from eyas.config import Config
from eyas.drafter import DraftCache, Drafter, DrafterConfig
from eyas.errors import EyasError
from eyas.store import Rows, Store
from eyas.target import Head
from eyas.vocab import DraftVocab
from eyas.walk import jump, leading_hits, run_walk, walk

BOUNDARIES = (1, 3, 4)
HIDDEN, VOCAB, LENGTH = 16, 40, 3


@pytest.fixture(scope="module")
def drafter():
    torch.manual_seed(1)
    config = DrafterConfig(
        hidden_size=HIDDEN, target_hidden_size=HIDDEN, vocab_size=VOCAB, draft_vocab_size=30, n_heads=4, n_kv_heads=2, head_dim=4, intermediate_size=24,
        rms_norm_eps=1e-5, rope_theta=1000.0, max_position_embeddings=128, boundaries=BOUNDARIES,
    )
    made = Drafter(config, DraftVocab(torch.arange(5, 35), VOCAB)).eval()
    for name, weight in made.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 1.5)  # a norm left at 1 would hide one that is forgotten or doubled
    return made


@torch.no_grad()
def drafts_after(drafter, ids: list[int], states: torch.Tensor, n_drafts: int) -> list[int]:
    """What serving would draft with `ids` committed: an empty cache, all committed slots, then its own outputs one by one."""
    cache = DraftCache()
    out = drafter.extend(torch.tensor(ids[1:]), drafter.fuse(states[: len(ids) - 1]), cache)[-1:]
    drafts = [int(drafter.vocab.ids[drafter.logits(out).argmax()])]
    while len(drafts) < n_drafts:
        out = drafter.extend(torch.tensor(drafts[-1:]), out, cache)
        drafts.append(int(drafter.vocab.ids[drafter.logits(out).argmax()]))
    return drafts


def make_text(drafter, generator, n_prompt: int, hits: list[int], last: int = 0) -> tuple[list[int], torch.Tensor]:
    """A text whose response makes the walk accept exactly `hits`; with `last`, the response ends inside a run of that many accepted drafts."""
    states = torch.randn(200, len(BOUNDARIES) * HIDDEN, generator=generator).bfloat16().float()
    ids = torch.randint(0, VOCAB, (n_prompt + 1,), generator=generator).tolist()  # prompt and the token that the prefill gives
    for n in hits:
        drafts = drafts_after(drafter, ids, states, LENGTH)
        wrong = (drafts[n] + 1) % VOCAB if n < LENGTH else 1  # the bonus token; 0 to 4 are outside the draft vocabulary
        ids += [*drafts[:n], wrong]
    if last:
        ids += drafts_after(drafter, ids, states, LENGTH)[:last]
    return ids, states[: len(ids)]


@pytest.mark.parametrize("n_prompt", [1, 2, 23])
def test_hits_and_jumps_are_those_that_the_text_was_built_with(drafter, n_prompt):
    generator = torch.Generator().manual_seed(n_prompt)
    for hits, last in (([0, 3, 1, 0, 2, 3, 3, 0], 0), ([3, 3, 3], 2), ([], 1), ([], 3), ([2], 1), ([], 0)):
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
        drafts, wanted = drafts_after(drafter, ids[: at + 1], states, LENGTH), ids[at + 1 : at + 1 + LENGTH]
        slow.append(next((i for i, (a, b) in enumerate(zip(drafts, wanted)) if a != b), len(wanted)))
    assert found.tolist() == slow


def write_store(folder, drafter, samples) -> Store:
    """samples: id -> (split, prompt tokens, hits)."""
    generator = torch.Generator().manual_seed(9)
    head = Head(torch.ones(HIDDEN), torch.zeros(VOCAB, HIDDEN), 1e-5)
    manifest = {"boundaries": list(BOUNDARIES), "target": {"rms_norm_eps": 1e-5}, "dtype": "bfloat16", "hidden_size": HIDDEN, "prompts": {"hash": None}}
    rows = []
    for id, (split, n_prompt, hits) in samples.items():
        ids, states = make_text(drafter, generator, n_prompt, hits)
        line_break = torch.tensor([3])  # after the end of the turn, not supervised
        mask = torch.tensor([False] * n_prompt + [True] * (len(ids) - n_prompt) + [False])
        states = torch.cat([states, torch.zeros(1, states.shape[1])]).bfloat16().split(HIDDEN, dim=-1)
        rows.append(Rows(id, split, "chat", torch.cat([torch.tensor(ids), line_break]), mask, dict(zip(BOUNDARIES, (s.contiguous() for s in states)))))
    return stores.write_store(folder, manifest, head, rows)


def test_walk_of_a_store(data, drafter):
    config = Config.create(run_name="t", draft_length=LENGTH, threads=1)
    store = write_store(config.store_dir, drafter, {"a": ("heldout", 4, [3, 0, 2]), "b": ("train", 4, [3, 3]), "c": ("heldout", 9, [0, 0, 1, 3])})
    table = walk(drafter, store, ["a", "c"], LENGTH)
    assert list(table["id"]) == ["a", "c"] and list(table["verify_steps"]) == [3, 4] and list(table["accepted"]) == [5, 4]
    record = run_walk(config, drafter, store)
    assert record == json.loads((config.acceptance_dir / "walk.json").read_text())
    assert (record["counts"]["samples"], record["counts"]["verify_steps"], record["counts"]["accepted"]) == (2, 7, 9)
    assert record["acceptance_length"]["value"] == pytest.approx(16 / 7)
    assert record["accepted_per_step"]["value"] == pytest.approx(9 / 7)
    # by hand, from the hits [3, 0, 2] and [0, 0, 1, 3]: a draft at position i+1 is reached when i were accepted. The last but one token of a
    # response is followed by its last one only, so the steps [2] (3 tokens left: all 3 drafts) and [3] (4 left) are whole.
    assert [p["accepted"] for p in record["by_position"]] == [4, 3, 2]
    assert [p["reached"] for p in record["by_position"]] == [7, 4, 3]
    assert [p["proposed"] for p in record["by_position"]] == [7, 7, 7]
    # the over-stating figure counts every slot
    hits = [leading_hits(drafter, s["input_ids"][:-1], torch.cat([s["states"][b] for b in BOUNDARIES], -1)[:-1], p, LENGTH)
            for s, p in ((store.read("a"), 4), (store.read("c"), 9))]  # fmt: skip
    assert record["all_slots_acceptance_length"]["value"] == pytest.approx(1 + np.concatenate(hits).mean())
    # tokens outside the draft vocabulary (below 5, from 35 on), the first of a response left out
    outside = sum(int(((s["input_ids"][p + 1 : -1] < 5) | (s["input_ids"][p + 1 : -1] >= 35)).sum()) for s, p in ((store.read("a"), 4), (store.read("c"), 9)))
    assert record["counts"]["outside_vocab_tok"] == outside > 0


def test_nothing_to_walk(data, drafter):
    config = Config.create(run_name="t", draft_length=LENGTH, threads=1)
    store = write_store(config.store_dir, drafter, {"b": ("train", 4, [1])})
    with pytest.raises(EyasError, match="no held-out sample"):
        run_walk(config, drafter, store)
