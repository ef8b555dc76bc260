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
- the embedding's half of q, k and v is computed once for all steps: step s reads the row s further on;
- attention never leaves its sample, and its scores are never stored: each sample's keys of step 0 go through the fused kernel, whose log-sum-exp
  joins them with the slot's own keys (`Attention`);
- all steps share one head product and one teacher: the teacher of step s at a slot is the teacher of step 0 at the slot s further on;
- the loss makes its gradient in place of the logits, a few rows at a time (`HeadLoss`), so they pass through the cache and not the memory;
- norm, rotation and gate have their gradients written out: fewer passes over memory, and nothing kept that can be made again;
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
        """(which of the active slots of that step, rows of `last`): those whose following token is in the draft vocabulary."""
        rows = self.teachers[self.run > step] + step
        kept = self.labels[rows] >= 0
        return kept, rows[kept]

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


def slots_of(input_ids: torch.Tensor, loss_mask: torch.Tensor, vocab: DraftVocab, n_steps: int, mask_shift: int = 1) -> Slots:
    """`mask_shift`: slot j is supervised by loss_mask[j + mask_shift]; 0 is the common mistake, kept to be measured."""
    last = len(loss_mask) - 1
    active = loss_mask[mask_shift : last + mask_shift].nonzero().squeeze(1)  # token j+1 is there
    ends = (~loss_mask).nonzero().squeeze(1)  # the run of true values from j+shift on ends at the first false one behind it
    run = torch.cat([ends, torch.tensor([len(loss_mask)])])[torch.searchsorted(ends, active + mask_shift)] - (active + mask_shift)
    run = torch.minimum(run, last - active).clamp(max=n_steps)  # token j+1+s has to be there
    teaching = torch.zeros(last, dtype=torch.bool)
    for s in range(n_steps):
        teaching[active[run > s] + s] = True
    following = torch.cat([vocab.to_draft(input_ids[2:]), torch.tensor([-1])])  # [T-1], draft id of token j+2
    return Slots(active, run, teaching, following[teaching], int((active + run).max()) if len(active) else 0)


def pack(samples: list[tuple[str, dict]], boundaries: tuple[int, ...], vocab: DraftVocab, n_steps: int, dtype: torch.dtype, mask_shift: int = 1) -> Batch:
    """(id, sample as `Store.read` gives it, the last boundary being N) to one batch with states in `dtype`. Slots behind the last active one are left out."""
    spans, parts, start, taught = [], [], 0, 0
    for _, sample in samples:
        ids, states = sample["input_ids"], sample["states"]
        slots = slots_of(ids, sample["loss_mask"], vocab, n_steps, mask_shift)
        at = slots.teaching.cumsum(0) - 1 + taught
        parts.append((ids[1 : slots.n + 1], torch.arange(slots.n), torch.cat([states[b][: slots.n] for b in boundaries], dim=-1).to(dtype), slots.active + start,
                      slots.run, states[max(states)][1:][slots.teaching], at[slots.active], slots.labels))  # fmt: skip
        spans.append((start, start + slots.n))
        start, taught = start + slots.n, taught + len(slots.labels)
    return Batch([id for id, _ in samples], spans, *(torch.cat(column) for column in zip(*parts)))


# ---- the drafter over a pack


def unroll(drafter: Drafter, batch: Batch, n_steps: int, low: torch.dtype) -> list[torch.Tensor]:
    """The raw outputs [A_s, H] of every step at its active slots (those with run > s, in order), in the weights' dtype."""
    config, layer = drafter.config, drafter.layers[0]
    heads, mlp = layer.self_attn, layer.mlp
    h, q_size, kv_size = config.hidden_size, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    qkv = torch.cat([heads.q_proj.weight, heads.k_proj.weight, heads.v_proj.weight]).to(low)  # [q + 2 kv, 2H]
    of_embeds, of_hidden = qkv[:, :h].contiguous(), qkv[:, h:].contiguous()
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(low)  # [2 I, H]
    out_proj, down_proj = heads.o_proj.weight.to(low), mlp.down_proj.weight.to(low)
    cos, sin = rotary_tables(config, max(end - start for start, end in batch.spans) + n_steps, drafter.fc.weight)

    def rotated(x: torch.Tensor, positions: torch.Tensor, n: int) -> torch.Tensor:
        return Rotary.apply(x.unflatten(-1, (n, config.head_dim)), cos[positions], sin[positions])

    embeds = linear(Norm.apply(drafter.embed_tokens(batch.tokens).to(cos.dtype), layer.input_layernorm.weight, config.rms_norm_eps, low), of_embeds)  # [S, q + 2 kv]
    states = batch.states
    if drafter.fc_norm is not None:
        parts = states.to(cos.dtype).split(config.target_hidden_size, dim=-1)
        states = torch.cat([Norm.apply(part, norm.weight, config.rms_norm_eps, low) for part, norm in zip(parts, drafter.fc_norm)], dim=-1)
    hidden = linear(states.to(low), drafter.fc.weight.to(low)).to(cos.dtype)  # [S, H]; the residual stream keeps the precision of the weights
    x = Norm.apply(hidden, layer.hidden_norm.weight, config.rms_norm_eps, low)  # [S, H]
    keys, values = (linear(x, of_hidden[q_size:]) + embeds[:, q_size:]).split(kv_size, dim=-1)
    keys, values = rotated(keys, batch.positions, config.n_kv_heads), values.unflatten(-1, (config.n_kv_heads, -1)).to(cos.dtype)  # [S, kv heads, head_dim]
    x, hidden = x.index_select(0, batch.active), hidden.index_select(0, batch.active)
    slots, run, own, outs = batch.active, batch.run, [], []
    positions = batch.positions[slots]
    for s in range(n_steps):
        if s:
            kept = (run > s).nonzero().squeeze(1)
            slots, run, positions = slots[kept], run[kept], positions[kept]
            hidden = drafter.feed_back(outs[-1].index_select(0, kept))
            own = [tuple(t.index_select(0, kept) for t in pair) for pair in own]
            x = Norm.apply(hidden, layer.hidden_norm.weight, config.rms_norm_eps, low)
            q, k, v = (linear(x, of_hidden) + embeds.index_select(0, slots + s)).split([q_size, kv_size, kv_size], dim=-1)  # token j+1+s stands s rows further on
            own.append((rotated(k, positions + s, config.n_kv_heads), v.unflatten(-1, (config.n_kv_heads, -1)).to(cos.dtype)))
        else:
            q = linear(x, of_hidden[:q_size]) + embeds[:, :q_size].index_select(0, slots)
        attended = attend(rotated(q, positions + s, config.n_heads), slots, keys, values, own, batch.spans)  # [A_s, heads, head_dim]
        hidden = hidden + linear(attended.flatten(1).to(low), out_proj)
        x = Norm.apply(hidden, layer.post_attention_layernorm.weight, config.rms_norm_eps, low)
        outs.append(hidden + linear(SwiGLU.apply(linear(x, gate_up)), down_proj))
    return outs


def attend(queries, slots, keys, values, own, spans) -> torch.Tensor:
    """One softmax over the keys of step 0 up to the slot itself, within its sample, and the slot's own keys of the later steps.

    queries [A_s, heads, head_dim] of the slots [A_s]; keys, values [S, kv heads, head_dim]; own: a pair of [A_s, kv heads, head_dim] each
    step. Gives [A_s, heads, head_dim].
    """
    return Attention.apply(queries, keys, values, slots, spans, len(own), *(t for pair in own for t in pair))


class Attention(torch.autograd.Function):
    """`attend`, a sample at a time through the fused kernel. Its log-sum-exp is enough to join the slot's own keys, and, the other way, its gradient
    needs only the joint output and the joint log-sum-exp: each weight is exp(score - joint log-sum-exp), whichever part it belongs to."""

    @staticmethod
    def forward(ctx, queries, keys, values, slots, spans, n_own, *own):
        (n, n_heads, size), n_kv = queries.shape, keys.shape[1]
        scale = size**-0.5
        grouped = queries.unflatten(1, (n_kv, -1))  # [n, kv heads, group, head_dim]
        ends = torch.searchsorted(slots, torch.tensor([end for _, end in spans], device=slots.device)).tolist()
        cuts = list(zip([0, *ends], ends, spans))  # (first query, end of queries, rows of keys) of each sample
        out, log_sum = torch.empty_like(queries).unflatten(1, (n_kv, -1)), queries.new_empty(n, n_kv, n_heads // n_kv)
        for a, b, (start, end) in cuts:
            if a < b:
                q, mask = _by_head(grouped[a:b]), _causal(slots[a:b], start, end, n_heads // n_kv, queries.dtype)
                o, log = _kernel(q, keys[start:end].transpose(0, 1)[None], values[start:end].transpose(0, 1)[None], mask, scale)
                out[a:b], log_sum[a:b] = _by_slot(o, b - a), log[0].unflatten(1, (b - a, -1)).transpose(0, 1)
        if n_own:
            scores = torch.stack([(grouped * k[:, :, None]).sum(-1).mul_(scale) for k in own[::2]])  # [own, n, kv heads, group]
            joint = torch.logaddexp(log_sum, scores.logsumexp(0))
            out *= (log_sum - joint).exp_()[..., None]
            for weight, v in zip((scores - joint).exp_(), own[1::2]):
                out.addcmul_(weight[..., None], v[:, :, None])
            log_sum = joint
        ctx.save_for_backward(queries, keys, values, slots, out, log_sum, *own)
        ctx.cuts, ctx.scale = cuts, scale
        return out.flatten(1, 2)

    @staticmethod
    def backward(ctx, grad):
        queries, keys, values, slots, out, log_sum, *own = ctx.saved_tensors
        (_, n_heads, _), n_kv, scale = queries.shape, keys.shape[1], ctx.scale
        grouped, grad = queries.unflatten(1, (n_kv, -1)), grad.unflatten(1, (n_kv, -1))
        grad_q, grad_k, grad_v, grad_own = torch.empty_like(grouped), torch.zeros_like(keys), torch.zeros_like(values), []
        for a, b, (start, end) in ctx.cuts:
            if a < b:
                mask = _causal(slots[a:b], start, end, n_heads // n_kv, queries.dtype)
                log = log_sum[a:b].transpose(0, 1).flatten(1)[None].contiguous()
                parts = _kernel_backward(_by_head(grad[a:b]), _by_head(grouped[a:b]), keys[start:end].transpose(0, 1)[None],
                                         values[start:end].transpose(0, 1)[None], _by_head(out[a:b]), log, mask, scale)  # fmt: skip
                grad_q[a:b] = _by_slot(parts[0], b - a)
                grad_k[start:end], grad_v[start:end] = (part[0].transpose(0, 1) for part in parts[1:])
        delta = (grad * out).sum(-1) if own else None  # [n, kv heads, group]
        for k, v in zip(own[::2], own[1::2]):
            weight = ((grouped * k[:, :, None]).sum(-1).mul_(scale) - log_sum).exp_()
            grad_score = ((grad * v[:, :, None]).sum(-1) - delta).mul_(weight).mul_(scale)
            grad_q.addcmul_(grad_score[..., None], k[:, :, None])
            grad_own += [(grad_score[..., None] * grouped).sum(2), (weight[..., None] * grad).sum(2)]
        return grad_q.flatten(1, 2), grad_k, grad_v, None, None, None, *grad_own


def _kernel(q, k, v, mask, scale):
    """q [1, heads, n, d], k and v [1, heads, keys, d], mask [n, keys] -> output as q, log-sum-exp of the scores [1, heads, n]."""
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


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """[n, kv heads, group, d] -> [1, kv heads, n*group, d]: the heads that share keys become rows."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def _by_slot(x: torch.Tensor, n: int) -> torch.Tensor:
    return x[0].unflatten(1, (n, -1)).transpose(0, 1)


def _causal(slots: torch.Tensor, start: int, end: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    """[n*group, keys]: 0 where the key's slot is not behind the query's, -inf where it is."""
    mask = torch.zeros(len(slots), end - start, dtype=dtype, device=slots.device)
    return mask.masked_fill_(torch.arange(start, end, device=slots.device) > slots[:, None], -torch.inf).repeat_interleave(group, 0)


# ---- parts with their gradients written out


def filled(x: torch.Tensor) -> torch.Tensor:
    """[n, ...] with rows of zeros up to a multiple of ROWS where the number of rows costs a new kernel: bfloat16 on a CPU."""
    missing = -len(x) % ROWS if x.dtype == torch.bfloat16 and x.device.type == "cpu" else 0
    return F.pad(x, (0, 0, 0, missing)) if missing else x


class Linear(torch.autograd.Function):
    """x [n, in] by weight [out, in], both in the low dtype -> [n, out]."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.n, x = len(x), filled(x)
        ctx.save_for_backward(x, weight)
        return (x @ weight.T)[: ctx.n]

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = filled(grad)
        return (grad @ weight)[: ctx.n] if ctx.needs_input_grad[0] else None, grad.T @ x


linear = Linear.apply


class Norm(torch.autograd.Function):
    """RMSNorm of x [n, H], given back in `low`."""

    @staticmethod
    def forward(ctx, x, weight, eps, low):
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [n, 1]
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(low)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        grad, normed = grad.to(x.dtype), x * scale
        product = grad * normed
        dot = torch.mv(product, weight)[:, None].div_(-x.shape[-1])
        return (grad * weight).addcmul_(normed, dot).mul_(scale), product.sum(0), None, None


class Rotary(torch.autograd.Function):
    """RoPE in Llama's (neox) form of x [n, heads, head_dim] by tables [n, 1, head_dim / 2], in the tables' dtype."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _turn(x.to(cos.dtype), cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin).to(ctx.dtype), None, None


def rotary_tables(config, n: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of positions 0 .. n-1, [n, 1, head_dim / 2], in the dtype and on the device of `like`."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** -(torch.arange(half, dtype=like.dtype, device=like.device) / half)
    angles = torch.arange(n, dtype=like.dtype, device=like.device)[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    out = torch.empty_like(x)
    left, right = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=left).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=right).addcmul_(a, sin)
    return out


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up of [n, 2I], both halves in one tensor."""

    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
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


class HeadLoss(torch.autograd.Function):
    """Weighted sum over rows of the loss between teacher and softmax(x W^T); the gradient is made together with it.

    x [M, H]; weight [D, H]; teacher [A', D] probabilities, of which row m takes `rows[m]`; labels [M] draft ids; scale [M] weight of each row.
    Products are computed in `low`. Gives the weighted sum, the loss of each row [M], and whether each row's largest logit is
    its label's [M] (a tie counts).
    """

    @staticmethod
    def forward(ctx, x, weight, teacher, rows, labels, scale, loss: Loss, low):
        wide = weight.dtype
        losses, hits = torch.empty(len(x), dtype=wide, device=x.device), torch.empty(len(x), dtype=torch.bool, device=x.device)
        weight_low, x_low = weight.detach().to(low), filled(x.detach().to(low))
        learns = any(ctx.needs_input_grad)
        grad_x, grad_weight = (torch.zeros_like(x), torch.zeros_like(weight)) if learns else (None, None)
        for start in range(0, len(x), LOGIT_ROWS):
            chunk, n = slice(start, start + LOGIT_ROWS), min(LOGIT_ROWS, len(x) - start)
            logits = x_low[chunk] @ weight_low.T  # [rows, D]
            logits[n:] = 0  # filled up
            for at in range(0, n, PIECE_ROWS):
                piece, end = slice(start + at, start + min(at + PIECE_ROWS, n)), min(at + PIECE_ROWS, n)
                z, p = logits[at:end].to(wide), teacher[rows[piece]]
                hits[piece] = z.gather(1, labels[piece, None]).squeeze(1) >= z.amax(-1)
                losses[piece], gradient = loss.rows(z, p)
                if learns:
                    logits[at:end] = gradient.mul_(scale[piece, None])  # the gradient takes the logits' place
            if learns:
                grad_x[chunk] = (logits @ weight_low)[:n]
                grad_weight += logits.T @ x_low[chunk]
        if learns:
            ctx.save_for_backward(grad_x, grad_weight)
        ctx.mark_non_differentiable(losses, hits)
        return (losses * scale).sum(), losses, hits

    @staticmethod
    def backward(ctx, grad, *_):
        grad_x, grad_weight = ctx.saved_tensors
        return grad * grad_x, grad * grad_weight, None, None, None, None, None, None


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
    outs = unroll(drafter, batch, len(weights), teacher.rows.dtype)
    rows, kept, scale, slots = [], [], [], []
    for s, (out, weight) in enumerate(zip(outs, weights)):
        supervised, at = batch.supervised(s)
        rows.append(at)
        kept.append(out[supervised])
        slots.append(len(at))
        scale.append(out.new_full((len(at),), weight / max(counts[s] if counts else len(at), 1)))
    x = Norm.apply(torch.cat(kept), drafter.norm.weight, drafter.config.rms_norm_eps, drafter.norm.weight.dtype)  # [M, H]
    rows = torch.cat(rows)
    total, losses, hits = HeadLoss.apply(x, drafter.lm_head.weight, teacher(batch.last), rows, batch.labels[rows], torch.cat(scale), loss, teacher.rows.dtype)
    return Losses(total, [float(part.sum()) for part in losses.split(slots)], [int(part.sum()) for part in hits.split(slots)], slots)
