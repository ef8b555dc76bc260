"""Training-time test on packed samples: what the drafter computes in training, and the loss and its gradient.

Slot j takes hidden state j and token j+1 and predicts token j+2. Step s (0 .. K-1) at slot j is what serving does s drafts later: token
j+1+s, the output of step s-1 at slot j as hidden state, RoPE position j+s; it attends to the keys of step 0 of the slots up to j and to the
keys of steps 1..s of its own slot (EAGLE-3, arXiv 2503.01840, section 3). Step s of slot j is *active* iff loss_mask[j+1 .. j+1+s] are all
true, so the first drafted token of every turn is trained and no prompt is (the right shift; loss_mask[j], `mask_shift` 0, is off by one).

The teacher of step s at slot j is the target's distribution at position j+1+s: softmax of the stored last state through the copied final norm and
head. An active slot is *supervised* when the token that follows there, the target's own choice, is in the draft vocabulary. A step's loss is the
sum over its supervised slots divided by their number; the steps are weighted by step_decay**s, divided by the sum of these weights.

What makes it quick, all of it exact:
- samples are packed without padding; prompt slots are keys and values of step 0 and nothing else, the drafter having one layer;
- the whole gradient is written out (`Steps`, `TrainingTimeTest`): a weight's gradient is one product over the rows of all steps, nothing is kept that can
  be made again for less, and there is no graph of thousands of small nodes;
- the embedding's half of q, k and v is computed once for all steps, and once for each token that the pack has: half of them stand there again;
- attention never leaves its sample, and its scores are never stored: the keys of step 0 go through the fused kernel, a few samples of about the same
  length at a time, and its log-sum-exp joins them with the slot's own keys (`Attention`);
- all steps share one head product and one teacher: the teacher of step s at a slot is the teacher of step 0 at the slot s further on;
- the loss makes its gradient in place of the logits, a few rows at a time (`head_loss`), so they pass through the cache and not the memory;
- a CPU's bfloat16 products compile a kernel for every shape that they meet, which takes longer than the product: rows are filled up to round numbers.

Matrix products run in `low` (bfloat16, or the weights' own dtype), everything else in the weights' dtype, `wide`. Axes: T tokens of a sample,
S packed slots, A active slots of step 0, A_s of step s, M supervised slots of all steps, B boundaries, H hidden size, D draft vocabulary.
"""

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from eyas.drafter import Drafter
from eyas.losses import TINY, Loss
from eyas.target import Head
from eyas.vocab import DraftVocab

LOGIT_ROWS, PIECE_ROWS, ROWS = 1024, 64, 64  # rows of one head product; rows whose logits stay in the CPU's cache; what numbers of rows are rounded up to
FUSED_ON = ("cpu",)  # devices with the fused attention kernel that gives its log-sum-exp; plain products elsewhere


@dataclass(frozen=True)
class Batch:
    """Samples packed without padding. A slot's row here is its place in the pack; active slots are rows of step 0 that are supervised by the mask."""

    ids: list[str]
    spans: list[tuple[int, int]]  # rows of each sample
    tokens: torch.Tensor  # int64 [S], token j+1 of slot j
    positions: torch.Tensor  # int64 [S], j
    states: torch.Tensor  # [S, B*H], boundaries in ascending order
    active: torch.Tensor  # int64 [A], rows of the active slots of step 0, ascending
    run: torch.Tensor  # int64 [A], steps for which each is active: the run of true mask values from j+1 on, at most K
    last: torch.Tensor  # [A', H], the last states that teach
    teachers: torch.Tensor  # int64 [A], row of `last` that teaches step 0; step s is taught by the row s further on
    labels: torch.Tensor  # int64 [A'], draft id of the token behind each of `last`; -1: outside the draft vocabulary, or no such token

    def supervised(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(numbers of the active slots, rows of `last` that teach them): those active in that step whose following token is in the draft vocabulary."""
        kept = (self.run > step).nonzero().squeeze(1)
        rows = self.teachers[kept] + step
        taught = self.labels[rows] >= 0
        return kept[taught], rows[taught]

    def to(self, device: torch.device) -> "Batch":
        moved = (getattr(self, name).to(device) for name in ("tokens", "positions", "states", "active", "run", "last", "teachers", "labels"))
        return Batch(self.ids, self.spans, *moved)


@dataclass(frozen=True)
class Slots:
    """What token ids and loss mask of a sample say of its slots."""

    active: torch.Tensor  # int64 [A], slots j that are active in step 0
    run: torch.Tensor  # int64 [A], steps for which each is active, at most K
    teaching: torch.Tensor  # bool [T-1], by slot j: does any step learn from last state j+1?
    labels: torch.Tensor  # int64 [A'], draft id of token j+2 of the slots in `teaching`, or -1
    n: int  # rows that are read: slots up to the last active one and, for its later steps, the embeddings behind it

    def counts(self, n_steps: int) -> list[int]:
        """Supervised slots of each step."""
        at = self.teaching.cumsum(0) - 1
        return [int((self.labels[at[self.active[self.run > s] + s]] >= 0).sum()) for s in range(n_steps)]


def slots_of(input_ids: torch.Tensor, loss_mask: torch.Tensor, vocab: DraftVocab, n_steps: int, mask_shift: int = 1, share: slice = slice(None)) -> Slots:
    """`mask_shift`: slot j is supervised by loss_mask[j + mask_shift]; 0 is the common mistake, kept to be measured. `share`: of the active slots, in order."""
    last = len(loss_mask) - 1
    active = loss_mask[mask_shift : last + mask_shift].nonzero().squeeze(1)[share]  # token j+1 is there
    ends = (~loss_mask).nonzero().squeeze(1)  # the run of true values from j+shift on ends at the first false one behind it
    run = torch.cat([ends, torch.tensor([len(loss_mask)])])[torch.searchsorted(ends, active + mask_shift)] - (active + mask_shift)
    run = torch.minimum(run, last - active).clamp(max=n_steps)  # token j+1+s has to be there
    teaching = torch.zeros(last, dtype=torch.bool)
    for s in range(n_steps):
        teaching[active[run > s] + s] = True
    following = torch.cat([vocab.to_draft(input_ids[2:]), torch.tensor([-1])])  # [T-1], draft id of token j+2
    return Slots(active, run, teaching, following[teaching], int((active + run).max()) if len(active) else 0)


def pack(samples: list[tuple[str, dict]], boundaries: tuple[int, ...], vocab: DraftVocab, n_steps: int, dtype: torch.dtype, mask_shift: int = 1,
         shares: list[slice] | None = None) -> Batch:  # fmt: skip
    """(id, sample as `Store.read` gives it, the last boundary being N) to one batch with states in `dtype`. Slots behind the last active one are left out.

    `shares`: of each sample's active slots those that this batch learns from; the others are left to another batch, and nothing is lost or counted twice.
    """
    spans, parts, start, taught = [], [], 0, 0
    for (_, sample), share in zip(samples, shares or [slice(None)] * len(samples)):
        ids, states = sample["input_ids"], sample["states"]
        slots = slots_of(ids, sample["loss_mask"], vocab, n_steps, mask_shift, share)
        at = slots.teaching.cumsum(0) - 1 + taught
        parts.append((ids[1 : slots.n + 1], torch.arange(slots.n), torch.cat([states[b][: slots.n] for b in boundaries], dim=-1).to(dtype), slots.active + start,
                      slots.run, states[max(states)][1:][slots.teaching], at[slots.active], slots.labels))  # fmt: skip
        spans.append((start, start + slots.n))
        start, taught = start + slots.n, taught + len(slots.labels)
    return Batch([id for id, _ in samples], spans, *(torch.cat(column) for column in zip(*parts)))


# ---- the drafter over a pack, and its gradient


class Steps:
    """K steps of the drafter over a pack, forward, with all that `gradients` needs to go back.

    Every step has a row for each active slot of step 0, so that the weights' gradients are one product over all steps; what a row holds in a step in which
    its slot is not active any more is neither used nor supervised. `out` [K, A, H] are the raw outputs, `normed` [K, A, H] what the head reads.
    """

    def __init__(self, drafter: Drafter, batch: Batch, n_steps: int, low: torch.dtype):
        config, layer = drafter.config, drafter.layers[0]
        heads, mlp = layer.self_attn, layer.mlp
        self.drafter, self.config, self.batch, self.n_steps, self.low, self.eps = drafter, config, batch, n_steps, low, config.rms_norm_eps
        self.q_size, self.kv_size, h = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim, config.hidden_size
        qkv = torch.cat([heads.q_proj.weight, heads.k_proj.weight, heads.v_proj.weight]).to(low)  # [q + 2 kv, 2H]
        self.of_embeds, self.of_hidden = qkv[:, :h].contiguous(), qkv[:, h:].contiguous()
        self.gate_up, self.o, self.down = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(low), heads.o_proj.weight.to(low), mlp.down_proj.weight.to(low)
        self.fc, wide = drafter.fc.weight.to(low), drafter.fc.weight.dtype
        cos, sin = rotary_tables(config, max(end - start for start, end in batch.spans) + n_steps, drafter.fc.weight)
        self.turns = [(cos[at], sin[at]) for at in (batch.positions, *(batch.positions[batch.active] + s for s in range(n_steps)))]  # of all slots, then of the active ones by step
        tokens, self.token_rows = batch.tokens.unique(return_inverse=True)  # [U], and the row of each slot's token among them [S]
        self.rows = [self.token_rows[(batch.active + s).clamp_(max=len(batch.tokens) - 1)] for s in range(n_steps)]  # token j+1+s stands s slots further on

        self.embedded = drafter.embed_tokens(tokens).to(wide)  # [U, H]
        self.x_embeds, self.embeds_scale = norm(self.embedded, layer.input_layernorm.weight, self.eps, low)
        embeds = product(self.x_embeds, self.of_embeds)  # [U, q + 2 kv]
        self.states = batch.states.to(low)
        if drafter.fc_norm is not None:
            self.parts = batch.states.to(wide).split(config.target_hidden_size, dim=-1)
            normed, self.parts_scale = zip(*(norm(part, each.weight, self.eps, low) for part, each in zip(self.parts, drafter.fc_norm)))
            self.states = torch.cat(normed, dim=-1)
        self.fused = product(self.states, self.fc).to(wide)  # [S, H]; the residual stream keeps the precision of the weights
        self.x_fused, self.fused_scale = norm(self.fused, layer.hidden_norm.weight, self.eps, low)
        keys, values = (product(self.x_fused, self.of_hidden[self.q_size :]) + embeds[:, self.q_size :].index_select(0, self.token_rows)).split(self.kv_size, dim=-1)
        self.attention = Attention(batch, self._turned(keys, 0), self._by_kv(values).to(wide), self.q_size // self.kv_size)

        self.x, self.scale, self.hidden, self.q, self.own_k, self.own_v, self.attended, self.log_sum = [], [], [], [], [], [], [], []
        self.middle, self.middle_scale, self.y, self.gates, self.gated, self.out, self.out_scale, self.normed = [], [], [], [], [], [], [], []
        for s in range(n_steps):
            if s:
                hidden = self.normed[-1] if config.norm_output else self.out[-1]
                x, scale = norm(hidden, layer.hidden_norm.weight, self.eps, low)
                q, k, v = (product(x, self.of_hidden) + embeds.index_select(0, self.rows[s])).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
                self.own_k.append(self._turned(k, s + 1))
                self.own_v.append(self._by_kv(v).to(wide))
            else:
                hidden, x, scale = (t.index_select(0, batch.active) for t in (self.fused, self.x_fused, self.fused_scale))
                q = product(x, self.of_hidden[: self.q_size]) + embeds[:, : self.q_size].index_select(0, self.rows[0])
            q = self._turned(q, s + 1).unflatten(1, (config.n_kv_heads, -1))  # [A, kv heads, group, head_dim]
            attended, log_sum = self._attend(q)
            middle = hidden + product(attended.flatten(1).to(low), self.o)
            y, middle_scale = norm(middle, layer.post_attention_layernorm.weight, self.eps, low)
            gates = product(y, self.gate_up)
            gated = swiglu(gates)
            out = middle + product(gated, self.down)
            normed, out_scale = norm(out, drafter.norm.weight, self.eps, wide)
            for name, value in (("x", x), ("scale", scale), ("hidden", hidden), ("q", q), ("attended", attended), ("log_sum", log_sum), ("middle", middle), ("middle_scale", middle_scale),
                                ("y", y), ("gates", gates), ("gated", gated), ("out", out), ("out_scale", out_scale), ("normed", normed)):  # fmt: skip
                getattr(self, name).append(value)

    def _by_kv(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.config.n_kv_heads, -1))

    def _turned(self, x: torch.Tensor, at: int) -> torch.Tensor:
        """[n, heads * head_dim] -> [n, heads, head_dim] in the weights' dtype, rotated by the positions of `turns[at]`."""
        cos, sin = self.turns[at]
        return turn(x.unflatten(-1, (-1, self.config.head_dim)).to(cos.dtype), cos, sin)

    def _turned_back(self, grad: torch.Tensor, at: int) -> torch.Tensor:
        cos, sin = self.turns[at]
        return turn(grad, cos, -sin).flatten(1).to(self.low)

    def _attend(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One softmax over the keys of step 0 up to the slot itself, within its sample, and the slot's own keys of the later steps so far; and its log-sum-exp.

        The log-sum-exp of the keys of step 0 is enough to join the others; the other way each weight is exp(score - joint log-sum-exp), whichever part it belongs to.
        """
        out, log_sum = self.attention(q)
        if self.own_k:
            scores = torch.stack([self._scores(q, k) for k in self.own_k])  # [own, A, kv heads, group]
            joint = torch.logaddexp(log_sum, scores.logsumexp(0))
            out *= (log_sum - joint).exp_()[..., None]
            for weight, v in zip((scores - joint).exp_(), self.own_v):
                out.addcmul_(weight[..., None], v[:, :, None])
            log_sum = joint
        return out, log_sum

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vecdot(q, k[:, :, None]).mul_(self.attention.scale)

    def gradients(self, grad_normed: torch.Tensor) -> dict[str, torch.Tensor]:
        """By the name of each trained weight but the head's, from the gradient by `normed` [K, A, H]."""
        config, drafter, layer, batch, low = self.config, self.drafter, self.drafter.layers[0], self.batch, self.low
        norms = {name: torch.zeros_like(weight) for name, weight in (
            ("norm", drafter.norm.weight), ("layers.0.post_attention_layernorm", layer.post_attention_layernorm.weight), ("layers.0.hidden_norm", layer.hidden_norm.weight))}  # fmt: skip

        def through(name: str, weight, grad, x, scale):
            grad_x, grad_weight = norm_gradient(grad, x, weight, scale)
            norms[name] += grad_weight
            return grad_x

        by_embeds = torch.zeros(len(self.embedded), self.q_size + 2 * self.kv_size, dtype=drafter.fc.weight.dtype, device=batch.states.device)
        by_own = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in zip(self.own_k, self.own_v)]
        by_out, by_gates, by_middle, by_q, by_kv, by_raw = [], [], [], [], [], None  # of all steps, the last one first; by_raw: of the outputs themselves, from the step behind
        for s in reversed(range(self.n_steps)):
            grad = through("norm", drafter.norm.weight, grad_normed[s], self.out[s], self.out_scale[s])
            if by_raw is not None:
                grad += by_raw
            by_out.append(grad.to(low))
            by_gates.append(swiglu_gradient(product(by_out[-1], self.down.T), self.gates[s]))
            grad = grad + through("layers.0.post_attention_layernorm", layer.post_attention_layernorm.weight, product(by_gates[-1], self.gate_up.T), self.middle[s], self.middle_scale[s])
            by_middle.append(grad.to(low))
            grad_q = self._attention_gradient(s, product(by_middle[-1], self.o.T).to(grad.dtype), by_own)
            by_q.append(self._turned_back(grad_q, s + 1))
            by_embeds[:, : self.q_size].index_add_(0, self.rows[s], by_q[-1].to(by_embeds.dtype))
            if s == 0:
                break
            by_kv.append(torch.cat([self._turned_back(by_own[s - 1][0], s + 1), by_own[s - 1][1].flatten(1).to(low)], dim=-1))
            by_embeds[:, self.q_size :].index_add_(0, self.rows[s], by_kv[-1].to(by_embeds.dtype))
            by_x = product(torch.cat([by_q[-1], by_kv[-1]], dim=-1), self.of_hidden.T)
            grad = grad + through("layers.0.hidden_norm", layer.hidden_norm.weight, by_x, self.hidden[s], self.scale[s])
            if config.norm_output:
                grad_normed[s - 1] += grad
            else:
                by_raw = grad
        by_k, by_v = self.attention.key_gradients()
        by_kv.append(torch.cat([self._turned_back(by_k, 0), by_v.flatten(1).to(low)], dim=-1))  # [S, 2 kv]
        by_embeds[:, self.q_size :].index_add_(0, self.token_rows, by_kv[-1].to(by_embeds.dtype))
        by_x = product(by_kv[-1], self.of_hidden[self.q_size :].T)  # [S, H]
        by_x.index_add_(0, batch.active, product(by_q[-1], self.of_hidden[: self.q_size].T))
        by_fused = through("layers.0.hidden_norm", layer.hidden_norm.weight, by_x, self.fused, self.fused_scale)
        by_fused.index_add_(0, batch.active, grad)
        by_fused, by_embeds = by_fused.to(low), by_embeds.to(low)

        found = {f"{name}.weight": grad for name, grad in norms.items()}
        found["fc.weight"] = weight_product([by_fused], [self.states])
        if drafter.fc_norm is not None:
            for i, (grad, part, each, scale) in enumerate(zip(product(by_fused, self.fc.T).split(config.target_hidden_size, dim=-1), self.parts, drafter.fc_norm, self.parts_scale)):
                found[f"fc_norm.{i}.weight"] = norm_gradient(grad, part, each.weight, scale)[1]
        found["layers.0.input_layernorm.weight"] = norm_gradient(product(by_embeds, self.of_embeds.T), self.embedded, layer.input_layernorm.weight, self.embeds_scale)[1]
        of_q, of_kv = weight_product(by_q[::-1], self.x), weight_product(by_kv[::-1], [self.x_fused, *self.x[1:]])
        of_embeds = weight_product([by_embeds], [self.x_embeds])
        for name, embeds_part, hidden_part in zip("qkv", of_embeds.split([self.q_size, self.kv_size, self.kv_size]), (of_q, *of_kv.split(self.kv_size))):
            found[f"layers.0.self_attn.{name}_proj.weight"] = torch.cat([embeds_part, hidden_part], dim=1)
        found["layers.0.self_attn.o_proj.weight"] = weight_product(by_middle[::-1], [attended.flatten(1).to(low) for attended in self.attended])
        found["layers.0.mlp.gate_proj.weight"], found["layers.0.mlp.up_proj.weight"] = weight_product(by_gates[::-1], self.y).chunk(2)
        found["layers.0.mlp.down_proj.weight"] = weight_product(by_out[::-1], self.gated)
        wide = drafter.fc.weight.dtype
        return {name: grad.to(wide) for name, grad in found.items()}

    def _attention_gradient(self, s: int, grad: torch.Tensor, by_own: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """[A, heads * head_dim] by the output of step s -> [A, heads, head_dim] by its queries; the gradients of the slots' own keys and values are added to `by_own`."""
        q, out, log_sum = self.q[s], self.attended[s], self.log_sum[s]
        grad = grad.view_as(out)
        grad_q = self.attention.gradient(grad, q, out, log_sum)
        delta = torch.linalg.vecdot(grad, out) if s else None  # [A, kv heads, group]
        for k, v, (grad_k, grad_v) in zip(self.own_k[:s], self.own_v, by_own):
            weight = (self._scores(q, k) - log_sum).exp_()
            grad_score = (torch.linalg.vecdot(grad, v[:, :, None]) - delta).mul_(weight).mul_(self.attention.scale)
            grad_q.addcmul_(grad_score[..., None], k[:, :, None])
            grad_k += (grad_score[..., None] * q).sum(2)
            grad_v += (weight[..., None] * grad).sum(2)
        return grad_q.flatten(1, 2)


class Attention:
    """Causal attention of the active slots over the keys of step 0, within each sample, for all steps of a pack.

    Samples of about the same length go through the kernel together, padded to the longest of them; heads that share keys are rows of one head.
    keys, values [S, kv heads, head_dim].
    """

    def __init__(self, batch: Batch, keys: torch.Tensor, values: torch.Tensor, group: int):
        self.group, self.scale, self.like, self.parts = group, keys.shape[-1] ** -0.5, keys, []
        device = keys.device
        ends = torch.searchsorted(batch.active, torch.tensor([end for _, end in batch.spans], device=device)).tolist()
        spans = sorted((start - end, start, end, a, b) for (start, end), a, b in zip(batch.spans, [0, *ends], ends) if a < b)  # the longest first
        while spans:
            together = [span for span in spans if 2 * span[0] <= spans[0][0]]  # at least half as long as the longest
            spans = spans[len(together) :]
            longest, most = -together[0][0], max(b - a for *_, a, b in together)
            key_rows, key_places = _places([(start, end) for _, start, end, _, _ in together], longest, device)
            rows, places = _places([(a, b) for *_, a, b in together], most, device)
            starts = torch.tensor([start for _, start, *_ in together], device=device)
            seen = torch.full((len(together) * most,), longest, device=device).index_copy_(0, places, batch.active[rows] - starts[places // most])  # place of its own key
            mask = torch.zeros(len(together), 1, most * group, longest, dtype=keys.dtype, device=device)
            mask.masked_fill_(torch.arange(longest, device=device) > seen.repeat_interleave(group).view(len(together), 1, -1, 1), -torch.inf)
            size = (len(together), longest)
            k, v = (_spread(x, key_rows, key_places, size).transpose(1, 2) for x in (keys, values))  # [samples, kv heads, longest, head_dim]
            self.parts.append(Part(rows, places, (len(together), most), key_rows, key_places, k, v, mask, []))

    def __call__(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [A, kv heads, group, head_dim] -> output as q, log-sum-exp of the scores [A, kv heads, group]."""
        out, log_sum = torch.empty_like(q), q.new_empty(q.shape[:-1])
        for part in self.parts:
            o, log = _kernel(self._by_head(q, part), part.keys, part.values, part.mask, self.scale)
            out.index_copy_(0, part.rows, self._by_slot(o, part))
            log_sum.index_copy_(0, part.rows, self._by_slot(log[..., None], part)[..., 0])
        return out, log_sum

    def gradient(self, grad, q, out, log_sum) -> torch.Tensor:
        """By q, from an output and a log-sum-exp that may have come from more keys than these; the keys' own gradients are kept."""
        grad_q = torch.empty_like(q)
        for part in self.parts:
            log = self._by_head(log_sum[..., None], part)[..., 0].contiguous()
            by_q, *by_keys = _kernel_backward(self._by_head(grad, part), self._by_head(q, part), part.keys, part.values, self._by_head(out, part), log, part.mask, self.scale)
            grad_q.index_copy_(0, part.rows, self._by_slot(by_q, part))
            if part.gradients:
                for total, more in zip(part.gradients, by_keys):
                    total += more
            else:
                part.gradients.extend(by_keys)
        return grad_q

    def key_gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """By keys and values, [S, kv heads, head_dim] each, of all steps that were asked for."""
        found = torch.zeros_like(self.like), torch.zeros_like(self.like)
        for part in self.parts:
            for total, grad in zip(found, part.gradients):
                total.index_copy_(0, part.key_rows, grad.transpose(1, 2).flatten(0, 1).index_select(0, part.key_places))
        return found

    def _by_head(self, x: torch.Tensor, part: "Part") -> torch.Tensor:
        """[A, kv heads, group, d] -> [samples, kv heads, most * group, d]."""
        return _spread(x, part.rows, part.places, part.size).transpose(1, 2).flatten(2, 3)

    def _by_slot(self, x: torch.Tensor, part: "Part") -> torch.Tensor:
        """[samples, kv heads, most * group, d] -> [slots of the part, kv heads, group, d]."""
        return x.unflatten(2, (-1, self.group)).transpose(1, 2).flatten(0, 1).index_select(0, part.places)


@dataclass(frozen=True)
class Part:
    """Samples that go through the attention kernel together."""

    rows: torch.Tensor  # active slots, by their number
    places: torch.Tensor  # where each stands when all samples are padded
    size: tuple[int, int]  # samples, and slots of each when padded
    key_rows: torch.Tensor
    key_places: torch.Tensor
    keys: torch.Tensor  # [samples, kv heads, keys when padded, head_dim]
    values: torch.Tensor
    mask: torch.Tensor  # [samples, 1, rows, keys], -inf where a key is behind the slot, or padding
    gradients: list[torch.Tensor]  # by keys and values, once there are some


def _places(spans: list[tuple[int, int]], longest: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of all spans, their places when each span is padded to `longest`)."""
    rows = torch.cat([torch.arange(start, end) for start, end in spans])
    places = torch.cat([torch.arange(end - start) + n * longest for n, (start, end) in enumerate(spans)])
    return rows.to(device), places.to(device)


def _spread(x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Rows of x [n, ...] to their places, zeros elsewhere: [*size, ...]."""
    return x.new_zeros(size[0] * size[1], *x.shape[1:]).index_copy_(0, places, x.index_select(0, rows)).unflatten(0, size)


def _kernel(q, k, v, mask, scale):
    """q [samples, heads, n, d], k and v [samples, heads, keys, d], mask [samples, 1, n, keys] -> output as q, log-sum-exp of the scores [samples, heads, n]."""
    if q.device.type in FUSED_ON:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    scores = (q @ k.transpose(-1, -2)).mul_(scale).add_(mask)
    log = scores.logsumexp(-1)
    return (scores - log[..., None]).exp_() @ v, log


def _kernel_backward(grad, q, k, v, out, log, mask, scale):
    """Gradients of q, k and v, from an output and a log-sum-exp that may have come from more keys than these."""
    if q.device.type in FUSED_ON:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, log, 0.0, False, attn_mask=mask, scale=scale)
    weights = (q @ k.transpose(-1, -2)).mul_(scale).add_(mask).sub_(log[..., None]).exp_()
    grad_scores = (grad @ v.transpose(-1, -2)).sub_((grad * out).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
    return grad_scores @ k, grad_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad


# ---- parts, each with its gradient


def filled(x: torch.Tensor) -> torch.Tensor:
    """[n, ...] with rows of zeros up to a multiple of ROWS where the number of rows costs a new kernel: bfloat16 on a CPU."""
    missing = -len(x) % ROWS if x.dtype == torch.bfloat16 and x.device.type == "cpu" else 0
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [n, in] by weight [out, in] -> [n, out]. The gradient by x is the product with the weight turned."""
    return (filled(x) @ weight.T)[: len(x)]


def weight_product(grads: list[torch.Tensor], xs: list[torch.Tensor]) -> torch.Tensor:
    """The gradient [out, in] of a weight over all its rows: [n, out] and [n, in] of each part."""
    grad, x = (filled(torch.cat(parts) if len(parts) > 1 else parts[0]) for parts in (grads, xs))
    return grad.T @ x


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, low: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of x [n, H] in `low`, and what x was multiplied by, [n, 1]."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight).to(low), scale


def norm_gradient(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(by x, by weight) of `norm`."""
    grad, normed = grad.to(x.dtype), x * scale
    along = grad * normed
    dot = torch.mv(along, weight)[:, None].div_(-x.shape[-1])
    return (grad * weight).addcmul_(normed, dot).mul_(scale), along.sum(0)


def rotary_tables(config, n: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of positions 0 .. n-1, [n, 1, head_dim / 2], in the dtype and on the device of `like`."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** -(torch.arange(half, dtype=like.dtype, device=like.device) / half)
    angles = torch.arange(n, dtype=like.dtype, device=like.device)[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE in Llama's (neox) form of x [n, heads, head_dim] by tables [n, 1, head_dim / 2]; with -sin its gradient."""
    a, b = x.chunk(2, dim=-1)
    out = torch.empty_like(x)
    left, right = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=left).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=right).addcmul_(a, sin)
    return out


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [n, 2I], both halves in one tensor."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_gradient(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty_like(gate_up)
    of_gate, of_up = out.chunk(2, dim=-1)
    of_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
    torch.mul(F.silu(gate), grad, out=of_up)
    return out


# ---- teacher and loss


class Teacher:
    """The target's distribution over the draft vocabulary from its last state: the copied final norm, and rows of the copied head."""

    def __init__(self, head: Head, vocab: DraftVocab, dtype: torch.dtype, whole_vocab: bool = False):
        self.rows = head.lm_head[vocab.ids].to(dtype)  # [D, H]
        self.others = head.lm_head[~vocab.t2d].to(dtype) if whole_vocab else None  # [V - D, H], for the normaliser
        self.normed = dataclasses.replace(head, lm_head=head.lm_head[:0]).normed  # without the rest of the head, which is large

    @torch.no_grad()
    def __call__(self, last: torch.Tensor) -> torch.Tensor:
        """[A', H] as stored -> probabilities [A', D] of the draft vocabulary's tokens, which sum to 1, or, over the whole vocabulary, to at most 1.

        In float32 (float64 for float64 weights), whatever the products' dtype."""
        normed = self.normed(last).to(self.rows.dtype)
        logits = (filled(normed) @ self.rows.T)[: len(last)]
        probabilities = torch.empty_like(logits, dtype=torch.promote_types(logits.dtype, torch.float32))
        for start in range(0, len(logits), PIECE_ROWS):
            piece, out = slice(start, start + PIECE_ROWS), probabilities[start : start + PIECE_ROWS]
            out.copy_(logits[piece])
            if self.others is None:
                torch.softmax(out, -1, out=out)  # a row's maximum and sum are known before any of it is written
            else:
                rest = (filled(normed[piece]) @ self.others.T)[: len(out)].to(out.dtype).logsumexp(-1)
                out.sub_(torch.logaddexp(out.logsumexp(-1), rest)[:, None]).exp_()
            F.threshold_(out, TINY, 0.0)
        return probabilities


@torch.no_grad()
def head_loss(x, weight, teacher, rows, labels, scale, loss: Loss, low, learns: bool):
    """Weighted sum over rows of the loss between teacher and softmax(x W^T), its gradient being made together with it.

    x [M, H]; weight [D, H]; teacher [A', D] probabilities, of which row m takes `rows[m]`; labels [M] draft ids; scale [M] weight of each row.
    Products are computed in `low`. Gives the loss of each row [M], whether each row's largest logit is its label's [M] (a tie counts), and, where
    it `learns`, the gradients of the weighted sum by x and weight (None otherwise).
    """
    losses, hits = torch.empty(len(x), dtype=weight.dtype, device=x.device), torch.empty(len(x), dtype=torch.bool, device=x.device)
    weight_low, x_low = weight.to(low), filled(x.to(low))
    grad_x, grad_weight = (torch.empty_like(x), None) if learns else (None, None)
    for start in range(0, len(x), LOGIT_ROWS):
        chunk, n = slice(start, start + LOGIT_ROWS), min(LOGIT_ROWS, len(x) - start)
        logits = x_low[chunk] @ weight_low.T  # [rows, D]
        logits[n:] = 0  # filled up
        for at in range(0, n, PIECE_ROWS):
            piece, end = slice(start + at, start + min(at + PIECE_ROWS, n)), min(at + PIECE_ROWS, n)
            z, p = logits[at:end].to(weight.dtype), teacher[rows[piece]]
            hits[piece] = z.gather(1, labels[piece, None]).squeeze(1) >= z.amax(-1)
            losses[piece], gradient = loss.rows(z, p)
            if learns:
                torch.mul(gradient, scale[piece, None], out=gradient)
                logits[at:end] = gradient  # the gradient takes the logits' place
        if learns:
            grad_x[chunk] = (logits @ weight_low)[:n]
            part = logits.T @ x_low[chunk]
            grad_weight = part.to(weight.dtype) if grad_weight is None else grad_weight.add_(part)
    return losses, hits, grad_x, grad_weight if grad_weight is not None or not learns else torch.zeros_like(weight)


@dataclass(frozen=True)
class Losses:
    """total: the scalar to minimise; the others are sums by draft step [K], over `slots` supervised slots."""

    total: torch.Tensor
    loss: list[float]
    hits: list[int]
    slots: list[int]


def step_weights(n_steps: int, decay: float) -> list[float]:
    """decay**s, divided by their sum."""
    return [decay**s / sum(decay**i for i in range(n_steps)) for s in range(n_steps)]


def batch_loss(drafter: Drafter, batch: Batch, teacher: Teacher, loss: Loss, weights: list[float], counts: list[int] | None = None) -> Losses:
    """Loss over K = len(weights) steps of a pack; step s counts weights[s] / counts[s] for each of its supervised slots.

    `counts`: what each step's sum is divided by, where the pack is a part of what an optimiser step sees; its own supervised slots otherwise.
    """
    names, trained = zip(*((name, p) for name, p in drafter.named_parameters() if p.requires_grad))
    total, *sums = TrainingTimeTest.apply(drafter, batch, teacher, loss, weights, counts, names, torch.is_grad_enabled(), *trained)
    return Losses(total, *(part.tolist() for part in sums))


class TrainingTimeTest(torch.autograd.Function):
    """`batch_loss` as one function of the trained weights: its gradients are made with it, since nothing that comes later could change them but a factor."""

    @staticmethod
    def forward(ctx, drafter, batch, teacher, loss, weights, counts, names, learns, *trained):
        low, n_steps, active, device = teacher.rows.dtype, len(weights), len(batch.active), batch.states.device
        steps = Steps(drafter, batch, n_steps, low)
        supervised, rows, slots = [], [], []
        for s in range(n_steps):
            kept, at = batch.supervised(s)
            supervised.append(kept + s * active)
            rows.append(at)
            slots.append(len(at))
        supervised, rows = torch.cat(supervised), torch.cat(rows)
        scale = torch.tensor([w / max(n, 1) for w, n in zip(weights, counts or slots)], dtype=drafter.norm.weight.dtype, device=device).repeat_interleave(torch.tensor(slots, device=device))
        x = torch.stack(steps.normed).flatten(0, 1).index_select(0, supervised)  # [M, H]
        learns = learns and any(ctx.needs_input_grad)  # these are told whether the weights could have one, not whether one is wanted
        losses, hits, grad_x, grad_weight = head_loss(x, drafter.lm_head.weight, teacher(batch.last), rows, batch.labels[rows], scale, loss, low, learns)
        if learns:
            by_normed = x.new_zeros(n_steps * active, x.shape[1]).index_copy_(0, supervised, grad_x)
            found = steps.gradients(by_normed.unflatten(0, (n_steps, active))) | {"lm_head.weight": grad_weight}
            ctx.found = [found[name] for name in names]
        sums = torch.stack([part.sum() for part in losses.split(slots)]), torch.stack([part.sum() for part in hits.split(slots)]), torch.tensor(slots)
        ctx.mark_non_differentiable(*sums)
        return (losses * scale).sum(), *sums

    @staticmethod
    def backward(ctx, grad, *_):
        found, ctx.found = ctx.found, None
        if float(grad) != 1.0:
            found = [each.mul_(grad) for each in found]
        return None, None, None, None, None, None, None, None, *found
