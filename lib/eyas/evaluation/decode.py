"""Speculative decoding for real: chains and trees, greedy and sampled, of any drafting method.

The order is EAGLE's: the target prefills the prompt and gives the first token; a drafting method proposes a tree of tokens that may follow
(EAGLE-3's drafter runs over the committed slots with the target's true states, then drafts by feeding back its own output); one verify pass
of the target over [last token, drafts], in which each draft sees the committed text and its own ancestors, accepts a path from the root
and adds one token of the target's own after it (the *bonus* token). Both KV caches are left with what was committed, nothing else.

A tree is drafted as SGLang 0.5.23 does (`eagle_worker_v2.draft_forward`, `organize_draft_results`; EAGLE-2, arXiv 2406.16858): the score of a
node is the product of the drafter's probabilities from the root to it; each level proposes `topk` children for each node that was kept and
keeps the `topk` of best score; after `steps` levels the `draft_tokens - 1` best of all levels are verified, the root being the one that is
counted besides. A child never scores above its parent and comes after it, so the ancestors of a chosen node are chosen. topk 1 is a chain.

Verification, the output having the very distribution of the target's (argmax, or softmax of logits / temperature):
  greedy      the child equal to the target's argmax is accepted, and so on down from it; the argmax where no child is, is the bonus token.
  sampled     the same with a token drawn from the target's p in place of its argmax. This is multi-round rejection sampling (SpecInfer, EAGLE) for
              children that were chosen, not drawn: accept the first with p(x1), else the second with p(x2) / (1 - p(x1)), ..., else draw from
              what p leaves; every token comes out with p, whichever children there are (SGLang's `tree_speculative_sampling_target_only`). So
              drafts change how fast a text comes and nothing else: the same seed gives the same text with any of them.
  rejection   chains only: drafts are drawn from the drafter's own q (at the temperature) and accepted with min(1, p/q), else a token is drawn from
              (p - q)+, normalised (Leviathan et al., arXiv 2211.17192; SGLang's `speculative_use_rejection_sampling`). Its acceptance is sum of min(p, q).

A verify step records the nodes that the output could use: a draft behind an accepted end-of-text token is left out, nothing could follow
there, and such a step has no bonus token. Only the output is cut at `max_new_tok`; the last verify step is recorded whole, as the server counts it.
"""

import inspect
import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from eyas.config import Config, verified_tok
from eyas.errors import EyasError
from eyas.models.drafter import DraftCache, Drafter
from eyas.models.target import Target
from eyas.prompts.chat_template import Sample, encode
from eyas.prompts.prompt_set import PromptSet


@dataclass
class Draft:
    """Drafted nodes, n of them, parents before children: target ids, index of each one's parent (-1: the last committed token), the method's own
    probability of the token where its parent stands (1.0 where it has none), and what the tokens were drawn from, [n, V] on the CPU, if they were."""

    tokens: list[int]
    parents: list[int]
    confidence: list[float]
    proposal: torch.Tensor | None = None


@dataclass
class Step:
    """One verify step: the drafted nodes that count (see the module's head), as in `Draft`, and what became of them."""

    tokens: list[int]
    parents: list[int]
    confidence: list[float]
    accepted: list[int]  # indices of the accepted nodes, from the root on
    bonus: int | None  # the target's own token after them; None: the text ended inside
    draft_s: float  # the first of a prompt includes the drafter's run over the whole prompt
    verify_s: float  # the target's pass, the decision, the roll-back

    @property
    def depths(self) -> list[int]:
        """Position of each node: 1 is the first after the last committed token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths


@dataclass
class Trace:
    """One decoded prompt. `top2` are the target's two largest logits where it chose each token: what a tie is judged by."""

    tokens: list[int]
    top2: list[tuple[float, float]]
    seconds: float = 0.0  # prefill included
    prefill_s: float = 0.0  # of the target, to the first token
    steps: list[Step] = field(default_factory=list)

    @property
    def draft_s(self) -> float:
        return sum(step.draft_s for step in self.steps)

    @property
    def verify_s(self) -> float:
        return sum(step.verify_s for step in self.steps)


class TargetStream:
    """A Hugging Face causal LM with its KV cache; `forward` also gives the residual streams at the boundaries asked for."""

    def __init__(self, model, boundaries: tuple[int, ...]):
        from transformers import DynamicCache

        self.model, self.boundaries = model, boundaries
        self.cache = DynamicCache(config=model.config)
        self.cache.activate_past_recording()  # lets sliding-window layers be rolled back
        self._states: dict[int, torch.Tensor] = {}
        body = model.get_decoder()
        # What enters block b is boundary b; what enters the final norm is boundary N.
        modules = [*body.layers, body.norm] if boundaries else []
        self._hooks = [
            modules[b].register_forward_pre_hook(self._keep(b), with_kwargs=True)
            for b in boundaries
        ]

    def _keep(self, boundary: int):
        def hook(_, args, kwargs):
            self._states[boundary] = (args[0] if args else kwargs["hidden_states"])[0]

        return hook

    def forward(
        self, token_ids: list[int], keep: int, parents: list[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Feed n tokens after those in the cache: a text, or with `parents` (n - 1 entries, as in `Draft`) a tree whose root is the first of them.

        Gives the logits of the last `keep` of them, [keep, V], and the states of all of them, boundaries concatenated in ascending order,
        [n, B*H] (None without boundaries). EyasError: a tree that branches, and a target that can't take one.
        """
        ids = torch.tensor([token_ids], device=self.model.device)
        tree = (
            {}
            if parents is None or parents == list(range(-1, len(parents) - 1))
            else self._tree(parents)
        )
        logits = self.model(
            input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=keep, **tree
        ).logits[0]  # [keep, V]
        states = (
            torch.cat([self._states[b] for b in self.boundaries], dim=-1)
            if self.boundaries
            else None
        )  # [n, B*H]
        return logits, states

    def _tree(self, parents: list[int]) -> dict:
        """Attention mask and positions with which each node of a tree sees the cache, its ancestors and itself."""
        from transformers.cache_utils import DynamicLayer

        model, inputs = self.model, inspect.signature(self.model.forward).parameters
        if (
            any(type(layer) is not DynamicLayer for layer in self.cache.layers)
            or model.config._attn_implementation != "sdpa"
            or not {"attention_mask", "position_ids"} <= set(inputs)
        ):
            raise EyasError(
                f"{type(model).__name__} can't verify a tree of drafts here: that takes an own attention mask, and positions",
                "full attention in every layer (no sliding window), through sdpa",
                "use a chain: -p speculative_eagle_topk 1",
            )
        n, past = len(parents) + 1, self.cache.get_seq_length()
        seen = torch.eye(
            n, dtype=torch.bool
        )  # [n, n], row: node (0 is the root), column: what it sees
        for node, parent in enumerate(parents, 1):
            seen[node] |= seen[parent + 1]
        mask = torch.cat([torch.ones(n, past, dtype=torch.bool), seen], dim=1)  # [n, past + n]
        positions = past + seen.sum(dim=1) - 1  # [n]: a node stands as deep as it has ancestors
        return {
            "attention_mask": mask[None, None].to(model.device),
            "position_ids": positions[None].to(model.device),
        }

    def roll_back(self, n_tok: int, keep: list[int]) -> None:
        """Of the last n tokens keep only those of these indices (ascending), now directly after what was there before."""
        moved = [(to, row) for to, row in enumerate(keep) if to != row]
        if moved:
            for layer in self.cache.layers:
                for tensor in (layer.keys, layer.values):  # [1, kv heads, length, head_dim]
                    last = tensor[:, :, -n_tok:]
                    last[:, :, [to for to, _ in moved]] = last[:, :, [row for _, row in moved]]
        self.cache.crop(len(keep) - n_tok)

    def __enter__(self) -> "TargetStream":
        return self

    def __exit__(self, *_) -> None:
        for hook in self._hooks:
            hook.remove()


class Sampler:
    """How the target's tokens are chosen: argmax at temperature 0, else drawn. The draws are by `seed`, on the CPU, the same on every device."""

    def __init__(self, temperature: float, seed: int):
        self.temperature = temperature
        self.generator = torch.Generator().manual_seed(seed)

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """softmax(logits / temperature), [..., V] in float32 or wider, on the CPU."""
        return (
            (logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature)
            .softmax(-1)
            .cpu()
        )

    def draw(self, weights: torch.Tensor) -> int:
        """An index drawn by weights [V], which need no sum of 1."""
        return int(torch.multinomial(weights, 1, generator=self.generator))

    def uniform(self) -> float:
        return float(torch.rand((), dtype=torch.float64, generator=self.generator))


class DraftMethod(Protocol):
    """What `speculative_decode` asks of a drafting method."""

    boundaries: tuple[int, ...]  # whose states it reads; none: `draft` is given None

    def start(self, prompt_ids: list[int], sampler: Sampler) -> None:
        """Forget the last prompt and begin this one."""

    def draft(self, tokens: list[int], states: torch.Tensor | None) -> Draft:
        """Draft what may follow. `tokens`: token j+1 of each slot j committed since the last call (the first: since `start`, all of the prompt's);
        `states`: the target's states of these slots, [n, B*H]."""


class EagleDraft:
    """EAGLE-3's drafter with SGLang's dynamic tree (see the module's head); `rejection_sampling` draws a chain from the drafter where the target's tokens are drawn.

    The settings have SGLang's names and defaults of `Config`. EyasError: a combination that SGLang refuses or changes; topk above the draft vocabulary.
    """

    def __init__(
        self,
        drafter: Drafter,
        steps: int,
        topk: int = 1,
        draft_tokens: int = 0,
        rejection_sampling: bool = False,
    ):
        self.drafter, self.steps, self.topk, self.rejection_sampling = (
            drafter,
            steps,
            topk,
            rejection_sampling,
        )
        self.n_nodes = verified_tok(steps, topk, draft_tokens, rejection_sampling) - 1
        self.boundaries = drafter.config.boundaries
        if topk > drafter.config.draft_vocab_size:
            raise EyasError(
                f"speculative_eagle_topk = {topk}",
                f"at most the draft vocabulary, {drafter.config.draft_vocab_size} tokens",
            )

    def start(self, prompt_ids: list[int], sampler: Sampler) -> None:
        self.cache, self.sampler = DraftCache(), sampler

    @torch.inference_mode()
    def draft(self, tokens: list[int], states: torch.Tensor) -> Draft:
        """Run the drafter over the new slots, then level by level over its own drafts; the cache keeps only the former."""
        drafter, cache, topk = self.drafter, self.cache, self.topk
        device, dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
        out = drafter.extend(
            torch.tensor(tokens, device=device), drafter.fuse(states.to(device, dtype)), cache
        )[-1:]  # [1, H]
        committed, vocab_ids = cache.length, drafter.vocab.ids.to(device)
        scores = torch.ones(
            1, device=device
        )  # [r] of the kept nodes; r is 1 at the root, topk after it
        kept = torch.tensor([-1], device=device)  # [r] their indices among all candidates
        seen = torch.ones(1, committed, dtype=torch.bool, device=device)  # [r, slots] what they see
        drawn = [] if self.rejection_sampling and self.sampler.temperature > 0 else None
        found: list[
            tuple[torch.Tensor, ...]
        ] = []  # a level: token, parent, probability and score of each candidate, [r * topk] each
        for level in range(self.steps):
            logits = drafter.logits(out)  # [r, D]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            if drawn is None:
                best = logits.topk(topk, dim=-1)  # [r, topk]
                ids, probs = best.indices, (best.values - logits.logsumexp(-1, keepdim=True)).exp()
            else:
                proposal = self.sampler.probs(logits)  # [1, D]
                ids = torch.tensor([[self.sampler.draw(proposal[0])]], device=device)
                probs = proposal.to(device).gather(1, ids)
                drawn.append(proposal)
            expanded = (scores[:, None] * probs).flatten()  # [r * topk]
            found.append(
                (vocab_ids[ids.flatten()], kept.repeat_interleave(topk), probs.flatten(), expanded)
            )
            if level == self.steps - 1:
                break
            chosen = expanded.sort(descending=True, stable=True).indices[:topk]  # [topk]
            kept, scores, rows = (
                chosen + sum(len(before[0]) for before in found[:-1]),
                expanded[chosen],
                chosen // topk,
            )
            seen = torch.cat(
                [seen[rows], torch.eye(topk, dtype=torch.bool, device=device)], dim=1
            )  # [topk, committed + slots of this tree]
            positions = torch.full((topk,), committed + level, device=device)
            out = drafter.extend(
                found[-1][0][chosen], drafter.feed_back(out)[rows], cache, positions, seen
            )  # [topk, H]
        cache.truncate(committed)
        candidates = [torch.cat(parts) for parts in zip(*found)]
        # Stable: of equal scores the earlier candidate, a parent before its child. A node without its parent could not be verified.
        best = (
            candidates[3].sort(descending=True, stable=True).indices[: self.n_nodes].sort().values
        )
        index = {-1: -1} | {candidate: node for node, candidate in enumerate(best.tolist())}
        nodes, parents, probs = (part[best].tolist() for part in candidates[:3])
        draft = Draft(nodes, [index[parent] for parent in parents], probs)
        if drawn is not None:
            draft.proposal = torch.zeros(
                len(nodes), drafter.config.vocab_size, dtype=drawn[0].dtype
            )
            draft.proposal[:, drafter.vocab.ids.cpu()] = torch.cat(drawn)
        return draft


class ShuffledDraft(EagleDraft):
    """A floor: the same drafter, but the states of all committed slots change places at random before every draft (one cycle through all
    slots, so none keeps its own, by the sampler's seed). It still reads the true tokens; what it accepts owes nothing to the states."""

    def start(self, prompt_ids: list[int], sampler: Sampler) -> None:
        super().start(prompt_ids, sampler)
        self._generator = torch.Generator().manual_seed(
            sampler.generator.initial_seed()
        )  # its own: the target's draws stay the same
        self._tokens: list[int] = []
        self._states: list[torch.Tensor] = []

    def draft(self, tokens: list[int], states: torch.Tensor) -> Draft:
        self._tokens += tokens
        self._states.append(states)
        self.cache.truncate(0)
        order = torch.randperm(len(self._tokens), generator=self._generator).to(states.device)
        own = torch.cat(self._states)  # [slots, B*H]
        shuffled = torch.empty_like(own)
        shuffled[order] = own[order.roll(1)]
        return super().draft(self._tokens, shuffled)


class PromptLookup:
    """Drafts without a model: the tokens that followed the longest earlier occurrence of the text's end (the latest of equally long ones), `steps` of
    them at most, a chain; none where the last token never came before."""

    boundaries = ()

    def __init__(self, steps: int):
        self.steps = steps

    def start(self, prompt_ids: list[int], sampler: Sampler) -> None:
        self._ids = prompt_ids[:1]

    def draft(self, tokens: list[int], states: None) -> Draft:
        self._ids += tokens
        ids = np.array(self._ids)
        ends = np.flatnonzero(
            ids[:-1] == ids[-1]
        )  # where an n-gram equal to the text's last n tokens ends, for n = 1, 2, ...
        n, longest = 1, ends
        while len(ends):
            longest = ends
            ends = ends[ends >= n]
            ends = ends[ids[ends - n] == ids[len(ids) - 1 - n]]
            n += 1
        found = self._ids[longest[-1] + 1 :][: self.steps] if len(longest) else []
        return Draft(found, list(range(-1, len(found) - 1)), [1.0] * len(found))


def end_ids(model) -> set[int]:
    """The token ids that end a response, as the model's own generation settings say."""
    for config in (model.generation_config, model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return {eos} if isinstance(eos, int) else set(eos)
    return set()


def _top2(logits: torch.Tensor) -> list[tuple[float, float]]:
    return [tuple(pair) for pair in logits.topk(2).values.float().tolist()]


@torch.inference_mode()
def greedy_decode(model, prompt_ids: list[int], max_new_tok: int) -> Trace:
    """Plain greedy decoding, one token a pass, through the same `TargetStream`: what speculative decoding is measured against."""
    ends = end_ids(model)
    start = time.perf_counter()
    with TargetStream(model, ()) as target:
        logits, _ = target.forward(prompt_ids, keep=1)
        trace = Trace([int(logits.argmax())], _top2(logits))
        trace.prefill_s = time.perf_counter() - start
        while len(trace.tokens) < max_new_tok and trace.tokens[-1] not in ends:
            logits, _ = target.forward(trace.tokens[-1:], keep=1)
            trace.tokens.append(int(logits.argmax()))
            trace.top2 += _top2(logits)
    trace.seconds = time.perf_counter() - start
    return trace


@torch.inference_mode()
def speculative_decode(
    model,
    method: DraftMethod,
    prompt_ids: list[int],
    max_new_tok: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Trace:
    """Speculative decoding with any drafting method. At temperature 0 it gives what `greedy_decode` gives, else tokens drawn as the target's are, by `seed`.

    EyasError: a draft that branches, and a target that can't verify one (sliding-window layers, another attention than sdpa).
    """
    ends, sampler = end_ids(model), Sampler(temperature, seed)
    start = time.perf_counter()
    with TargetStream(model, method.boundaries) as target:
        method.start(prompt_ids, sampler)
        logits, states = target.forward(prompt_ids, keep=1)
        _, token = _verify(Draft([], [], []), logits, sampler)
        trace = Trace([token], _top2(logits))
        fresh = [
            *prompt_ids[1:],
            token,
        ]  # token j+1 of every committed slot j that the method has not seen
        now = time.perf_counter()
        trace.prefill_s = now - start
        while len(trace.tokens) < max_new_tok and trace.tokens[-1] not in ends:
            draft, began = method.draft(fresh, states), now
            drafted = time.perf_counter()
            n_tok = len(draft.tokens) + 1
            logits, states = target.forward(
                [trace.tokens[-1], *draft.tokens], keep=n_tok, parents=draft.parents
            )  # [n, V], [n, B*H]
            accepted, bonus = _verify(draft, logits, sampler)
            rows = [
                0,
                *(node + 1 for node in accepted),
            ]  # of the last token and of the accepted drafts
            target.roll_back(n_tok, rows)
            fresh = [*(draft.tokens[node] for node in accepted), bonus]
            states = states[rows] if states is not None else None
            kept = (
                next((i for i, token in enumerate(fresh) if token in ends), len(accepted)) + 1
            )  # tokens up to the end of the text
            trace.tokens += fresh[:kept]
            trace.top2 += _top2(logits[rows[:kept]])
            now = time.perf_counter()
            trace.steps.append(
                _step(
                    draft,
                    accepted[:kept],
                    bonus if kept > len(accepted) else None,
                    drafted - began,
                    now - drafted,
                )
            )
    trace.tokens, trace.top2 = trace.tokens[:max_new_tok], trace.top2[:max_new_tok]
    trace.seconds = time.perf_counter() - start
    return trace


def _verify(draft: Draft, logits: torch.Tensor, sampler: Sampler) -> tuple[list[int], int]:
    """The accepted nodes, from the root on, and the target's own token after them; logits [n + 1, V], those at the root first, then at each node."""
    if draft.proposal is not None:
        return _verify_drawn(draft, logits, sampler)
    argmax = logits.argmax(dim=-1).tolist() if sampler.temperature == 0 else None
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens))
    }
    accepted, at = [], -1
    while True:
        token = sampler.draw(sampler.probs(logits[at + 1])) if argmax is None else argmax[at + 1]
        if (at, token) not in children:
            return accepted, token
        at = children[at, token]
        accepted.append(at)


def _verify_drawn(draft: Draft, logits: torch.Tensor, sampler: Sampler) -> tuple[list[int], int]:
    """`_verify` for a chain whose tokens were drawn from `proposal`."""
    for node, token in enumerate(draft.tokens):
        p, q = sampler.probs(logits[node]), draft.proposal[node]  # [V]
        if sampler.uniform() * q[token] >= p[token]:
            left = (p - q).clamp(min=0)
            return list(range(node)), sampler.draw(
                left if left.sum() > 0 else p
            )  # p: where rounding alone tells them apart
    return list(range(len(draft.tokens))), sampler.draw(sampler.probs(logits[-1]))


def _step(
    draft: Draft, accepted: list[int], bonus: int | None, draft_s: float, verify_s: float
) -> Step:
    """The record of a step; without a bonus token the text ended at the last accepted node, and what was drafted behind it is left out."""
    behind = set()
    for node, parent in enumerate(draft.parents):
        if parent in behind or (bonus is None and parent == accepted[-1]):
            behind.add(node)
    counted = [node for node in range(len(draft.tokens)) if node not in behind]
    index = {-1: -1} | {node: i for i, node in enumerate(counted)}
    return Step(
        [draft.tokens[node] for node in counted],
        [index[draft.parents[node]] for node in counted],
        [draft.confidence[node] for node in counted],
        [index[node] for node in accepted],
        bonus,
        draft_s,
        verify_s,
    )


def response_start(loss_mask: np.ndarray) -> int:
    """Index of the first token of the last assistant turn: the prompt is everything before it, the turn's header included.

    EyasError where the mask is all zero or starts at token 0 (no prompt).
    """
    last = np.flatnonzero(loss_mask)
    if len(last) == 0:
        raise EyasError(
            "a sample without a supervised token", "a loss mask that selects the assistant's tokens"
        )
    before = np.flatnonzero(~loss_mask[: last[-1]])
    if len(before) == 0:
        raise EyasError(
            "a sample that begins with the response", "a prompt before the assistant's turn"
        )
    return int(before[-1]) + 1


def heldout_samples(config: Config, target: Target, prompts: PromptSet) -> list[Sample]:
    """The first `decode_prompts` held-out conversations in the seeded order, encoded: the beginning of what `extract` takes."""
    tokenizer = target.tokenizer()
    return [
        encode(conversation, tokenizer, config.max_length)
        for conversation in prompts.select("heldout", config.decode_prompts, config.seed)
    ]


def load_model(target: Target, dtype: torch.dtype, device: str):
    """The target as a Hugging Face causal LM, ready to decode."""
    return target.causal_lm(dtype, attn_implementation="sdpa").to(device)
