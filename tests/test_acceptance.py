"""Counts and comparisons against hand-made ones; what `measure` writes."""

import copy
import dataclasses
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from eyas.config import Config
from eyas.errors import EyasError
from eyas.evaluation import acceptance, decode
from eyas.evaluation.acceptance import (
    DRAFTER,
    LOOKUP,
    PLAIN,
    RANDOM,
    SAMPLED,
    SHUFFLED,
    Prompt,
    bf16_steps,
    calibration,
    compare_runs,
    comparison_text,
    eval_prompts,
    fresh_steps,
    headline,
    judged_first_choices,
    missed,
    misses,
    repeats,
)
from eyas.evaluation.decode import Step, Trace
from eyas.files import ROOT
from eyas.intervals import ratio_interval
from eyas.models.target import load_target
from helpers.taught import make_prompts, teach
from helpers.tiny import make_tiny_target

BOUNDARIES = (1, 3, 6)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(
        str(make_tiny_target(tmp_path_factory.mktemp("target") / "tiny", n_blocks=6))
    )


@pytest.fixture(scope="module")
def prompts():
    return make_prompts()


@pytest.fixture(scope="module")
def drafter(target, prompts):
    return teach(target, decode.load_model(target, torch.float32, "cpu"), prompts, BOUNDARIES)


def step(
    parents: list[int],
    accepted: list[int],
    bonus: int | None = 6,
    tokens: list[int] | None = None,
    confidence: list[float] | None = None,
) -> Step:
    return Step(
        tokens or [5] * len(parents),
        parents,
        confidence or [0.5] * len(parents),
        accepted,
        bonus,
        0.25,
        0.5,
    )


def chain(drafted: int, accepted: int, bonus: int | None = 6) -> Step:
    return step(list(range(-1, drafted - 1)), list(range(accepted)), bonus)


PROMPT = Prompt("a", "chat", [1, 2, 3])


def test_counts_of_a_hand_made_trace(drafter):
    outside = next(i for i in range(512) if drafter.vocab.to_draft(torch.tensor([i]))[0] < 0)
    inside = int(drafter.vocab.ids[0])
    trace = Trace(
        [outside, inside] * 3 + [inside, outside, outside, inside],
        [],
        2.0,
        steps=[chain(3, 0), chain(3, 3), chain(3, 1), chain(2, 2, bonus=None)],
    )
    row = acceptance._count(
        Config.create(speculative_num_steps=3), drafter, PROMPT, Trace(trace.tokens, [], 3.0), trace
    )
    assert (
        row["verify_steps"],
        row["drafted"],
        row["accepted"],
        row["tok"],
        row["prompt_tok"],
    ) == (4, 11, 6, 10, 3)
    assert [row[f"proposed_{i}"] for i in (1, 2, 3)] == [4, 4, 3]
    assert [row[f"reached_{i}"] for i in (1, 2, 3)] == [4, 3, 1]
    assert [row[f"accepted_{i}"] for i in (1, 2, 3)] == [3, 2, 1]
    # bigrams: oi io oi io oi ii io oo oi -> 5 of 9 came before; the first token (from the prefill)
    # can't be drafted and is not counted as outside
    assert (
        row["bigrams"],
        row["repeated_bigrams"],
        row["draftable_tok"],
        row["outside_vocab_tok"],
    ) == (9, 5, 9, 4)
    assert row["identical"] and (
        row["greedy_s"],
        row["speculative_s"],
        row["draft_s"],
        row["verify_s"],
    ) == (3.0, 2.0, 1.0, 2.0)
    longer = Trace(
        trace.tokens * 2, [], 3.0
    )  # a sampled text that ended earlier: plain decoding of as many tokens
    assert acceptance._count(Config.create(), drafter, PROMPT, longer, trace)["greedy_s"] == 1.5


def test_counts_of_a_hand_made_tree(drafter):
    """A node that was accepted without a child reaches no further position; a node deeper than the
    accepted path was proposed all the same.
    """
    steps = [
        step(
            [-1, -1, 0, 2], [1]
        ),  # the second child, which has none of its own: positions 2 and 3 proposed, not reached
        step(
            [-1, -1, 1, 1], [1, 3]
        ),  # the second child and its second one; position 3 not proposed
        step([-1, -1, 0, 0], []),
        step([-1, 0, 0], [0]),  # a miss at position 2
        step([], []),  # nothing drafted
    ]
    row = acceptance._count(
        Config.create(speculative_num_steps=3),
        drafter,
        PROMPT,
        Trace([1] * 10, [], 1.0),
        Trace([1] * 10, [], 1.0, steps=steps),
    )
    assert (row["verify_steps"], row["accepted"], row["draft_tok"], row["drafted"]) == (
        5,
        4,
        15,
        3 + 2 + 2 + 2,
    )
    assert [row[f"proposed_{i}"] for i in (1, 2, 3)] == [4, 4, 1]
    assert [row[f"reached_{i}"] for i in (1, 2, 3)] == [4, 2, 0]
    assert [row[f"accepted_{i}"] for i in (1, 2, 3)] == [3, 1, 0]
    assert [missed(s) for s in steps] == [False, False, True, True, False]


def test_fresh_steps_look_back_only():
    """Tokens 1 2 3 1 2 1 2 3 9: a step is not fresh when the two tokens before it came before,
    whatever it goes on to accept.
    """
    tokens = [1, 2, 3, 1, 2, 1, 2, 3, 9]
    trace = Trace(
        tokens, [], steps=[chain(3, 1), chain(3, 1), chain(3, 1), chain(3, 0), chain(3, 0)]
    )  # begin after 1, 3, 5, 7, 8 tokens
    # after [1]: no pair. After 1 2 3: (2,3) is new. After .. 1 2: (1,2) stood there. After .. 1 2
    # again: stood there. After 2 3: stood there.
    assert fresh_steps(trace).tolist() == [True, True, False, False, False]
    alone = Trace(tokens, [], steps=[chain(3, 0) for _ in range(8)])  # a step a token
    slow = [
        at < 2 or tuple(tokens[at - 2 : at]) not in list(zip(tokens[: at - 1], tokens[1 : at - 1]))
        for at in range(1, 9)
    ]
    assert (
        fresh_steps(alone).tolist() == slow == [True, True, True, True, False, True, False, False]
    )


def test_repeats_are_named_where_they_explain_the_figure():
    def table(fresh_accepted):
        return pd.DataFrame(
            {
                "verify_steps": [20] * 6,
                "accepted": [30] * 6,
                "fresh_steps": [10] * 6,
                "fresh_accepted": fresh_accepted,
                "repeated_bigrams": [10] * 6,
                "bigrams": [50] * 6,
            }
        )

    found = repeats(table([5, 6, 4, 5, 5, 5]), Config.create())
    assert found["fresh_acceptance_length"]["value"] == pytest.approx(1.5) and found["difference"][
        "value"
    ] == pytest.approx(1.0)
    assert (
        found["fresh_steps"] == 60
        and "60 of 120 verify steps" in found["warning"]
        and "1.000" in found["warning"]
    )
    assert (
        repeats(table([15, 14, 16, 15, 15, 15]), Config.create())["warning"] is None
    )  # no difference
    assert (
        repeats(table([14, 14, 14, 14, 14, 14]), Config.create())["warning"] is None
    )  # a clear one of 0.1, under a tenth of 1.5


def test_calibration_by_hand():
    """Only the first choice after each accepted node is judged, and not what came after a miss."""
    steps = [
        step(
            [-1, -1, 0, 0, 2], [0, 2], confidence=[0.61, 0.3, 0.95, 0.02, 0.4]
        ),  # judged: 0.61 yes, 0.95 yes, 0.4 no
        step([-1, 0, 1], [], confidence=[0.69, 0.9, 0.9]),  # 0.69 no
        step(
            [-1, -1, 1], [1], confidence=[1.0, 0.0, 0.99]
        ),  # 1.0 no (the second choice was right), 0.99 no
    ]
    rows = judged_first_choices(Trace([], [], steps=steps))
    assert rows.tolist() == [[0.61, 1], [0.95, 1], [0.4, 0], [0.69, 0], [1.0, 0], [0.99, 0]]
    found = calibration([rows[:4], rows[4:]], seed=0)
    bins = {b["low"]: b for b in found["bins"] if b["judged"]}
    assert {low: b["judged"] for low, b in bins.items()} == {0.4: 1, 0.6: 2, 0.9: 3} and found[
        "judged"
    ] == 6
    assert bins[0.6]["acceptance"]["value"] == 0.5 and bins[0.6]["confidence"] == pytest.approx(
        0.65
    )
    assert found["expected_calibration_error"] == pytest.approx(
        (1 * 0.4 + 2 * abs(0.5 - 0.65) + 3 * abs(1 / 3 - (0.95 + 1.0 + 0.99) / 3)) / 6
    )
    assert found["overconfidence"]["value"] == pytest.approx(
        (0.61 + 0.95 + 0.4 + 0.69 + 1.0 + 0.99 - 2) / 6
    )
    assert calibration([np.empty((0, 2))], 0)["expected_calibration_error"] is None


def test_misses_by_hand(drafter, target):
    outside = next(i for i in range(3, 512) if drafter.vocab.to_draft(torch.tensor([i]))[0] < 0)
    a, b = drafter.vocab.ids[50:52].tolist()
    traces = [
        Trace(
            [],
            [],
            steps=[
                step([-1, 0], [], bonus=outside, tokens=[a, b]),
                step([-1, 0], [0], bonus=outside, tokens=[b, a]),
                step([-1, 0], [0, 1], bonus=b),
            ],
        ),
        Trace(
            [],
            [],
            steps=[
                step([-1, -1], [], bonus=outside, tokens=[a, b]),
                step([-1], [], bonus=b, tokens=[a]),
                step([-1], [0], bonus=None),
            ],
        ),
    ]
    found = misses(traces, drafter, target.tokenizer())
    decode = target.tokenizer().decode
    assert (found["misses"], found["tokens"], found["outside_vocab"]) == (4, 2, 3)
    assert found["commonest"] == [
        {
            "token": outside,
            "text": decode([outside]),
            "misses": 3,
            "outside_vocab": True,
            "drafted_instead": decode([a]),
        },
        {
            "token": b,
            "text": decode([b]),
            "misses": 1,
            "outside_vocab": False,
            "drafted_instead": decode([a]),
        },
    ]


def test_bf16_steps_are_neighbouring_bfloat16_numbers():
    for value in (1.0, 1.9921875, 3.5, 17.25, 300.0):
        top = torch.tensor(value, dtype=torch.bfloat16)
        below = (top.view(torch.int16) - 1).view(torch.bfloat16)  # the next smaller bfloat16
        expected = (
            1.0 if top.frexp().mantissa > 0.5 else 0.5
        )  # below a power of two the steps are half as large
        assert bf16_steps(top.item(), below.item()) == expected
        assert bf16_steps(top.item(), top.item()) == 0.0


def test_first_differences_are_judged_where_they_are():
    samples = [SimpleNamespace(id=name) for name in "abc"]
    tie = (
        Trace([1, 2, 3], [(9.0, 1.0), (8.0, 7.9375), (9.0, 1.0)]),
        Trace([1, 4, 3], [(9.0, 1.0), (8.0, 8.0), (5.0, 5.0)]),
    )
    wrong = (Trace([1, 2], [(9.0, 1.0), (8.0, 7.0)]), Trace([1, 5], [(9.0, 1.0), (8.0, 8.0)]))
    found = acceptance._compare(samples, [(Trace([1], [(1.0, 0.0)]),) * 2, tie, wrong])
    assert (found["prompts"], found["differing"], found["ties"], found["not_ties"]) == (3, 2, 1, 1)
    assert found["differences"][0] == {
        "id": "b",
        "at_tok": 1,
        "greedy_gap_bf16_steps": 1.0,
        "speculative_gap_bf16_steps": 0.0,
        "tie": True,
    }
    assert (
        found["differences"][1]["greedy_gap_bf16_steps"] == 16.0
        and not found["differences"][1]["tie"]
    )


def test_ratio_interval_against_a_bootstrap_written_out():
    top, bottom = np.array([4, 0, 9, 2, 5, 7]), np.array([5, 3, 10, 6, 5, 9])
    found = ratio_interval(top, bottom, seed=1)
    generator = np.random.default_rng(99)
    drawn = [generator.integers(0, 6, size=6) for _ in range(20_000)]
    low, high = np.percentile([top[d].sum() / bottom[d].sum() for d in drawn], [2.5, 97.5])
    assert found.value == pytest.approx(27 / 38)
    assert (found.low, found.high) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))
    assert ratio_interval(top, bottom, seed=1) == found
    assert ratio_interval([3, 3], [4, 4], 0).low == ratio_interval([3, 3], [4, 4], 0).high == 0.75
    assert ratio_interval([0, 0], [0, 0], 0).value is None
    assert (ratio_interval([1], [2], 0).value, ratio_interval([1], [2], 0).low) == (0.5, None)


def made(prompts) -> list[Prompt]:
    return [Prompt(f"s{i}", "ab"[i % 2], ids) for i, ids in enumerate(prompts)]


def test_measure_writes_counts_that_add_up(data, target, drafter, prompts):
    config = Config.create(
        run_name="t",
        decode_new_tok=12,
        speculative_num_steps=3,
        check_bf16_prompts=3,
        baseline_prompts=4,
        threads=1,
    )
    found = acceptance.measure(config, target, drafter, made(prompts))
    record = json.loads((config.acceptance_dir / "acceptance.json").read_text())
    assert record == json.loads(json.dumps(found.record))
    table, counts = pd.read_parquet(config.acceptance_dir / "acceptance.parquet"), record["counts"]
    assert list(table["id"]) == [f"s{i}" for i in range(len(prompts))] and list(
        table["prompt_tok"]
    ) == [len(p) for p in prompts]
    assert counts["prompts"] == len(prompts) and counts["accepted"] == table[
        "accepted"
    ].sum() == sum(p["accepted"] for p in record["by_position"])
    assert record["acceptance_length"]["value"] == pytest.approx(
        1 + counts["accepted"] / counts["verify_steps"]
    )
    assert record["accepted_per_step"]["value"] == pytest.approx(
        counts["accepted"] / counts["verify_steps"]
    )
    assert record["speed_ratio"]["value"] == pytest.approx(
        counts["greedy_s"] / counts["speculative_s"]
    )
    assert sum(c["verify_steps"] for c in record["by_category"]) == counts["verify_steps"]
    assert record["speed_ratio_bfloat16"]["value"] > 0 and record["speed_ratio_bfloat16"][
        "prompts"
    ] == min(config.check_bf16_prompts, len(table))
    same, again = (
        record["identical_to_greedy"]["float32"],
        record["identical_to_greedy"]["bfloat16"],
    )
    assert (same["prompts"], same["differing"]) == (len(prompts), 0)
    assert again["prompts"] == 3 and again["ties"] + again["not_ties"] == again["differing"] == len(
        again["differences"]
    )
    assert "output identical to greedy (float32): yes" in str(found)
    # every judged draft was reached, and every miss is a step that a draft ended
    assert record["calibration"]["judged"] == sum(p["reached"] for p in record["by_position"])
    assert record["misses"]["misses"] == sum(
        p["reached"] - p["accepted"] for p in record["by_position"]
    )
    assert [p["survival"]["value"] for p in record["by_position"]] == [
        p["accepted"] / counts["verify_steps"] for p in record["by_position"]
    ]


def test_baselines_are_on_the_same_prompts_and_lossless(data, target, drafter, prompts):
    config = Config.create(
        run_name="t",
        decode_new_tok=12,
        speculative_num_steps=2,
        check_bf16_prompts=1,
        baseline_prompts=4,
        threads=1,
    )
    found = acceptance.measure(config, target, drafter, made(prompts))
    rows = {b["method"]: b for b in found.record["baselines"]}
    assert list(rows) == [PLAIN, DRAFTER, LOOKUP, RANDOM, SHUFFLED, SAMPLED] and {
        b["prompts"] for b in rows.values()
    } == {4}
    for name, row in rows.items():
        if name != SAMPLED:
            assert row["identical"] == 4 and row["tok"] == rows[PLAIN]["tok"], name
    assert (
        rows[PLAIN]["acceptance_length"]["value"] == rows[PLAIN]["speed_ratio"]["value"] == 1.0
        and rows[PLAIN]["verify_steps"] == rows[PLAIN]["tok"] - 4
    )
    first = found.prompts.iloc[:4]
    assert (
        rows[DRAFTER]["accepted"] == first["accepted"].sum()
        and rows[DRAFTER]["verify_steps"] == first["verify_steps"].sum()
    )
    # taught on these very responses; with random weights, or with the states of other slots, next
    # to nothing is left
    length = {name: row["acceptance_length"]["value"] for name, row in rows.items()}
    assert length[DRAFTER] > 1.5 > 1.3 > max(length[RANDOM], length[SHUFFLED])
    table = pd.read_parquet(config.acceptance_dir / "baselines.parquet")
    assert len(table) == 6 * 4 and not table["identical"][table["method"] == SAMPLED].all()


def test_prompt_lookup_over_a_known_text_is_what_decoding_with_it_accepts(
    data, target, drafter, prompts
):
    model, seen, counted, cut = decode.load_model(target, torch.float32, "cpu"), 0, [], 0
    for prompt in prompts:
        prompt = [
            *prompt,
            *decode.greedy_decode(model, prompt, 25).tokens,
            *prompt,
        ]  # what comes was seen before
        for n_tok in (1, 2, 20, 23):
            trace = decode.speculative_decode(model, decode.PromptLookup(3), prompt, n_tok)
            left, steps = (
                len(trace.tokens) - 1,
                [(len(step.tokens), len(step.accepted)) for step in trace.steps],
            )
            before = left - sum(
                accepted + 1 for _, accepted in steps[:-1]
            )  # tokens of the text that the last step could be compared with
            if steps and steps[-1][1] >= before < steps[-1][0]:
                steps, cut = steps[:-1], cut + 1
            assert acceptance.prompt_lookup_counts(prompt, trace.tokens, 3) == (
                len(steps),
                sum(accepted for _, accepted in steps),
            ), (len(prompt), n_tok)
            seen += sum(accepted for _, accepted in steps)
        counted.append(steps)
    assert seen > 20 and cut > 0
    config = Config.create(
        run_name="t", decode_new_tok=23, check_bf16_prompts=1, baseline_prompts=1, threads=1
    )
    asked = [
        Prompt(f"s{i}", "chat", [*p, *decode.greedy_decode(model, p, 25).tokens, *p])
        for i, p in enumerate(prompts)
    ]
    record = acceptance.measure(config, target, drafter, asked).record
    found, n_steps, accepted = (
        record["prompt_lookup"],
        sum(map(len, counted)),
        sum(a for steps in counted for _, a in steps),
    )
    assert (found["prompts"], found["verify_steps"], found["accepted"]) == (
        5,
        n_steps,
        accepted,
    ) and found["acceptance_length"]["value"] == (accepted + n_steps) / n_steps
    assert found["difference"]["value"] == pytest.approx(
        record["acceptance_length"]["value"] - found["acceptance_length"]["value"], abs=1e-12
    )
    assert "drafter minus n-grams" in headline(record) and "n-grams" not in headline(
        record | {"prompt_lookup": None}
    )


def one_prompt(**counts) -> pd.DataFrame:
    known = {"verify_steps": 62, "accepted": 62, "fresh_steps": 3, "fresh_accepted": 1}
    return pd.DataFrame([known | {"repeated_bigrams": 120, "bigrams": 124} | counts])


def test_a_looping_text_is_named_even_with_one_prompt():
    """One prompt has no interval. 120 of 124 bigrams repeat; 3 of 62 verify steps are fresh."""
    record = repeats(one_prompt(), Config.create())
    assert "the text loops: 97% of its bigrams" in record["warning"]
    assert "3 of 62 verify steps" in record["warning"] and "1.333" in record["warning"]
    assert record["warning"].endswith("too few to judge by")


def test_too_few_fresh_steps_are_named_without_a_loop():
    few = repeats(one_prompt(repeated_bigrams=20, fresh_steps=19), Config.create())
    assert few["warning"].startswith("only 19 of 62 verify steps begin at no repeated bigram")
    many = repeats(
        one_prompt(repeated_bigrams=20, fresh_steps=40, fresh_accepted=40), Config.create()
    )
    assert many["warning"] is None


def test_a_drafter_that_is_never_accepted_is_named(data, target, drafter, prompts, tmp_path):
    """Its head is zero: acceptance length is exactly 1.0, as with a part that is missing."""
    blind = copy.deepcopy(drafter)
    blind.lm_head.weight.data.zero_()
    config = Config.create(
        run_name="blind", decode_new_tok=8, check_bf16_prompts=1, baseline_prompts=1, threads=1
    )
    record = acceptance.measure(config, target, blind, made(prompts[:2])).record
    assert record["acceptance_length"]["value"] == 1.0
    assert "WARNING: no draft token was accepted at all" in headline(record)
    assert "docs/symptoms.md" in headline(record)
    heading = "## Acceptance is exactly 1.0"
    assert heading in (ROOT / "docs" / "symptoms.md").read_text(encoding="utf-8")
    weak = acceptance.measure(config, target, drafter, made(prompts[:2])).record
    assert weak["counts"]["accepted"] and "at all" not in headline(weak)


def test_texts_beyond_the_drafters_positions_are_named(data, target, drafter, prompts):
    config = Config.create(
        run_name="short", decode_new_tok=6, check_bf16_prompts=1, baseline_prompts=1, threads=1
    )
    short = copy.deepcopy(drafter)
    short.config = dataclasses.replace(drafter.config, max_position_embeddings=8)
    record = acceptance.measure(config, target, short, made(prompts[3:])).record
    assert "the drafter's positions end at 8" in headline(record)
    whole = acceptance.measure(config, target, drafter, made(prompts[3:])).record
    assert "positions end" not in headline(whole)


def test_repeats_stand_in_the_headline(data, target, drafter, prompts):
    config = Config.create(
        run_name="t", decode_new_tok=6, check_bf16_prompts=1, baseline_prompts=1, threads=1
    )
    record = acceptance.measure(config, target, drafter, made(prompts[:2])).record
    assert "WARNING" not in headline(record | {"repeats": record["repeats"] | {"warning": None}})
    assert headline(record | {"repeats": record["repeats"] | {"warning": "of a loop"}}).endswith(
        "\nWARNING: of a loop"
    )


def test_measure_refuses_what_it_cannot_decode(data, target, drafter):
    config = Config.create(run_name="t", decode_new_tok=64, speculative_num_steps=3)
    with pytest.raises(EyasError, match="no prompts to decode"):
        acceptance.measure(config, target, drafter, [])
    with pytest.raises(EyasError, match="the prompt of s0 has 1000 tokens; expected at most 956"):
        acceptance.measure(config, target, drafter, made([[3] * 1000]))


# ---- evaluation sets


def test_humaneval_is_a_seeded_choice_of_164(embedded):
    config = Config.create(eval_set="humaneval", decode_prompts=5)
    found = eval_prompts(config, embedded)
    again = eval_prompts(dataclasses.replace(config, decode_prompts=3), embedded)
    assert [p.id for p in again] == [p.id for p in found[:3]] and len({p.id for p in found}) == 5
    assert [p.id for p in eval_prompts(dataclasses.replace(config, seed=1), embedded)] != [
        p.id for p in found
    ]
    everything = eval_prompts(dataclasses.replace(config, decode_prompts=200), embedded)
    assert {p.id for p in everything} == {f"HumanEval-{i}" for i in range(164)}
    text = embedded.tokenizer().decode(
        next(p for p in everything if p.id == "HumanEval-0").input_ids
    )
    assert (
        "def has_close_elements(numbers: List[float], threshold: float) -> bool:" in text
        and text.endswith("<|im_start|>assistant\n")
    )


def test_heldout_prompts_end_where_the_answer_begins(embedded):
    found = eval_prompts(Config.create(decode_prompts=3), embedded)
    assert len(found) == 3 and all(
        embedded.tokenizer().decode(p.input_ids).endswith("<|im_start|>assistant\n") for p in found
    )


def test_own_conversations(tmp_path, embedded):
    path = tmp_path / "mine.jsonl"
    user, answer = {"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}
    path.write_text(
        "\n".join(
            json.dumps(row)
            for row in (
                {"messages": [user]},
                {"id": "two", "category": "x", "messages": [user, answer, user, answer]},
            )
        )
        + "\n\n"
    )
    found = eval_prompts(Config.create(eval_set=str(path)), embedded)
    assert [(p.id, p.category) for p in found] == [("line-1", "mine"), ("two", "x")]
    tokenizer = embedded.tokenizer()
    for prompt, messages in zip(
        found, ([user], [user, answer, user])
    ):  # the last answer is the target's to give
        assert prompt.input_ids == tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
    for text, message in (
        ('{"messages": []}', "line 1: sample line-1 has no messages"),
        (
            '{"messages": [{"role": "user", "content": "a"}]}\n{"messages"',
            "mine.jsonl, line 2 is not JSON",
        ),
        (
            '{"messages": [{"role": "system", "content": "a"}]}',
            "line 1: sample line-1 has no prompt; expected a user turn",
        ),
        ("[1]", "line 1 is not an object"),
        ("", "holds no conversation"),
        (
            (
                '{"id": "a", "messages": [{"role": "user", "content": "a"}]}\n{"id": "a", '
                '"messages": [{"role": "user", "content": "b"}]}'
            ),
            "line 2: sample id 'a' is in the file already",
        ),
    ):
        path.write_text(text)
        with pytest.raises(EyasError, match=message):
            eval_prompts(Config.create(eval_set=str(path)), embedded)
    with pytest.raises(
        EyasError,
        match="no evaluation set .*none.jsonl; expected 'heldout', 'humaneval' or a JSONL file",
    ):
        eval_prompts(Config.create(eval_set=str(tmp_path / "none.jsonl")), embedded)


# ---- two drafters


def write_run(name: str, accepted: list[int], **changed) -> Config:
    config = Config.create(run_name=name)
    names = (
        "eval_set",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_use_rejection_sampling",
        "temperature",
        "device",
    )
    settings = {n: getattr(config, n) for n in names} | {
        "drafter_run": name,
        "target_fingerprint": "f",
        "speculative_num_draft_tokens": 4,
        "max_new_tok": 64,
        "dtype": "float32",
    }
    table = pd.DataFrame(
        {
            "id": [f"s{i}" for i in range(len(accepted))],
            "prompt_tok": 5,
            "verify_steps": 10,
            "accepted": accepted,
            "greedy_s": 2.0,
            "speculative_s": 1.0,
        }
        | {
            f"{n}_{i}": [a // 3 if n == "accepted" else 10 for a in accepted]
            for n in ("reached", "accepted")
            for i in (1, 2, 3)
        }
    )
    config.acceptance_dir.mkdir(parents=True)
    table.sample(frac=1, random_state=len(name)).to_parquet(
        config.acceptance_dir / "acceptance.parquet"
    )  # the order says nothing
    length = ratio_interval(
        table["accepted"] + table["verify_steps"], table["verify_steps"], 0
    ).as_dict()
    (config.acceptance_dir / "acceptance.json").write_text(
        json.dumps({"settings": settings | changed, "acceptance_length": length})
    )
    return config


def test_two_drafters_are_paired_by_prompt(data):
    hard_and_easy = [2, 25, 4, 20, 3, 28, 6, 22]  # prompts differ far more than drafters
    config = dataclasses.replace(write_run("a", hard_and_easy), compare_run="other")
    write_run("other", [a - 1 for a in hard_and_easy])
    found = compare_runs(config)
    assert (
        found["acceptance_length"]["value"] == pytest.approx(0.1)
        and found["acceptance_length"]["low"] > 0.099
        and found["prompts"] == 8
    )
    apart = found["values"][0]
    assert apart["high"] - apart["low"] > 1  # each by itself: nothing to be seen
    assert "a accepts more" in comparison_text(found) and found["speed_ratio"]["value"] == 0.0


def test_the_drafter_of_another_run_is_judged_beside_ones_own(data):
    """Nothing of one's own is written over, and the comparison names whose drafters they are.

    A run without a drafter has one place only.
    """
    config = write_run("mine", [5, 6, 7, 8])
    config.drafter_dir.mkdir()
    theirs = dataclasses.replace(config, drafter_run="theirs")
    assert (
        theirs.acceptance_dir == config.acceptance_dir / "theirs"
        and theirs.judged.export_dir == dataclasses.replace(config, run_name="theirs").export_dir
    )
    assert (
        dataclasses.replace(config, member="m", drafter_run="").export_dir
        == config.sweep_dir / "m" / "export"
    )
    assert dataclasses.replace(theirs, run_name="eval").acceptance_dir.name == "acceptance"
    shutil.copytree(
        write_run("x", [6, 7, 8, 9], drafter_run="theirs").acceptance_dir, theirs.acceptance_dir
    )
    found = compare_runs(Config.create(run_name="mine", drafter_run="theirs", compare_run="mine"))
    assert found["runs"] == [
        "theirs (judged by mine)",
        "mine",
    ] and "theirs (judged by mine) accepts more" in comparison_text(found)
    with pytest.raises(EyasError, match="another run's folder name"):
        Config.create(run_name="mine", compare_run="mine")


def test_comparing_what_cannot_be_compared(data):
    config = write_run("a", [1, 2, 3])
    for other, message in (
        ("", "no run to compare with"),
        ("absent", "run 'absent' has no acceptance"),
    ):
        with pytest.raises(EyasError, match=message):
            compare_runs(dataclasses.replace(config, compare_run=other))
    write_run("hotter", [1, 2, 3], temperature=1.0)
    with pytest.raises(EyasError, match="other settings: temperature 0.0 and 1.0"):
        compare_runs(dataclasses.replace(config, compare_run="hotter"))
    write_run("fewer", [1, 2])
    with pytest.raises(EyasError, match="other prompts .3 and 2, 2 of the same name."):
        compare_runs(dataclasses.replace(config, compare_run="fewer"))
