"""Speculative decoding against plain decoding, Hugging Face's own generate, and a loop without caches; counts against hand-made ones."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import make_tiny_target

from eyas import decode
from eyas.config import Config
from eyas.decode import TargetStream, Trace, bf16_steps, greedy_decode, response_start, speculative_decode
from eyas.drafter import DraftCache, Drafter, DrafterConfig
from eyas.errors import EyasError
from eyas.intervals import ratio_interval
from eyas.target import load_target
from eyas.vocab import DraftVocab

BOUNDARIES = (1, 3, 6)  # 6 is boundary N: fine here, though SGLang could not serve it


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(str(make_tiny_target(tmp_path_factory.mktemp("target") / "tiny", n_blocks=6)))


@pytest.fixture(scope="module")
def model(target):
    model = decode.load_model(target, torch.float32, "cpu")
    model.generation_config.eos_token_id = model.config.eos_token_id = None  # responses of full length, unless a test sets an end
    return model


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 512, (n,), generator=generator).tolist() for n in (1, 2, 7, 19, 40)]


@pytest.fixture(scope="module")
def drafter(target, model, prompts):
    """Taught on the target's own greedy responses, a little, so that some drafts are accepted and some are not."""
    torch.manual_seed(0)
    ids = torch.randperm(target.vocab_size)[:384].sort().values
    drafter = Drafter(DrafterConfig.from_target(target, BOUNDARIES, len(ids)), DraftVocab(ids, target.vocab_size))
    drafter.embed_tokens.weight.data.copy_(target.embedding().float())
    texts = []
    for prompt in prompts:
        tokens = prompt + greedy_decode(model, prompt, 30).tokens
        with TargetStream(model, BOUNDARIES) as stream, torch.no_grad():
            texts.append((torch.tensor(tokens), stream.forward(tokens, keep=1)[2].clone()))
    optimizer = torch.optim.Adam([p for name, p in drafter.named_parameters() if "embed" not in name], lr=3e-3)
    for _ in range(15):
        for tokens, states in texts:
            out = drafter.extend(tokens[1:-1], drafter.fuse(states[:-2]), DraftCache())
            wanted = drafter.vocab.to_draft(tokens[2:])
            loss = torch.nn.functional.cross_entropy(drafter.logits(out)[wanted >= 0], wanted[wanted >= 0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return drafter.eval()


def test_states_are_the_boundaries(model):
    ids = list(range(20, 37))
    with torch.no_grad():
        whole = model(torch.tensor([ids]), output_hidden_states=True)
        with TargetStream(model, (0, 2, 5, 6)) as stream:
            chunks = [stream.forward(ids[:9], keep=1), stream.forward(ids[9:], keep=3)]
    states = torch.cat([chunk[2] for chunk in chunks]).split(64, dim=-1)
    for b, found in zip((0, 2, 5), states):
        torch.testing.assert_close(found, whole.hidden_states[b][0], atol=1e-4, rtol=1e-4)
    normed = model.model.norm(states[-1])  # boundary N is before the final norm, Hugging Face's last entry after it
    torch.testing.assert_close(normed, whole.hidden_states[6][0], atol=1e-4, rtol=1e-4)
    assert chunks[1][0] == whole.logits[0, -3:].argmax(-1).tolist()
    assert not any(module._forward_pre_hooks for module in model.modules())  # left as it was


@pytest.mark.parametrize("draft_length", [1, 2, 3, 5])
def test_output_equals_plain_greedy_and_generate(model, drafter, prompts, draft_length):
    for prompt in prompts:
        for max_new_tok in (1, 2, 25):
            trace = speculative_decode(model, drafter, prompt, max_new_tok, draft_length)
            assert trace.tokens == greedy_decode(model, prompt, max_new_tok).tokens
            assert len(trace.tokens) == len(trace.top2) == max_new_tok
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=25, do_sample=False)[0, len(prompt) :].tolist()
        assert trace.tokens == theirs


def slow_speculative(model, drafter, prompt, max_new_tok, draft_length):
    """The same decoding as plainly as it can be said: no caches, everything from the first token at every step."""

    def run(tokens):
        outputs = model(torch.tensor([tokens]), output_hidden_states=True)
        states = [*outputs.hidden_states[:-1]]
        with TargetStream(model, (6,)) as stream:
            states.append(stream.forward(tokens, keep=1)[2][None])
        return outputs.logits[0].argmax(-1).tolist(), torch.cat([states[b][0] for b in BOUNDARIES], dim=-1)

    tokens = [*prompt, run(prompt)[0][-1]]
    drafted, accepted = [], []
    while len(tokens) - len(prompt) < max_new_tok:
        states = run(tokens[:-1])[1]
        hidden, ids, drafts = drafter.fuse(states), tokens[1:], []
        for _ in range(draft_length):
            out = drafter.extend(torch.tensor(ids), hidden, DraftCache())  # [slots, H], slot j: state j and token j+1
            drafts.append(int(drafter.vocab.ids[drafter.logits(out[-1:]).argmax()]))
            hidden, ids = torch.cat([hidden, out[-1:]]), [*ids, drafts[-1]]
        hits = 0
        while hits < draft_length and run(tokens + drafts[:hits])[0][-1] == drafts[hits]:
            hits += 1
        tokens += [*drafts[:hits], run(tokens + drafts[:hits])[0][-1]]
        drafted.append(draft_length)
        accepted.append(hits)
    return tokens[len(prompt) :][:max_new_tok], drafted, accepted


@pytest.mark.parametrize("draft_length", [1, 3])
@torch.no_grad()
def test_counts_equal_a_loop_without_caches(model, drafter, prompts, draft_length):
    total = []
    for prompt in prompts[1:4]:
        trace = speculative_decode(model, drafter, prompt, 16, draft_length)
        assert (trace.tokens, trace.drafted, trace.accepted) == slow_speculative(model, drafter, prompt, 16, draft_length)
        total += trace.accepted
    assert 0 < np.mean(total) < draft_length  # both acceptances and rejections were seen


def test_end_of_text_wherever_it_falls(model, drafter, prompts, monkeypatch):
    """Every token of a response in turn is made the end of text: first token, bonus token, first to last of an accepted run."""
    places = set()
    for prompt in prompts:
        whole = speculative_decode(model, drafter, prompt, 20, 4)
        for end in list(dict.fromkeys(whole.tokens))[:8]:
            monkeypatch.setattr(model.generation_config, "eos_token_id", end)
            trace = speculative_decode(model, drafter, prompt, 20, 4)
            assert trace.tokens == greedy_decode(model, prompt, 20).tokens == whole.tokens[: whole.tokens.index(end) + 1]
            no_bonus = 1 + sum(trace.accepted) + len(trace.accepted) - len(trace.tokens)
            assert no_bonus == 0 or (no_bonus == 1 and trace.accepted[-1] == trace.drafted[-1])
            assert all(a <= d for a, d in zip(trace.accepted, trace.drafted)) and set(trace.drafted[:-1]) <= {4}
            assert trace.accepted[:-1] == whole.accepted[: max(len(trace.accepted) - 1, 0)]  # the same decoding until the text ends
            places.add("first" if not trace.drafted else "inside" if no_bonus else "bonus")
        monkeypatch.undo()
    assert places == {"first", "inside", "bonus"}


def test_counts_of_a_hand_made_trace(drafter):
    sample = SimpleNamespace(id="a", category="chat")
    outside = next(i for i in range(512) if drafter.vocab.to_draft(torch.tensor([i]))[0] < 0)
    inside = int(drafter.vocab.ids[0])
    trace = Trace([outside, inside, outside, inside, outside, inside, inside], [], 2.0, drafted=[3, 3, 3, 2], accepted=[0, 3, 1, 2])
    row = decode._count(Config.create(draft_length=3), drafter, sample, [1, 2, 3], Trace(trace.tokens, [], 3.0), trace)
    assert (row["verify_steps"], row["drafted"], row["accepted"], row["tok"], row["prompt_tok"]) == (4, 11, 6, 7, 3)
    assert [row[f"proposed_{i}"] for i in (1, 2, 3)] == [4, 4, 3]
    assert [row[f"reached_{i}"] for i in (1, 2, 3)] == [4, 3, 1]
    assert [row[f"accepted_{i}"] for i in (1, 2, 3)] == [3, 2, 1]
    # bigrams: oi io oi io oi ii -> 3 of 6 came before; the first token (from the prefill) can't be drafted and is not counted as outside
    assert (row["bigrams"], row["repeated_bigrams"], row["draftable_tok"], row["outside_vocab_tok"]) == (6, 3, 6, 2)
    assert row["identical"] and (row["greedy_s"], row["speculative_s"]) == (3.0, 2.0)


def test_bf16_steps_are_neighbouring_bfloat16_numbers():
    for value in (1.0, 1.9921875, 3.5, 17.25, 300.0):
        top = torch.tensor(value, dtype=torch.bfloat16)
        below = (top.view(torch.int16) - 1).view(torch.bfloat16)  # the next smaller bfloat16
        expected = 1.0 if top.frexp().mantissa > 0.5 else 0.5  # below a power of two the steps are half as large
        assert bf16_steps(top.item(), below.item()) == expected
        assert bf16_steps(top.item(), top.item()) == 0.0


def test_first_differences_are_judged_where_they_are():
    samples = [SimpleNamespace(id=name) for name in "abc"]
    tie = (Trace([1, 2, 3], [(9.0, 1.0), (8.0, 7.9375), (9.0, 1.0)]), Trace([1, 4, 3], [(9.0, 1.0), (8.0, 8.0), (5.0, 5.0)]))
    wrong = (Trace([1, 2], [(9.0, 1.0), (8.0, 7.0)]), Trace([1, 5], [(9.0, 1.0), (8.0, 8.0)]))
    found = decode._compare(samples, [(Trace([1], [(1.0, 0.0)]),) * 2, tie, wrong])
    assert (found["prompts"], found["differing"], found["ties"], found["not_ties"]) == (3, 2, 1, 1)
    assert found["differences"][0] == {"id": "b", "at_tok": 1, "greedy_gap_bf16_steps": 1.0, "speculative_gap_bf16_steps": 0.0, "tie": True}
    assert found["differences"][1]["greedy_gap_bf16_steps"] == 16.0 and not found["differences"][1]["tie"]


def test_response_start():
    assert response_start(np.array([0, 0, 1, 1, 0, 0, 1, 1, 0], dtype=bool)) == 6
    assert response_start(np.array([0, 1], dtype=bool)) == 1
    for mask in ([0, 0, 0], [1, 1, 0]):
        with pytest.raises(EyasError):
            response_start(np.array(mask, dtype=bool))


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


def _samples(prompts):
    """Encoded conversations: prompt, two assistant tokens, a line break."""
    return [
        SimpleNamespace(id=f"s{i}", category="ab"[i % 2], input_ids=np.array([*prompt, 5, 2, 9]), loss_mask=np.array([False] * len(prompt) + [True, True, False]))
        for i, prompt in enumerate(prompts)
    ]


def test_measure_writes_counts_that_add_up(data, target, drafter, prompts):
    config = Config.create(run_name="t", decode_new_tok=12, draft_length=3, check_bf16_prompts=3, threads=1)
    found = decode.measure(config, target, drafter, _samples(prompts))
    record = json.loads((config.acceptance_dir / "acceptance.json").read_text())
    assert record == json.loads(json.dumps(found.record))
    table, counts = pd.read_parquet(config.acceptance_dir / "acceptance.parquet"), record["counts"]
    assert list(table["id"]) == [f"s{i}" for i in range(len(prompts))] and list(table["prompt_tok"]) == [len(p) for p in prompts]
    assert counts["prompts"] == len(prompts) and counts["accepted"] == table["accepted"].sum() == sum(p["accepted"] for p in record["by_position"])
    assert record["acceptance_length"]["value"] == pytest.approx(1 + counts["accepted"] / counts["verify_steps"])
    assert record["accepted_per_step"]["value"] == pytest.approx(counts["accepted"] / counts["verify_steps"])
    assert record["speed_ratio"]["value"] == pytest.approx(counts["greedy_s"] / counts["speculative_s"])
    assert sum(c["verify_steps"] for c in record["by_category"]) == counts["verify_steps"]
    assert record["speed_ratio_bfloat16"]["value"] > 0
    same, again = record["identical_to_greedy"]["float32"], record["identical_to_greedy"]["bfloat16"]
    assert (same["prompts"], same["differing"]) == (len(prompts), 0)
    assert again["prompts"] == 3 and again["ties"] + again["not_ties"] == again["differing"] == len(again["differences"])
    assert "output identical to greedy (float32): yes" in str(found)


def test_measure_refuses_what_it_cannot_decode(data, target, drafter):
    config = Config.create(run_name="t", decode_new_tok=64, draft_length=3)
    with pytest.raises(EyasError, match="no held-out prompts"):
        decode.measure(config, target, drafter, [])
    with pytest.raises(EyasError, match="the prompt of s0 has 1000 tokens; expected at most 957"):
        decode.measure(config, target, drafter, _samples([[3] * 1000]))
