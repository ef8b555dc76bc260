"""Replayed acceptance against real decoding, settings for settings; predictions against sums by
hand. No test asserts a time.
"""

import json

import pandas as pd
import pytest
import torch

from eyas.config import Config
from eyas.evaluation import decode, speed
from eyas.evaluation.acceptance import Prompt, measure
from eyas.evaluation.decode import Draft, EagleDraft, Step, Trace, greedy_decode, speculative_decode
from eyas.evaluation.speed import (
    Setting,
    cost_table,
    decoding_ratio,
    grid,
    model_speed,
    predict,
    replay,
    speed_text,
    step_seconds,
)
from eyas.models.target import load_target
from helpers.taught import make_prompts, teach
from helpers.tiny import make_tiny_target

BOUNDARIES = (1, 3, 6)
NEW_TOK = 24


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(
        str(make_tiny_target(tmp_path_factory.mktemp("target") / "tiny", n_blocks=6))
    )


@pytest.fixture(scope="module")
def model(target):
    return decode.load_model(target, torch.float32, "cpu")


@pytest.fixture(scope="module")
def prompts():
    return make_prompts()[:4]


@pytest.fixture(scope="module")
def drafter(target, model, prompts):
    return teach(target, model, prompts, BOUNDARIES)


def test_grid():
    settings = grid(Config.create(speed_steps=3, speed_topk=4, speculative_num_steps=5))
    assert (
        len(settings) == len(set(settings)) and Setting(5, 1, 6) in settings
    )  # the profile's own, beyond the grid
    assert {s for s in settings if s.topk == 1} == {Setting(n, 1, n + 1) for n in (1, 2, 3, 5)}
    assert {s.topk for s in settings} == {1, 2, 4}
    for s in settings:  # each is one that the decoder takes
        assert s.draft_tokens > s.steps
        Config.create(
            speculative_num_steps=s.steps,
            speculative_eagle_topk=s.topk,
            speculative_num_draft_tokens=s.draft_tokens,
        )


def test_replay_equals_real_decoding(model, drafter, prompts):
    """Verify step for verify step, of chains and trees, up to where the replay no longer knows what
    the target would say.
    """
    settings, seen = (
        [s for s in grid(Config.create(speed_steps=4, speed_topk=4)) if s.draft_tokens <= 8],
        set(),
    )
    for prompt in prompts[1:3]:
        tokens = greedy_decode(model, prompt, NEW_TOK).tokens
        replayed = replay(model, drafter, prompt, tokens, settings)
        for s in settings:
            trace = speculative_decode(
                model, EagleDraft(drafter, s.steps, s.topk, s.draft_tokens), prompt, NEW_TOK
            )
            at, steps, accepted = 1, 0, 0
            for step in trace.steps:
                if at + s.steps > len(tokens):
                    break
                steps, accepted, at = (
                    steps + 1,
                    accepted + len(step.accepted),
                    at + len(step.accepted) + 1,
                )
            assert replayed[s] == (steps, accepted), s
            seen.add((steps, accepted))
    assert len(seen) > 5  # the settings do differ


def test_replay_of_a_text_that_ends(model, drafter, prompts, monkeypatch):
    """With the end of the text known, all steps are replayed, the last one too."""
    tokens = greedy_decode(model, prompts[2], NEW_TOK).tokens
    end = next(token for i, token in enumerate(tokens) if i > 8 and token not in tokens[:i])
    tokens = tokens[: tokens.index(end) + 1]
    monkeypatch.setattr(model.generation_config, "eos_token_id", end)
    settings = [Setting(3, 1, 4), Setting(3, 2, 6), Setting(2, 4, 8)]
    for s, found in replay(model, drafter, prompts[2], tokens, settings).items():
        trace = speculative_decode(
            model, EagleDraft(drafter, s.steps, s.topk, s.draft_tokens), prompts[2], 100
        )
        assert trace.tokens == tokens and found == (
            len(trace.steps),
            sum(len(step.accepted) for step in trace.steps),
        )


def test_hits_of_a_part_by_hand():
    """Candidates level by level: a (.6), b (.3) | a's children c (.5 -> .30), d (.4 -> .24), b's e
    (.9 -> .27), f (.1 -> .03). The target says b e.
    """
    draft = Draft([1, 2, 3, 4, 5, 6], [-1, -1, 0, 0, 1, 1], [0.6, 0.3, 0.5, 0.4, 0.9, 0.1])
    settings = [
        Setting(1, 2, 2),
        Setting(1, 2, 3),
        Setting(2, 2, 3),
        Setting(2, 2, 4),
        Setting(2, 2, 5),
        Setting(2, 2, 7),
    ]
    # in order: a .6, b .3 (before c, of the same score), c .3, e .27, d .24, f .03
    assert [speed._hits(draft, [2, 5, 9], settings)[s] for s in settings] == [0, 1, 1, 1, 2, 2]
    assert set(speed._hits(draft, [9], settings).values()) == {0} and set(
        speed._hits(draft, [], settings).values()
    ) == {0}


COST = {
    "plain_step_s": 10.0,
    "verify_step_s": {"chain": {"4": 12.0}, "tree": {"8": 15.0}},
    "first_level_s": {"1": 2.0, "2": 3.0},
    "level_s": {"1": 1.0, "2": 1.5},
}


def test_predictions_by_hand():
    chain, tree = Setting(3, 1, 4), Setting(3, 2, 8)
    assert (
        step_seconds(chain, COST) == 2 + 2 * 1 + 12 and step_seconds(tree, COST) == 3 + 2 * 1.5 + 15
    )
    table = predict({chain: [(10, 10), (20, 0)], tree: [(8, 16), (12, 12)]}, COST, seed=0)
    assert table["acceptance_length"].tolist() == pytest.approx([1 + 10 / 30, 1 + 28 / 20])
    assert table["predicted"].tolist() == pytest.approx([40 / 30 * 10 / 16, 2.4 * 10 / 21])
    assert table["low"][0] == pytest.approx(10 / 16) and table["high"][0] == pytest.approx(
        2 * 10 / 16
    )  # the second prompt alone, the first alone


def test_measured_ratio_leaves_the_prefill_out():
    plain = [Trace([1] * 11, [], seconds=105.0, prefill_s=5.0)]  # 10 s a token
    steps = [
        Step([2, 2], [-1, 0], [0.5, 0.5], [0, 1], 3, 4.0, 6.0),
        Step([2, 2], [-1, 0], [0.5, 0.5], [], 3, 5.0, 5.0),
        Step([2], [-1], [0.5], [0], None, 5.0, 5.0),
    ]
    found = decoding_ratio(
        plain, [Trace([1] * 6, [], seconds=90.0, prefill_s=60.0, steps=steps)], seed=0
    )
    assert found["value"] == pytest.approx((3 + 1 + 1) * 10 / 30)


def test_model_speed_writes_what_it_measured(data, target, drafter, prompts):
    config = Config.create(
        run_name="t",
        decode_new_tok=10,
        speculative_num_steps=2,
        check_bf16_prompts=3,
        baseline_prompts=3,
        speed_steps=3,
        speed_topk=2,
        threads=1,
    )
    made = [Prompt(f"s{i}", "a", ids) for i, ids in enumerate(prompts)]
    found = measure(config, target, drafter, made)
    record = model_speed(config, target, drafter, made, found)
    assert record == json.loads((config.acceptance_dir / "speed.json").read_text())
    for dtype, whats in (
        ("float32", {"the profile's"}),
        ("bfloat16", {"the profile's", "best", "best tree"}),
    ):
        part = record["dtypes"][dtype]
        table = pd.DataFrame(part["grid"])
        assert len(table) == record["settings"]["grid"] == len(grid(config))
        assert part["best"]["predicted"] == table["predicted"].max()
        assert whats <= {
            name for row in part["measured"] for name in row["what"].split(" and ")
        } and all(row["measured"]["value"] > 0 for row in part["measured"])
    own = next(
        row
        for row in record["dtypes"]["float32"]["measured"]
        if row["what"].startswith("the profile's")
    )
    first = found.prompts.iloc[:3]
    assert (own["steps"], own["prompts"], own["verify_steps"], own["accepted"]) == (
        2,
        3,
        first["verify_steps"].sum(),
        first["accepted"].sum(),
    )
    assert "3 prompts" in speed_text(record) and len(cost_table(record)) > 8


@pytest.mark.parametrize(
    "low, high, said",
    [(1.1, 1.3, "Serve it"), (0.9, 1.1, "No clear gain"), (0.6, 0.7, "Don't serve it")],
)
def test_speed_text(low, high, said):
    best = {
        "steps": 2,
        "topk": 1,
        "draft_tokens": 3,
        "what": "best",
        "predicted": 1.25,
        "measured": {"value": (low + high) / 2, "low": low, "high": high},
    }
    own = best | {
        "what": "the profile's and best tree",
        "predicted": 0.7,
        "measured": {"value": 0.66, "low": 0.6, "high": 0.7},
    }
    parts = {
        dtype: {"measured": rows, "grid": [0] * 9, "best": best, "costs": {"spread": spread}}
        for dtype, rows, spread in (("float32", [own], 0.1), ("bfloat16", [own, best], 0.8))
    }
    first, float32, bfloat16, busy = speed_text(
        {"settings": {"prompts": 4}, "dtypes": parts}
    ).split("\n")
    assert "scattered by 80%" in busy
    assert (
        first.startswith(f"{said} in bfloat16, ")
        and f"[{low:.2f}, {high:.2f}]" in bfloat16
        and "the profile's own setting 0.66 times plain decoding [0.60, 0.70] (predicted 0.70)"
        in bfloat16
    )
    assert float32.startswith(
        "float32: with steps 2, top-k 1, draft tokens 3, the best of 9 settings by "
        "prediction (1.25); the profile's own setting 0.66"
    )
