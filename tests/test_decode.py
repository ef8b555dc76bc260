"""Speculative decoding against plain decoding, Hugging Face's own generate, and loops without
caches; sampled output against the exact distribution.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from eyas.config import Config, verified_tok
from eyas.errors import EyasError
from eyas.evaluation import decode
from eyas.evaluation.decode import (
    Draft,
    EagleDraft,
    PromptLookup,
    Sampler,
    ShuffledDraft,
    TargetStream,
    greedy_decode,
    response_start,
    speculative_decode,
)
from eyas.models.drafter import DraftCache, Drafter, DrafterConfig
from eyas.models.target import load_target
from eyas.models.vocab import DraftVocab
from helpers.taught import make_prompts, teach
from helpers.tiny import make_tiny_target

BOUNDARIES = (1, 3, 6)  # 6 is boundary N: fine here, though SGLang could not serve it
SETTINGS = [
    (1, 1, 0),
    (3, 1, 0),
    (5, 1, 6),
    (1, 3, 4),
    (2, 2, 0),
    (3, 3, 10),
    (4, 4, 8),
    (3, 2, 2),
]  # steps, topk, draft tokens


@pytest.fixture(
    scope="module",
    params=[("Llama", torch.float32), ("Qwen3", torch.float64)],
    ids=["Llama", "Qwen3"],
)
def loaded(request, tmp_path_factory):
    """A tiny target, its model without an end of text (responses of full length, unless a test sets
    an end), and a drafter that was taught on it.
    """
    family, dtype = request.param
    target = load_target(
        str(make_tiny_target(tmp_path_factory.mktemp("target") / "tiny", n_blocks=6, family=family))
    )
    model = decode.load_model(target, dtype, "cpu")
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return SimpleNamespace(model=model, drafter=teach(target, model, make_prompts(), BOUNDARIES))


@pytest.fixture(scope="module")
def model(loaded):
    return loaded.model


@pytest.fixture(scope="module")
def drafter(loaded):
    return loaded.drafter


@pytest.fixture(scope="module")
def prompts():
    return make_prompts()


def test_states_are_the_boundaries(model):
    ids = list(range(20, 37))
    with torch.no_grad():
        whole = model(torch.tensor([ids]), output_hidden_states=True)
        with TargetStream(model, (0, 2, 5, 6)) as stream:
            chunks = [stream.forward(ids[:9], keep=1), stream.forward(ids[9:], keep=3)]
    states = torch.cat([chunk[1] for chunk in chunks]).split(64, dim=-1)
    for b, found in zip((0, 2, 5), states):
        torch.testing.assert_close(found, whole.hidden_states[b][0], atol=1e-4, rtol=1e-4)
    normed = model.model.norm(
        states[-1]
    )  # boundary N is before the final norm, Hugging Face's last entry after it
    torch.testing.assert_close(normed, whole.hidden_states[6][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(chunks[1][0], whole.logits[0, -3:], atol=1e-4, rtol=1e-4)
    assert not any(module._forward_pre_hooks for module in model.modules())  # left as it was


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_output_equals_plain_greedy_and_generate(model, drafter, prompts, settings):
    branches = False
    for prompt in prompts:
        for max_new_tok in (2, 1, 25) if prompt == prompts[2] else (25,):
            trace = speculative_decode(model, EagleDraft(drafter, *settings), prompt, max_new_tok)
            assert trace.tokens == greedy_decode(model, prompt, max_new_tok).tokens
            assert len(trace.tokens) == len(trace.top2) == max_new_tok
            assert all(len(step.tokens) == verified_tok(*settings) - 1 for step in trace.steps)
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=25, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        assert trace.tokens == theirs
        assert 0 < trace.prefill_s + trace.draft_s + trace.verify_s <= trace.seconds
        branches |= any(len(set(step.parents)) < len(step.parents) for step in trace.steps)
    assert branches == (
        settings[1] > 1 and settings[2] != 2
    )  # trees that branch were verified, and a chain never does


def slow_states(model, tokens):
    """argmax after the last token, and the states of all tokens, in one pass over everything."""
    outputs = model(torch.tensor([tokens]), output_hidden_states=True)
    with TargetStream(model, (6,)) as stream:
        last = stream.forward(tokens, keep=1)[1]
    return int(outputs.logits[0, -1].argmax()), torch.cat(
        [outputs.hidden_states[1][0], outputs.hidden_states[3][0], last], dim=-1
    )


def slow_probs(drafter, tokens, states, path):
    """What the drafter thinks comes after `path`, drafted after the committed tokens:

    {target id: probability}. No cache: each slot run anew.
    """
    hidden, ids = drafter.fuse(states.to(drafter.fc.weight.dtype)), [*tokens[1:]]
    for token in path:
        out = drafter.extend(
            torch.tensor(ids), hidden, DraftCache()
        )  # [slots, H], slot j: state j and token j+1
        hidden, ids = torch.cat([hidden, out[-1:]]), [*ids, token]
    out = drafter.extend(torch.tensor(ids), hidden, DraftCache())
    return dict(zip(drafter.vocab.ids.tolist(), drafter.logits(out[-1:])[0].softmax(-1).tolist()))


def slow_tree(drafter, tokens, states, steps, topk, n_nodes):
    """SGLang's tree said plainly: {path: (score, the last token's probability)}."""
    kept, candidates = {(): 1.0}, {}
    for _ in range(steps):
        level = {}
        for path, score in kept.items():
            probs = slow_probs(drafter, tokens, states, path)
            for token in sorted(probs, key=probs.get)[-topk:]:
                level[*path, token] = (score * probs[token], probs[token])
        candidates |= level
        kept = {path: level[path][0] for path in sorted(level, key=level.get)[-topk:]}
    return {path: candidates[path] for path in sorted(candidates, key=candidates.get)[-n_nodes:]}


def paths(step):
    """The tokens from the root to each node of a step or draft."""
    found = []
    for token, parent in zip(step.tokens, step.parents):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@pytest.mark.parametrize("settings", [(1, 1, 0), (3, 1, 0), (3, 3, 8), (3, 2, 7)], ids=str)
@torch.no_grad()
def test_steps_equal_a_loop_without_caches(model, drafter, prompts, settings):
    accepted = []
    for prompt in prompts[1:4]:
        trace = speculative_decode(model, EagleDraft(drafter, *settings), prompt, 12)
        tokens = [*prompt, slow_states(model, prompt)[0]]
        for step in trace.steps:
            wanted = slow_tree(
                drafter,
                tokens,
                slow_states(model, tokens[:-1])[1],
                settings[0],
                settings[1],
                verified_tok(*settings) - 1,
            )
            assert dict(zip(paths(step), step.confidence)) == {
                path: pytest.approx(p, rel=1e-3) for path, (_, p) in wanted.items()
            }
            path = ()
            while (*path, token := slow_states(model, [*tokens, *path])[0]) in wanted:
                path = (*path, token)
            assert [paths(step)[node] for node in step.accepted] == [
                path[: i + 1] for i in range(len(path))
            ] and step.bonus == token
            assert step.depths == [len(p) for p in paths(step)]
            tokens += [*path, token]
            accepted.append(len(path))
        assert trace.tokens == tokens[len(prompt) :][:12]
    assert 0 < np.mean(accepted) < settings[0]  # both acceptances and rejections were seen


@torch.no_grad()
def test_tree_holds_the_best_of_all_texts_that_there_are(small):
    """With top-k as large as the tree, nothing better was pruned: all 5 + 25 + 125 continuations
    are tried.
    """
    for prompt in ([1, 2, 3], [0, 4, 4, 5, 2, 1]):
        states = slow_states_of(small, prompt)
        scores = {(): 1.0}
        for depth in range(3):
            for path in [p for p in scores if len(p) == depth]:
                scores |= {
                    (*path, token): scores[path] * p
                    for token, p in slow_probs(small.drafter, [*prompt, 2], states, path).items()
                }
        for n in (1, 2, 3, 5):
            method = EagleDraft(small.drafter, 3, 5, n + 1)
            method.start(prompt, Sampler(0.0, 0))
            best = sorted([path for path in scores if path], key=scores.get)[-n:]
            assert sorted(paths(method.draft([*prompt[1:], 2], states))) == sorted(best)


def test_of_equal_scores_the_parent_comes_first(small):
    """A drafter that is sure gives a child its parent's score; a child without its parent could not
    be verified.
    """
    sure = Drafter(small.drafter.config, small.drafter.vocab).eval()
    sure.load_state_dict(small.drafter.state_dict())
    sure.lm_head.weight.data *= 1e4
    for n in range(2, 12):
        method = EagleDraft(sure, 4, 3, n)
        method.start([1, 2], Sampler(0.0, 0))
        draft = method.draft([2, 3], torch.randn(2, 48))
        assert max(draft.confidence) == 1.0 and all(
            parent < node for node, parent in enumerate(draft.parents)
        )


@pytest.mark.parametrize("settings", [(3, 1, 0), (3, 3, 10)], ids=str)
@torch.no_grad()
def test_caches_hold_what_a_fresh_run_would(model, drafter, prompts, settings, monkeypatch):
    streams = []
    monkeypatch.setattr(
        TargetStream,
        "__exit__",
        lambda self, *_: streams.append(self) or [hook.remove() for hook in self._hooks],
    )
    moved = 0
    for prompt in prompts:
        method = EagleDraft(drafter, *settings)
        trace = speculative_decode(model, method, prompt, 20)
        tokens, before_last = [*prompt, trace.tokens[0]], 0
        for step in trace.steps:
            before_last = len(tokens)
            tokens += [*(step.tokens[node] for node in step.accepted), step.bonus]
            moved += step.accepted != list(range(len(step.accepted)))
        fresh = TargetStream(model, BOUNDARIES)
        states = fresh.forward(tokens[:-1], keep=1)[1]  # the last token is fed with the next drafts
        for found, wanted in zip(streams[-1].cache.layers, fresh.cache.layers):
            torch.testing.assert_close(found.keys, wanted.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found.values, wanted.values, atol=1e-4, rtol=1e-4)
        fresh.__exit__()
        slots, cache = (
            before_last - 1,
            DraftCache(),
        )  # the drafter last ran before the last verify step
        drafter.extend(
            torch.tensor(tokens[1 : slots + 1]), drafter.fuse(states[:slots].float()), cache
        )
        assert method.cache.length == cache.length == slots
        for found, wanted in (
            (method.cache._keys, cache._keys),
            (method.cache._values, cache._values),
        ):
            torch.testing.assert_close(found[:, :slots], wanted[:, :slots], atol=1e-4, rtol=1e-4)
    assert (moved > 0) == (settings[1] > 1)  # accepted paths that did not lie together


@pytest.mark.parametrize("settings", [(4, 1, 0), (3, 3, 10)], ids=str)
def test_end_of_text_wherever_it_falls(model, drafter, prompts, settings, monkeypatch):
    """The first tokens of a response, each in turn, are made the end of text: first token, bonus
    token, first to last of an accepted run.
    """
    places, left_out = set(), 0
    for prompt in prompts:
        whole = speculative_decode(model, EagleDraft(drafter, *settings), prompt, 20)
        for end in list(dict.fromkeys(whole.tokens))[:6]:
            monkeypatch.setattr(model.generation_config, "eos_token_id", end)
            trace = speculative_decode(model, EagleDraft(drafter, *settings), prompt, 20)
            assert (
                trace.tokens
                == greedy_decode(model, prompt, 20).tokens
                == whole.tokens[: whole.tokens.index(end) + 1]
            )
            assert len(trace.tokens) == 1 + sum(
                len(step.accepted) + (step.bonus is not None) for step in trace.steps
            )
            for step, same in zip(trace.steps, whole.steps):
                if step.bonus is not None:  # the same decoding until the text ends
                    assert (step.tokens, step.parents, step.accepted, step.bonus) == (
                        same.tokens,
                        same.parents,
                        same.accepted,
                        same.bonus,
                    )
                else:
                    last = paths(step)[step.accepted[-1]]
                    assert step is trace.steps[-1] and last[-1] == end
                    wanted = [
                        (path, p)
                        for path, p in zip(paths(same), same.confidence)
                        if path == last or path[: len(last)] != last
                    ]
                    assert list(zip(paths(step), step.confidence)) == wanted
                    left_out += len(same.tokens) - len(step.tokens)
            places.add(
                "first"
                if not trace.steps
                else "bonus"
                if trace.steps[-1].bonus is not None
                else "inside"
            )
        monkeypatch.undo()
    assert places == {"first", "inside", "bonus"} and left_out > 0


def test_a_tree_is_refused_where_it_can_not_be_verified(drafter):
    config = transformers.MistralConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    sliding = transformers.MistralForCausalLM(config).eval()
    prompt = list(range(3, 20))
    assert (
        speculative_decode(sliding, EagleDraft(drafter, 3), prompt, 20).tokens
        == greedy_decode(sliding, prompt, 20).tokens
    )
    with pytest.raises(EyasError, match="MistralForCausalLM can't verify a tree"):
        speculative_decode(sliding, EagleDraft(drafter, 3, 2), prompt, 20)


def test_settings_are_those_that_sglang_takes(drafter):
    for steps, topk, given, wanted in (
        (3, 1, 0, 4),
        (3, 1, 4, 4),
        (5, 4, 0, 21),
        (5, 4, 8, 8),
        (1, 3, 4, 4),
        (2, 2, 7, 7),
    ):
        assert verified_tok(steps, topk, given) == wanted
        assert (
            Config.create(
                speculative_num_steps=steps,
                speculative_eagle_topk=topk,
                speculative_num_draft_tokens=given,
            ).verified_tok
            == wanted
        )
    for steps, topk, given, words in (
        (3, 1, 5, "4, or 0 for that"),
        (1, 3, 5, "2 to 4"),
        (2, 2, 8, "2 to 7"),
        (2, 2, 1, "2 to 7"),
        (0, 1, 0, "at least 1"),
        (1, 0, 0, "at least 1"),
    ):
        with pytest.raises(EyasError, match=words):
            Config.create(
                speculative_num_steps=steps,
                speculative_eagle_topk=topk,
                speculative_num_draft_tokens=given,
            )
    with pytest.raises(EyasError, match="only a chain is drawn"):
        Config.create(speculative_eagle_topk=2, speculative_use_rejection_sampling=True)
    with pytest.raises(EyasError, match="at least 0"):
        Config.create(temperature=-1.0)
    with pytest.raises(EyasError, match="at most the draft vocabulary, 384"):
        EagleDraft(drafter, 2, 385)


# Sampling: a target of 6 tokens, whose texts of 3 tokens can all be written down with their
# probabilities.


@pytest.fixture(scope="module")
def small():
    """A target with one block, and an untrained drafter that knows 5 of its 6 tokens."""
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=6,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        weight.data.normal_(
            std=1.0 if "embed" in name else 1.5 * weight.shape[-1] ** -0.5
        ) if "norm" not in name else None
    boundaries = (0, 1, 1)
    shape = DrafterConfig(
        hidden_size=16,
        target_hidden_size=16,
        vocab_size=6,
        draft_vocab_size=5,
        n_heads=2,
        n_kv_heads=1,
        head_dim=8,
        intermediate_size=32,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=64,
        boundaries=boundaries,
    )
    drafter = Drafter(shape, DraftVocab(torch.tensor([0, 1, 2, 4, 5]), 6)).eval()
    for name, weight in drafter.named_parameters():
        weight.data.normal_(std=1.5 * weight.shape[-1] ** -0.5) if "norm" not in name else None
    return SimpleNamespace(model=model, drafter=drafter)


def slow_states_of(small, tokens):
    with TargetStream(small.model, small.drafter.config.boundaries) as stream:
        return stream.forward(tokens, keep=1)[1]


PROMPT, N_TOK = [1, 4, 2, 0, 5, 4, 2], 3
SAMPLED = {
    "chain": lambda d: EagleDraft(d, 2),
    "tree": lambda d: EagleDraft(d, 2, 3, 7),
    "rejection": lambda d: EagleDraft(d, 2, rejection_sampling=True),
    "lookup": lambda d: PromptLookup(2),
}


@pytest.fixture(scope="module")
def exact(small):
    """{text of 3 tokens: its probability} after the prompt, at temperature 0.8, from one pass over
    all of them.
    """
    texts = list(itertools.product(range(6), repeat=N_TOK))
    with torch.no_grad():
        logits = (
            small.model(torch.tensor([[*PROMPT, *text] for text in texts]))
            .logits[:, len(PROMPT) - 1 : -1]
            .double()
        )
    probs = (logits / 0.8).softmax(-1).gather(2, torch.tensor(texts)[..., None])[..., 0].prod(dim=1)
    assert probs.sum() == pytest.approx(1)
    return dict(zip(texts, probs.tolist()))


class RememberedStream(TargetStream):
    """A stream that runs the model once for the same text and drafts: thousands of draws in
    seconds.
    """

    known: dict = {}

    def __enter__(self):
        self.text = []
        return self

    def forward(self, token_ids, keep, parents=None):
        key = (*self.text, -1, *token_ids, -1, *(parents or ()))
        if key not in self.known:
            with TargetStream(self.model, self.boundaries) as stream:
                if self.text:
                    stream.forward(self.text, keep=1)
                self.known[key] = stream.forward(token_ids, keep, parents)
        self.text += token_ids
        return self.known[key]

    def roll_back(self, n_tok, keep):
        last = self.text[-n_tok:]
        self.text[-n_tok:] = [last[row] for row in keep]


class Remembered:
    """A method that drafts once for the same text, and draws nothing itself."""

    def __init__(self, method):
        self.method, self.boundaries, self.known = method, method.boundaries, {}

    def start(self, prompt_ids, sampler):
        self.prompt_ids, self.sampler, self.text, self.states = prompt_ids, sampler, [], []

    def draft(self, tokens, states):
        self.text += tokens
        self.states.append(states)
        if tuple(self.text) not in self.known:
            self.method.start(self.prompt_ids, self.sampler)
            self.known[tuple(self.text)] = self.method.draft(
                self.text, torch.cat(self.states) if self.boundaries else None
            )
        return self.known[tuple(self.text)]


def remembered(small, name, monkeypatch):
    monkeypatch.setattr(decode, "TargetStream", RememberedStream)
    monkeypatch.setattr(RememberedStream, "known", {})
    method = SAMPLED[name](small.drafter)
    return method if name == "rejection" else Remembered(method)


def draw_texts(small, method, n):
    """Texts, each with a seed of its own, and the traces that they came from."""
    traces = [
        speculative_decode(small.model, method, PROMPT, N_TOK, temperature=0.8, seed=i)
        for i in range(n)
    ]
    return [tuple(trace.tokens) for trace in traces], traces


def chi_square(texts, exact) -> float:
    """Probability of a distance from the exact distribution as large as this one, or larger; rare
    texts are one cell.
    """
    rare = {text for text, p in exact.items() if p * len(texts) < 5}
    cells = [([texts.count(text)], p) for text, p in exact.items() if text not in rare] + [
        ([sum(text in rare for text in texts)], sum(exact[text] for text in rare))
    ]
    distance = sum((found[0] - p * len(texts)) ** 2 / (p * len(texts)) for found, p in cells)
    return float(
        torch.special.gammaincc(
            torch.tensor((len(cells) - 1) / 2).double(), torch.tensor(distance / 2).double()
        )
    )


@pytest.mark.parametrize(("name", "n"), [("chain", 3000), ("tree", 3000), ("rejection", 1500)])
def test_sampled_texts_have_the_targets_distribution(small, exact, name, n, monkeypatch):
    plain = draw_texts(small, SAMPLED[name](small.drafter), 40)[0]
    texts, traces = draw_texts(small, remembered(small, name, monkeypatch), n)
    assert texts[:40] == plain and len(set(plain)) > 10
    assert chi_square(texts, exact) > 0.001
    accepted, steps = (
        sum(len(step.accepted) for trace in traces for step in trace.steps),
        sum(len(trace.steps) for trace in traces),
    )
    assert 0.1 < accepted / steps < 1.9  # acceptances and rejections were seen


def test_sampled_text_owes_nothing_to_the_drafts(model, drafter, prompts):
    """One draw of the target's for each token, wherever it is accepted: the same seed gives the
    same text with any drafts (but drawn ones).
    """
    methods = [
        EagleDraft(drafter, 3),
        EagleDraft(drafter, 3, 3, 10),
        ShuffledDraft(drafter, 2),
        PromptLookup(4),
    ]
    for prompt in prompts[2:4]:
        texts = {
            seed: [
                speculative_decode(model, method, prompt, 15, temperature=0.5, seed=seed).tokens
                for method in methods
            ]
            for seed in (1, 2)
        }
        assert (
            all(text == same[0] for same in texts.values() for text in same)
            and texts[1][0] != texts[2][0]
        )


def certain(draft, logits, sampler):
    """Wrong: a child of more than one half is always accepted."""
    accepted, at = [], -1
    while True:
        p = sampler.probs(logits[at + 1])
        likely = [
            node
            for node, parent in enumerate(draft.parents)
            if parent == at and p[draft.tokens[node]] > 0.5
        ]
        if not likely:
            return accepted, sampler.draw(p)
        at = likely[0]
        accepted.append(at)


def forgetful(draft, logits, sampler):
    """Wrong: children are accepted with p, but what was refused is not taken out of p for the next
    one and the bonus token.
    """
    accepted, at = [], -1
    while True:
        p = sampler.probs(logits[at + 1])
        node = next(
            (
                n
                for n, parent in enumerate(draft.parents)
                if parent == at and sampler.uniform() < p[draft.tokens[n]]
            ),
            None,
        )
        if node is None:
            return accepted, sampler.draw(p)
        at = node
        accepted.append(at)


def careless(draft, logits, sampler):
    """Wrong: min(1, p/q) with a token of p itself, not of (p - q)+, where a draft was refused."""
    for node, token in enumerate(draft.tokens):
        p = sampler.probs(logits[node])
        if sampler.uniform() * draft.proposal[node][token] >= p[token]:
            return list(range(node)), sampler.draw(p)
    return list(range(len(draft.tokens))), sampler.draw(sampler.probs(logits[-1]))


@pytest.mark.parametrize(
    ("name", "part", "wrong"),
    [
        ("tree", "_verify", certain),
        ("tree", "_verify", forgetful),
        ("rejection", "_verify_drawn", careless),
    ],
)
def test_a_wrong_rule_is_found(small, exact, monkeypatch, name, part, wrong):
    monkeypatch.setattr(decode, part, wrong)
    assert chi_square(draw_texts(small, remembered(small, name, monkeypatch), 800)[0], exact) < 1e-6


def test_rejection_sampling_accepts_the_overlap():
    """sum of min(p, q) of the drafts are accepted, and every token comes out with p."""
    generator = torch.Generator().manual_seed(2)
    logits, q = (
        torch.randn(2, 5, generator=generator),
        torch.randn(5, generator=generator).softmax(-1),
    )
    sampler, n = Sampler(1.0, 3), 8000
    hits, counts, p = 0, torch.zeros(5), logits[0].softmax(-1)
    for _ in range(n):
        token = sampler.draw(q)
        accepted, bonus = decode._verify(
            Draft([token], [-1], [float(q[token])], q[None]), logits, sampler
        )
        hits += len(accepted)
        counts[token if accepted else bonus] += 1
    assert hits / n == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.02)
    torch.testing.assert_close(counts / n, p, atol=0.02, rtol=0)


def test_near_temperature_0_it_is_greedy(model, drafter, prompts):
    for method in (
        EagleDraft(drafter, 3),
        EagleDraft(drafter, 3, 2),
        EagleDraft(drafter, 3, rejection_sampling=True),
    ):
        for temperature in (0.0, 1e-5):
            assert (
                speculative_decode(model, method, prompts[3], 15, temperature).tokens
                == greedy_decode(model, prompts[3], 15).tokens
            )


# Other drafting methods


def slow_lookup(ids, steps):
    for n in range(len(ids) - 1, 0, -1):
        for start in range(len(ids) - n - 1, -1, -1):
            if ids[start : start + n] == ids[-n:]:
                return ids[start + n :][:steps]
    return []


def test_prompt_lookup_finds_the_longest_match():
    generator, lengths = np.random.default_rng(0), set()
    for _ in range(300):
        ids, method = (
            generator.integers(
                0, generator.integers(2, 9), size=generator.integers(2, 30)
            ).tolist(),
            PromptLookup(4),
        )
        method.start(ids[:-1], None)
        cut = generator.integers(1, len(ids))
        method.draft(ids[1:cut], None) if cut > 1 else None
        draft = method.draft(ids[cut:], None)
        assert draft.tokens == slow_lookup(ids, 4) and paths(draft) == [
            tuple(draft.tokens[: i + 1]) for i in range(len(draft.tokens))
        ]
        lengths.add(len(draft.tokens))
    assert lengths == {0, 1, 2, 3, 4}


def test_prompt_lookup_decodes_what_greedy_does(model, prompts):
    accepted = 0
    for prompt in prompts:
        response = greedy_decode(model, prompt, 25).tokens
        prompt = [*prompt, *response, *prompt]  # what comes was seen before
        trace = speculative_decode(model, PromptLookup(4), prompt, 25)
        assert trace.tokens == greedy_decode(model, prompt, 25).tokens
        accepted += sum(len(step.accepted) for step in trace.steps)
    assert accepted > 0


@pytest.mark.parametrize("settings", [(3, 1, 0), (3, 3, 8)], ids=str)
def test_shuffled_states_are_a_worse_drafter(model, drafter, prompts, settings):
    accepted = {EagleDraft: 0, ShuffledDraft: 0}
    for prompt in prompts[2:]:
        for kind in accepted:
            trace = speculative_decode(model, kind(drafter, *settings), prompt, 30, seed=1)
            assert trace.tokens == greedy_decode(model, prompt, 30).tokens
            accepted[kind] += sum(len(step.accepted) for step in trace.steps)
        again = speculative_decode(model, ShuffledDraft(drafter, *settings), prompt, 30, seed=1)
        assert [step.tokens for step in again.steps] == [step.tokens for step in trace.steps]
    assert accepted[ShuffledDraft] < 0.5 * accepted[EagleDraft]


def test_shuffling_leaves_no_state_in_its_place(drafter, monkeypatch):
    seen = []
    monkeypatch.setattr(
        EagleDraft, "draft", lambda self, tokens, states: seen.append((list(tokens), states))
    )
    method = ShuffledDraft(drafter, 3)
    method.start([1, 2, 3], Sampler(0.0, 0))
    own = torch.arange(9.0)[:, None]
    for rows in (range(3), range(3, 5), range(5, 9)):
        method.draft([10 + row for row in rows], own[list(rows)])
        tokens, states = seen[-1]
        assert (
            tokens == [10 + row for row in range(rows.stop)]
            and states.sort(dim=0).values.equal(own[: rows.stop])
            and not (states == own[: rows.stop]).any()
        )


def test_response_start():
    assert response_start(np.array([0, 0, 1, 1, 0, 0, 1, 1, 0], dtype=bool)) == 6
    assert response_start(np.array([0, 1], dtype=bool)) == 1
    for mask in ([0, 0, 0], [1, 1, 0]):
        with pytest.raises(EyasError):
            response_start(np.array(mask, dtype=bool))
