"""Decode speculatively: chains and trees, greedy and sampled, with any drafting method.

The order is EAGLE's. The target prefills the prompt and gives the first token. Then, again and
again:
  1. A drafting method proposes a tree of tokens that may follow. EAGLE-3's drafter runs over the
     committed slots with the target's true states, then drafts by feeding back its own output.
  2. One verify pass of the target runs over [last token, draft tokens]. Each draft token sees the
     committed text and its own ancestors. The pass accepts a path from the root and adds one token
     of the target's own after it (the *bonus* token).
  3. Both KV caches keep what was committed, nothing else.

A tree is drafted as SGLang 0.5.23 does (`eagle_worker_v2.draft_forward`, `organize_draft_results`;
EAGLE-2, arXiv 2406.16858). The score of a node is the product of the drafter's probabilities from
the root to it. Each level proposes `topk` children for each node that was kept, and keeps the
`topk` of best score. After `steps` levels the `draft_tokens - 1` best of all levels are verified;
the root is counted besides. A child never scores above its parent and comes after it, so the
ancestors of a chosen node are chosen too. topk 1 is a chain.

Verification gives the output exactly the distribution of the target (argmax, or
softmax of logits / temperature):
  greedy      Accept the child that equals the target's argmax, and so on down from it. Where no
              child equals it, the argmax is the bonus token.
  sampled     The same with a token drawn from the target's p in place of its argmax. This is
              multi-round rejection sampling (SpecInfer, EAGLE) for children that were chosen, not
              drawn: accept the first with p(x1), else the second with p(x2) / (1 - p(x1)), ...,
              else draw from the rest of p. Every token has probability p, whichever children exist
              (SGLang's `tree_speculative_sampling_target_only`). Draft tokens therefore change
              only how fast a text is produced: the same seed gives the same text with any of them.
  rejection   Chains only. Draft tokens are drawn from the drafter's own q (at the temperature) and
              accepted with min(1, p/q); else a token is drawn from (p - q)+, normalised (Leviathan
              et al., arXiv 2211.17192; SGLang's `speculative_use_rejection_sampling`). The
              acceptance is the sum of min(p, q).

A verify step records the nodes that the output could use. A draft token behind an accepted
end-of-text token is left out, because nothing can follow there; such a step has no bonus token.
Only the output is cut at `max_new_tok`. The last verify step is recorded whole, as the server does.
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
from eyas.prompts.prompt_set import PromptSet, usable


@dataclass
class Draft:
    """Hold n drafted nodes, parents before children.

    tokens: target ids.
    parents: the index of each node's parent; -1 is the last committed token.
    confidence: the method's own probability of the token after its parent; 1.0 where it has none.
    proposal: the distributions that the tokens were drawn from, [n, V] on the CPU; else None.
    """

    tokens: list[int]
    parents: list[int]
    confidence: list[float]
    proposal: torch.Tensor | None = None


@dataclass
class Step:
    """Hold one verify step: the drafted nodes that count, as in `Draft`, and what became of them.

    The module's head says which nodes count.
    """

    tokens: list[int]
    parents: list[int]
    confidence: list[float]
    accepted: list[int]  # indices of the accepted nodes, from the root on
    bonus: int | None  # the target's own token after them; None: the text ended inside
    draft_s: float  # the first of a prompt includes the drafter's run over the whole prompt
    verify_s: float  # the target's pass, the decision, the roll-back

    @property
    def depths(self) -> list[int]:
        """Return the position of each node; 1 is the first after the last committed token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths


@dataclass
class Trace:
    """Hold one decoded prompt.

    `top2`: the target's two largest logits where it chose each token. They tell whether it was a
    tie.
    """

    tokens: list[int]
    top2: list[tuple[float, float]]
    seconds: float = 0.0  # prefill included
    prefill_s: float = 0.0  # of the target, to the first token
    steps: list[Step] = field(default_factory=list)

    @property
    def draft_s(self) -> float:
        """Return the seconds of drafting."""
        return sum(step.draft_s for step in self.steps)

    @property
    def verify_s(self) -> float:
        """Return the seconds of verifying."""
        return sum(step.verify_s for step in self.steps)


class TargetStream:
    """Run a Hugging Face causal LM with its KV cache, and read its residual streams.

    `forward` gives the states at the boundaries asked for. Use it as a context manager, which
    removes the hooks from the model.
    """

    def __init__(self, model, boundaries: tuple[int, ...]):
        from transformers import DynamicCache

        self.model = model
        self.boundaries = boundaries
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
        """Feed n tokens after those in the cache; return logits and states.

        token_ids: a text; with `parents` a tree whose root is the first token.
        keep: of how many last tokens the logits are returned.
        parents: n - 1 entries, as in `Draft`.
        Return the logits, [keep, V], and the states of all n tokens, boundaries concatenated in
        ascending order, [n, B*H] (None without boundaries).
        Raise EyasError if a tree branches and the target cannot take one.
        """
        ids = torch.tensor([token_ids], device=self.model.device)
        is_chain = parents is None or parents == list(range(-1, len(parents) - 1))
        tree_inputs = {} if is_chain else self._tree_inputs(parents)
        logits = self.model(
            input_ids=ids,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
            **tree_inputs,
        ).logits[0]  # [keep, V]
        states = None
        if self.boundaries:
            states = torch.cat([self._states[b] for b in self.boundaries], dim=-1)  # [n, B*H]
        return logits, states

    def _tree_inputs(self, parents: list[int]) -> dict:
        """Return attention mask and positions of a tree.

        Each node sees the cache, its ancestors and itself.
        """
        self._check_takes_tree()
        n = len(parents) + 1
        past = self.cache.get_seq_length()
        # Row: a node (0 is the root). Column: a node that it sees.
        seen = torch.eye(n, dtype=torch.bool)  # [n, n]
        for node, parent in enumerate(parents, 1):
            seen[node] |= seen[parent + 1]
        mask = torch.cat([torch.ones(n, past, dtype=torch.bool), seen], dim=1)  # [n, past + n]
        positions = past + seen.sum(dim=1) - 1  # [n], a node is as deep as it has ancestors
        return {
            "attention_mask": mask[None, None].to(self.model.device),
            "position_ids": positions[None].to(self.model.device),
        }

    def _check_takes_tree(self) -> None:
        """Raise EyasError if the target cannot take an attention mask and positions of a tree."""
        from transformers.cache_utils import DynamicLayer

        inputs = inspect.signature(self.model.forward).parameters
        full_attention = all(type(layer) is DynamicLayer for layer in self.cache.layers)
        uses_sdpa = self.model.config._attn_implementation == "sdpa"
        takes_mask = {"attention_mask", "position_ids"} <= set(inputs)
        if not (full_attention and uses_sdpa and takes_mask):
            raise EyasError(
                f"{type(self.model).__name__} can't verify a tree of drafts here: "
                "a tree needs its own attention mask and positions",
                "full attention in every layer (no sliding window), through sdpa",
                "use a chain: -p speculative_eagle_topk 1",
            )

    def roll_back(self, n_tok: int, keep: list[int]) -> None:
        """Keep only some of the last `n_tok` tokens in the cache, directly after those before them.

        keep: their indices among the last `n_tok`, ascending.
        """
        moved = [(target, source) for target, source in enumerate(keep) if target != source]
        if moved:
            targets, sources = map(list, zip(*moved))
            for layer in self.cache.layers:
                for tensor in (layer.keys, layer.values):  # [1, kv heads, length, head_dim]
                    last = tensor[:, :, -n_tok:]
                    last[:, :, targets] = last[:, :, sources]
        self.cache.crop(len(keep) - n_tok)

    def __enter__(self) -> "TargetStream":
        return self

    def __exit__(self, *_) -> None:
        for hook in self._hooks:
            hook.remove()


class Sampler:
    """Choose the target's tokens: the argmax at temperature 0, else draw them.

    The draws depend on `seed` only. They are made on the CPU and are the same for every device.
    """

    def __init__(self, temperature: float, seed: int):
        self.temperature = temperature
        self.generator = torch.Generator().manual_seed(seed)

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Return softmax(logits / temperature), [..., V] in float32 or wider, on the CPU."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return (wide / self.temperature).softmax(-1).cpu()

    def draw(self, weights: torch.Tensor) -> int:
        """Draw an index by weights [V], whose sum need not be 1."""
        return int(torch.multinomial(weights, 1, generator=self.generator))

    def uniform(self) -> float:
        """Draw a number between 0 and 1."""
        return float(torch.rand((), dtype=torch.float64, generator=self.generator))


class DraftMethod(Protocol):
    """Describe what `speculative_decode` needs of a drafting method."""

    boundaries: tuple[int, ...]  # whose states it reads; without any, `draft` is given None

    def start(self, prompt_ids: list[int], sampler: Sampler) -> None:
        """Forget the last prompt and start this one."""

    def draft(self, tokens: list[int], states: torch.Tensor | None) -> Draft:
        """Draft what may follow.

        tokens: token j+1 of each slot j that was committed since the last call; the first time of
        each slot of the prompt.
        states: the target's states of these slots, [n, B*H].
        """


@dataclass
class _Level:
    """Hold the candidates of one draft level, r * topk of them.

    r is the number of kept nodes whose children they are: 1 at the root, topk below it.
    """

    tokens: torch.Tensor  # [r * topk], target ids
    parents: torch.Tensor  # [r * topk], index among all candidates; -1 is the root
    confidence: torch.Tensor  # [r * topk], the drafter's probability
    scores: torch.Tensor  # [r * topk], product of the probabilities from the root


class EagleDraft:
    """Draft with an EAGLE-3 drafter and SGLang's dynamic tree (see the module's head).

    With `rejection_sampling` the chain is drawn from the drafter where the target's tokens are
    drawn. The settings have SGLang's names and the defaults of `Config`.
    Raise EyasError for a combination that SGLang refuses or changes, and for a topk above the draft
    vocabulary.
    """

    def __init__(
        self,
        drafter: Drafter,
        steps: int,
        topk: int = 1,
        draft_tokens: int = 0,
        rejection_sampling: bool = False,
    ):
        self.drafter = drafter
        self.steps = steps
        self.topk = topk
        self.rejection_sampling = rejection_sampling
        self.n_nodes = verified_tok(steps, topk, draft_tokens, rejection_sampling) - 1
        self.boundaries = drafter.config.boundaries
        if topk > drafter.config.draft_vocab_size:
            raise EyasError(
                f"speculative_eagle_topk = {topk}",
                f"at most the draft vocabulary, {drafter.config.draft_vocab_size} tokens",
            )

    def start(self, prompt_ids: list[int], sampler: Sampler) -> None:
        self.cache = DraftCache()
        self.sampler = sampler

    @torch.inference_mode()
    def draft(self, tokens: list[int], states: torch.Tensor) -> Draft:
        """Run the drafter over the new slots, then level by level over its own draft tokens.

        The cache keeps only the new slots.
        """
        out = self._extend_committed(tokens, states)  # [1, H]
        committed = self.cache.length
        levels, proposals = self._draft_levels(out)
        self.cache.truncate(committed)
        draft = self._select(levels)
        if proposals:
            draft.proposal = self._full_proposal(proposals, len(draft.tokens))
        return draft

    def _extend_committed(self, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
        """Run the drafter over the committed slots; return the last one's raw output, [1, H]."""
        weight = self.drafter.fc.weight
        ids = torch.tensor(tokens, device=weight.device)  # [n]
        hidden = self.drafter.fuse(states.to(weight.device, weight.dtype))  # [n, H]
        return self.drafter.extend(ids, hidden, self.cache)[-1:]

    def _draft_levels(self, out: torch.Tensor) -> tuple[list[_Level], list[torch.Tensor]]:
        """Return all candidates by level, and what they were drawn from, [1, D] a level.

        out: the drafter's raw output at the last committed slot, [1, H].
        """
        device = out.device
        topk = self.topk
        committed = self.cache.length
        vocab_ids = self.drafter.vocab.ids.to(device)  # [D]
        kept = torch.tensor([-1], device=device)  # [r], indices among all candidates
        scores = torch.ones(1, device=device)  # [r]
        seen = torch.ones(1, committed, dtype=torch.bool, device=device)  # [r, slots]
        levels: list[_Level] = []
        proposals: list[torch.Tensor] = []
        n_before = 0  # candidates of the levels before this one
        for depth in range(self.steps):
            ids, probs = self._children(out, proposals)  # [r, topk] each
            level = _Level(
                tokens=vocab_ids[ids.flatten()],
                parents=kept.repeat_interleave(topk),
                confidence=probs.flatten(),
                scores=(scores[:, None] * probs).flatten(),
            )
            levels.append(level)
            if depth == self.steps - 1:
                break
            chosen = level.scores.sort(descending=True, stable=True).indices[:topk]  # [topk]
            kept = chosen + n_before
            scores = level.scores[chosen]
            rows = chosen // topk  # [topk], the parent's row
            itself = torch.eye(topk, dtype=torch.bool, device=device)
            seen = torch.cat([seen[rows], itself], dim=1)  # [topk, committed + slots of this tree]
            positions = torch.full((topk,), committed + depth, device=device)
            hidden = self.drafter.feed_back(out)[rows]  # [topk, H]
            out = self.drafter.extend(
                level.tokens[chosen], hidden, self.cache, positions, seen
            )  # [topk, H]
            n_before += len(level.tokens)
        return levels, proposals

    def _children(
        self, out: torch.Tensor, proposals: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return draft ids and probabilities of each node's children, [r, topk] each.

        out: the drafter's raw output at each node, [r, H]. Where the children are drawn, the
        distribution is appended to `proposals`.
        """
        logits = self.drafter.logits(out)  # [r, D]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.rejection_sampling and self.sampler.temperature > 0:
            proposal = self.sampler.probs(logits)  # [1, D]
            proposals.append(proposal)
            ids = torch.tensor([[self.sampler.draw(proposal[0])]], device=out.device)
            return ids, proposal.to(out.device).gather(1, ids)
        best = logits.topk(self.topk, dim=-1)
        return best.indices, (best.values - logits.logsumexp(-1, keepdim=True)).exp()

    def _select(self, levels: list[_Level]) -> Draft:
        """Return the `n_nodes` candidates of best score, parents before children."""
        scores = torch.cat([level.scores for level in levels])
        # Stable: of equal scores the earlier candidate, a parent before its child. A node without
        # its parent could not be verified.
        ranked = scores.sort(descending=True, stable=True).indices
        best = ranked[: self.n_nodes].sort().values  # [n]
        tokens = torch.cat([level.tokens for level in levels])[best].tolist()
        parents = torch.cat([level.parents for level in levels])[best].tolist()
        confidence = torch.cat([level.confidence for level in levels])[best].tolist()
        index = {-1: -1} | {candidate: node for node, candidate in enumerate(best.tolist())}
        return Draft(tokens, [index[parent] for parent in parents], confidence)

    def _full_proposal(self, proposals: list[torch.Tensor], n: int) -> torch.Tensor:
        """Return the distributions of the draft tokens over the target vocabulary, [n, V]."""
        drafter = self.drafter
        full = torch.zeros(n, drafter.config.vocab_size, dtype=proposals[0].dtype)
        full[:, drafter.vocab.ids.cpu()] = torch.cat(proposals)
        return full


class ShuffledDraft(EagleDraft):
    """Draft with the same drafter and with shuffled states, as a floor.

    The states of all committed slots change places at random before every draft: one cycle through
    all slots, so none keeps its own, by the sampler's seed. The drafter still reads the true
    tokens. What it accepts owes nothing to the states.
    """

    def start(self, prompt_ids: list[int], sampler: Sampler) -> None:
        super().start(prompt_ids, sampler)
        # A generator of its own leaves the target's draws as they are.
        self._generator = torch.Generator().manual_seed(sampler.generator.initial_seed())
        self._tokens: list[int] = []
        self._states: list[torch.Tensor] = []

    def draft(self, tokens: list[int], states: torch.Tensor) -> Draft:
        self._tokens += tokens
        self._states.append(states)
        self.cache.truncate(0)
        order = torch.randperm(len(self._tokens), generator=self._generator).to(states.device)
        true_states = torch.cat(self._states)  # [slots, B*H]
        shuffled = torch.empty_like(true_states)
        shuffled[order] = true_states[order.roll(1)]
        return super().draft(self._tokens, shuffled)


class PromptLookup:
    """Draft without a model, from earlier text.

    The draft tokens are those that followed the longest earlier occurrence of the text's end (the
    latest of equally long ones): a chain of at most `steps`. There are none where the last token
    did not occur before.
    """

    boundaries = ()

    def __init__(self, steps: int):
        self.steps = steps

    def start(self, prompt_ids: list[int], sampler: Sampler) -> None:
        self._ids = prompt_ids[:1]

    def draft(self, tokens: list[int], states: None) -> Draft:
        self._ids += tokens
        match_end = self._longest_match()
        following = []
        if match_end is not None:
            following = self._ids[match_end + 1 :][: self.steps]
        n = len(following)
        return Draft(following, list(range(-1, n - 1)), [1.0 for _ in following])

    def _longest_match(self) -> int | None:
        """Return where the longest earlier n-gram ends that equals the text's last n tokens."""
        ids = np.array(self._ids)
        ends = np.flatnonzero(ids[:-1] == ids[-1])  # where a match of n tokens ends, n = 1
        n = 1
        longest = ends
        while len(ends):
            longest = ends
            ends = ends[ends >= n]
            ends = ends[ids[ends - n] == ids[len(ids) - 1 - n]]
            n += 1
        return longest[-1] if len(longest) else None


def end_ids(model) -> set[int]:
    """Return the token ids that end a response, as the model's generation settings say."""
    for config in (model.generation_config, model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return {eos} if isinstance(eos, int) else set(eos)
    return set()


def _top2(logits: torch.Tensor) -> list[tuple[float, float]]:
    return [tuple(pair) for pair in logits.topk(2).values.float().tolist()]


@torch.inference_mode()
def greedy_decode(model, prompt_ids: list[int], max_new_tok: int) -> Trace:
    """Decode greedily, one token a pass, through the same `TargetStream`.

    Speculative decoding is measured against it.
    """
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
    """Decode speculatively with any drafting method.

    At temperature 0 the text is that of `greedy_decode`; else tokens are drawn as the target's are,
    by `seed`.
    Raise EyasError if a draft branches and the target cannot verify one (sliding-window layers,
    another attention than sdpa).
    """
    ends = end_ids(model)
    sampler = Sampler(temperature, seed)
    start = time.perf_counter()
    with TargetStream(model, method.boundaries) as target:
        method.start(prompt_ids, sampler)
        logits, states = target.forward(prompt_ids, keep=1)
        _, token = _verify(Draft([], [], []), logits, sampler)
        trace = Trace([token], _top2(logits))
        # Token j+1 of every committed slot j that the method has not seen.
        fresh = [*prompt_ids[1:], token]
        now = time.perf_counter()
        trace.prefill_s = now - start
        while len(trace.tokens) < max_new_tok and trace.tokens[-1] not in ends:
            draft_start = now
            draft = method.draft(fresh, states)
            verify_start = time.perf_counter()
            n_tok = len(draft.tokens) + 1
            logits, states = target.forward(
                [trace.tokens[-1], *draft.tokens], keep=n_tok, parents=draft.parents
            )  # [n, V], [n, B*H]
            accepted, bonus = _verify(draft, logits, sampler)
            # Rows of the last token and of the accepted draft tokens.
            rows = [0, *(node + 1 for node in accepted)]
            target.roll_back(n_tok, rows)
            fresh = [*(draft.tokens[node] for node in accepted), bonus]
            states = states[rows] if states is not None else None
            n_new = _until_end(fresh, ends)
            trace.tokens += fresh[:n_new]
            trace.top2 += _top2(logits[rows[:n_new]])
            now = time.perf_counter()
            step_bonus = bonus if n_new > len(accepted) else None
            draft_s = verify_start - draft_start
            verify_s = now - verify_start
            trace.steps.append(_step(draft, accepted[:n_new], step_bonus, draft_s, verify_s))
    trace.tokens = trace.tokens[:max_new_tok]
    trace.top2 = trace.top2[:max_new_tok]
    trace.seconds = time.perf_counter() - start
    return trace


def _until_end(tokens: list[int], ends: set[int]) -> int:
    """Return how many tokens there are up to the first that ends the text, that one included."""
    for i, token in enumerate(tokens):
        if token in ends:
            return i + 1
    return len(tokens)


def _verify(draft: Draft, logits: torch.Tensor, sampler: Sampler) -> tuple[list[int], int]:
    """Return the accepted nodes, from the root on, and the target's own token after them.

    logits: [n + 1, V], those at the root first, then at each node.
    """
    if draft.proposal is not None:
        return _verify_drawn(draft, logits, sampler)
    argmax = logits.argmax(dim=-1).tolist() if sampler.temperature == 0 else None
    edges = zip(draft.parents, draft.tokens)
    children = {edge: node for node, edge in enumerate(edges)}
    accepted = []
    node = -1
    while True:
        if argmax is None:
            token = sampler.draw(sampler.probs(logits[node + 1]))
        else:
            token = argmax[node + 1]
        if (node, token) not in children:
            return accepted, token
        node = children[node, token]
        accepted.append(node)


def _verify_drawn(draft: Draft, logits: torch.Tensor, sampler: Sampler) -> tuple[list[int], int]:
    """Do what `_verify` does for a chain whose tokens were drawn from `proposal`."""
    for node, token in enumerate(draft.tokens):
        p = sampler.probs(logits[node])  # [V]
        q = draft.proposal[node]  # [V]
        if sampler.uniform() * q[token] >= p[token]:
            rest = (p - q).clamp(min=0)
            if rest.sum() == 0:  # p and q differ by rounding alone
                rest = p
            return list(range(node)), sampler.draw(rest)
    return list(range(len(draft.tokens))), sampler.draw(sampler.probs(logits[-1]))


def _step(
    draft: Draft, accepted: list[int], bonus: int | None, draft_s: float, verify_s: float
) -> Step:
    """Return the record of a verify step.

    Without a bonus token the text ended at the last accepted node. What was drafted behind that
    node is left out.
    """
    behind_end = set()
    for node, parent in enumerate(draft.parents):
        if parent in behind_end or (bonus is None and parent == accepted[-1]):
            behind_end.add(node)
    counted = [node for node in range(len(draft.tokens)) if node not in behind_end]
    index = {-1: -1} | {node: i for i, node in enumerate(counted)}
    return Step(
        tokens=[draft.tokens[node] for node in counted],
        parents=[index[draft.parents[node]] for node in counted],
        confidence=[draft.confidence[node] for node in counted],
        accepted=[index[node] for node in accepted],
        bonus=bonus,
        draft_s=draft_s,
        verify_s=verify_s,
    )


def response_start(loss_mask: np.ndarray) -> int:
    """Return the index of the first token of the last assistant turn.

    The prompt is everything before it, the turn's header included. loss_mask: bool [T].
    Raise EyasError if the mask is all zero or starts at token 0 (no prompt).
    """
    supervised = np.flatnonzero(loss_mask)
    if len(supervised) == 0:
        raise EyasError(
            "a sample without a supervised token", "a loss mask that selects the assistant's tokens"
        )
    before = np.flatnonzero(~loss_mask[: supervised[-1]])
    if len(before) == 0:
        raise EyasError(
            "a sample that starts with the response", "a prompt before the assistant's turn"
        )
    return int(before[-1]) + 1


def heldout_samples(config: Config, target: Target, prompts: PromptSet) -> list[Sample]:
    """Return the first `decode_prompts` held-out conversations in the seeded order, encoded.

    `extract` takes them in the same order, so a store's first held-out samples are these.
    """
    tokenizer = target.tokenizer()
    conversations = prompts.select("heldout", config.decode_prompts, config.seed)
    return [encode(c, tokenizer, config.max_length) for c in usable(conversations)]


def load_model(target: Target, dtype: torch.dtype, device: str):
    """Return the target as a Hugging Face causal LM that is ready to decode."""
    return target.causal_lm(dtype, attn_implementation="sdpa").to(device)
