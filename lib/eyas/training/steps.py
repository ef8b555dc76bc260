"""K draft steps over a pack, and the gradient of all trained weights, written by hand.

`eyas.models.drafter` defines what a drafter computes. Here is the same layer, arranged for speed:
the whole pack at once, matrix products in `low`, and no graph of small operators.
`tests/test_forward.py` proves that losses and gradients equal those of autograd over `Drafter`.
What this pass does not know is listed in `eyas.training.ttt.SLOW_PARTS`.

Axes: S packed slots, U distinct tokens of the pack, A active slots of step 0, K draft steps, H
hidden size, B boundaries.
"""

from dataclasses import dataclass

import torch

from eyas.models.drafter import Drafter, apply_rope, rms_norm
from eyas.training.attention import PackedAttention
from eyas.training.batch import Batch
from eyas.training.operators import (
    norm_gradient,
    product,
    swiglu,
    swiglu_gradient,
    weight_product,
)


@dataclass(frozen=True)
class StepActivations:
    """What one draft step keeps for its gradient; a row for each active slot of step 0."""

    hidden: torch.Tensor  # [A, H], the residual stream that enters the layer
    x: torch.Tensor  # [A, H], it after hidden_norm
    x_scale: torch.Tensor  # [A, 1], the factor of that norm
    q: torch.Tensor  # [A, kv heads, group, head_dim], rotated
    attended: torch.Tensor  # as q
    log_sum: torch.Tensor  # [A, kv heads, group], log-sum-exp of all scores
    middle: torch.Tensor  # [A, H], the residual stream after attention
    middle_scale: torch.Tensor  # [A, 1]
    y: torch.Tensor  # [A, H], it after post_attention_layernorm
    gates: torch.Tensor  # [A, 2I]
    gated: torch.Tensor  # [A, I]
    out: torch.Tensor  # [A, H], the raw output
    out_scale: torch.Tensor  # [A, 1]
    normed: torch.Tensor  # [A, H], what the head reads


class Steps:
    """K steps of the drafter over a pack, with all that `gradients` needs.

    Every step has a row for each active slot of step 0, so that a weight's gradient is one product
    over all steps. A row of a slot that is not active any more is neither used nor supervised.
    """

    def __init__(self, drafter: Drafter, batch: Batch, n_steps: int, low: torch.dtype):
        self.drafter = drafter
        self.batch = batch
        self.low = low
        self.n_steps = n_steps
        self.config = drafter.config
        self.layer = drafter.layers[0]
        self.wide = drafter.fc.weight.dtype
        self.q_size = self.config.n_heads * self.config.head_dim
        self.kv_size = self.config.n_kv_heads * self.config.head_dim
        self._cast_weights()
        self._prepare_rope()
        self._embed()
        self._fuse()
        self._prepare_keys()
        self.own_k: list[torch.Tensor] = []  # of steps 1 .., [A, kv heads, head_dim] each
        self.own_v: list[torch.Tensor] = []
        self.steps: list[StepActivations] = []
        for s in range(n_steps):
            self.steps.append(self._run_step(s))
        del self.embeds_qkv  # large, and the way back does not need it

    @property
    def out(self) -> list[torch.Tensor]:
        """Return the raw outputs [A, H] of each step."""
        return [step.out for step in self.steps]

    @property
    def normed(self) -> list[torch.Tensor]:
        """Return what the head reads, [A, H], of each step."""
        return [step.normed for step in self.steps]

    # ---- what all steps share

    def _cast_weights(self) -> None:
        """Keep the weights of the matrix products in `low`; q, k and v as one product."""
        heads, mlp, low = self.layer.self_attn, self.layer.mlp, self.low
        h = self.config.hidden_size
        qkv = torch.cat([heads.q_proj.weight, heads.k_proj.weight, heads.v_proj.weight]).to(low)
        self.of_embeds = qkv[:, :h].contiguous()  # [q + 2 kv, H]
        self.of_hidden = qkv[:, h:].contiguous()  # [q + 2 kv, H]
        self.gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(low)
        self.o = heads.o_proj.weight.to(low)
        self.down = mlp.down_proj.weight.to(low)
        self.fc = self.drafter.fc.weight.to(low)

    def _prepare_rope(self) -> None:
        """Compute cos and sin of all slots, then of the active ones at each step."""
        batch = self.batch
        longest = max(end - start for start, end in batch.spans)
        positions = torch.arange(longest + self.n_steps, device=batch.states.device)
        cos, sin = self.layer.self_attn.rope_tables(positions, self.wide)
        active = batch.positions[batch.active]
        by_step = [active + s for s in range(self.n_steps)]
        self.rope = [(cos[at], sin[at]) for at in (batch.positions, *by_step)]

    def _embed(self) -> None:
        """Compute the embedding's part of q, k and v, once for each distinct token."""
        batch = self.batch
        tokens, self.token_rows = batch.tokens.unique(return_inverse=True)  # [U], [S]
        last = len(batch.tokens) - 1
        # token j+1+s is s slots further on
        at_step = [(batch.active + s).clamp_(max=last) for s in range(self.n_steps)]
        self.rows = [self.token_rows[at] for at in at_step]  # int64 [A] of each step
        self.embedded = self.drafter.embed_tokens(tokens).to(self.wide)  # [U, H]
        self.x_embeds, self.embeds_scale = self._norm(self.embedded, self.layer.input_layernorm)
        self.embeds_qkv = product(self.x_embeds, self.of_embeds)  # [U, q + 2 kv]

    def _fuse(self) -> None:
        """Compute the hidden states of step 0. The residual stream keeps the weights' dtype."""
        batch, drafter = self.batch, self.drafter
        self.states = batch.states.to(self.low)  # [S, B*H]
        if drafter.fc_norm is not None:
            size = self.config.target_hidden_size
            self.parts = batch.states.to(self.wide).split(size, dim=-1)
            normed = [self._norm(part, each) for part, each in zip(self.parts, drafter.fc_norm)]
            self.parts_scale = [scale for _, scale in normed]
            self.states = torch.cat([part for part, _ in normed], dim=-1)
        self.fused = product(self.states, self.fc).to(self.wide)  # [S, H]
        self.x_fused, self.fused_scale = self._norm(self.fused, self.layer.hidden_norm)

    def _prepare_keys(self) -> None:
        """Compute the keys and values of step 0, of all slots."""
        of_hidden = product(self.x_fused, self.of_hidden[self.q_size :])
        of_embeds = self.embeds_qkv[:, self.q_size :].index_select(0, self.token_rows)
        keys, values = (of_hidden + of_embeds).split(self.kv_size, dim=-1)
        group = self.q_size // self.kv_size
        keys, values = self._rotated(keys, 0), self._by_kv(values).to(self.wide)
        self.attention = PackedAttention(self.batch, keys, values, group)

    # ---- one step

    def _run_step(self, s: int) -> StepActivations:
        hidden, x, x_scale, q = self._enter_step(s)
        q = self._rotated(q, s + 1).unflatten(1, (self.config.n_kv_heads, -1))
        attended, log_sum = self._attend(q)
        middle = hidden + product(attended.flatten(1).to(self.low), self.o)
        y, middle_scale = self._norm(middle, self.layer.post_attention_layernorm)
        gates = product(y, self.gate_up)
        gated = swiglu(gates)
        out = middle + product(gated, self.down)
        weight, eps = self.drafter.norm.weight, self.config.rms_norm_eps
        normed, out_scale = rms_norm(out, weight, eps, self.wide)
        return StepActivations(
            hidden=hidden,
            x=x,
            x_scale=x_scale,
            q=q,
            attended=attended,
            log_sum=log_sum,
            middle=middle,
            middle_scale=middle_scale,
            y=y,
            gates=gates,
            gated=gated,
            out=out,
            out_scale=out_scale,
            normed=normed,
        )

    def _enter_step(self, s: int) -> tuple[torch.Tensor, ...]:
        """Return hidden, x, its scale, and the queries [A, q] before RoPE.

        From step 1 on, each slot also gets its own key and value.
        """
        embeds = self.embeds_qkv
        if s == 0:
            active = self.batch.active
            hidden = self.fused.index_select(0, active)
            x = self.x_fused.index_select(0, active)
            x_scale = self.fused_scale.index_select(0, active)
            of_embeds = embeds[:, : self.q_size].index_select(0, self.rows[0])
            q = product(x, self.of_hidden[: self.q_size]) + of_embeds
            return hidden, x, x_scale, q
        before = self.steps[-1]
        hidden = before.normed if self.config.norm_output else before.out
        x, x_scale = self._norm(hidden, self.layer.hidden_norm)
        qkv = product(x, self.of_hidden) + embeds.index_select(0, self.rows[s])
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        self.own_k.append(self._rotated(k, s + 1))
        self.own_v.append(self._by_kv(v).to(self.wide))
        return hidden, x, x_scale, q

    def _norm(self, x: torch.Tensor, norm) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm(x, norm.weight, self.config.rms_norm_eps, self.low)

    def _by_kv(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.config.n_kv_heads, -1))

    def _rotated(self, x: torch.Tensor, at: int) -> torch.Tensor:
        """Return x [n, heads * head_dim] as [n, heads, head_dim], rotated by `rope[at]`."""
        cos, sin = self.rope[at]
        return apply_rope(x.unflatten(-1, (-1, self.config.head_dim)).to(cos.dtype), cos, sin)

    def rotated_back(self, grad: torch.Tensor, at: int) -> torch.Tensor:
        """Return the gradient before RoPE, [n, heads * head_dim] in `low`."""
        cos, sin = self.rope[at]
        return apply_rope(grad, cos, -sin).flatten(1).to(self.low)

    def _attend(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention as q [A, kv heads, group, head_dim], and the log-sum-exp of its scores.

        One softmax goes over the keys of step 0 up to the slot, and the slot's own keys so far. The
        log-sum-exp of the keys of step 0 is enough to join the others. On the way back each weight
        is exp(score - joint log-sum-exp), whichever part it belongs to.
        """
        out, log_sum = self.attention(q)
        if self.own_k:
            scores = torch.stack([self.scores(q, k) for k in self.own_k])
            joint = torch.logaddexp(log_sum, scores.logsumexp(0))
            out *= (log_sum - joint).exp_()[..., None]
            for weight, v in zip((scores - joint).exp_(), self.own_v):
                out.addcmul_(weight[..., None], v[:, :, None])
            log_sum = joint
        return out, log_sum

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return the scores [A, kv heads, group] of queries with the slots' own keys."""
        return torch.linalg.vecdot(q, k[:, :, None]).mul_(self.attention.scale)

    # ---- the way back

    def gradients(self, grad_normed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gradient of each trained weight but the head's, by name.

        grad_normed: [K, A, H], the gradient by `normed`. It is overwritten.
        """
        return _Backward(self).run(grad_normed)


class _Backward:
    """The gradients of one pack. Lists by step have the last step first."""

    def __init__(self, steps: Steps):
        self.forward = steps
        zeros = torch.zeros_like
        self.norms = {
            "norm": zeros(steps.drafter.norm.weight),
            "layers.0.post_attention_layernorm": zeros(steps.layer.post_attention_layernorm.weight),
            "layers.0.hidden_norm": zeros(steps.layer.hidden_norm.weight),
        }
        self.by_embeds = torch.zeros(
            len(steps.embedded),
            steps.q_size + 2 * steps.kv_size,
            dtype=steps.wide,
            device=steps.batch.states.device,
        )  # [U, q + 2 kv]
        self.by_own = [(zeros(k), zeros(v)) for k, v in zip(steps.own_k, steps.own_v)]
        self.by_out: list[torch.Tensor] = []
        self.by_gates: list[torch.Tensor] = []
        self.by_middle: list[torch.Tensor] = []
        self.by_q: list[torch.Tensor] = []
        self.by_kv: list[torch.Tensor] = []

    def run(self, grad_normed: torch.Tensor) -> dict[str, torch.Tensor]:
        forward = self.forward
        by_raw = None  # by the raw outputs of a step, from the step after it
        for s in reversed(range(forward.n_steps)):
            grad = self._through_layer(s, grad_normed[s], by_raw)
            if s == 0:
                break
            grad = self._through_inputs(s, grad)
            if forward.config.norm_output:
                grad_normed[s - 1] += grad
            else:
                by_raw = grad
        by_fused = self._through_step_0(grad).to(forward.low)
        found = {f"{name}.weight": weight for name, weight in self.norms.items()}
        found |= self._fuse_gradients(by_fused)
        found |= self._attention_gradients()
        found |= self._mlp_gradients()
        return {name: weight.to(forward.wide) for name, weight in found.items()}

    def _through_norm(self, name: str, norm, grad, x, scale) -> torch.Tensor:
        """Return the gradient by the input of a norm; its weight's is added up."""
        grad_x, grad_weight = norm_gradient(grad, x, norm.weight, scale)
        self.norms[name] += grad_weight
        return grad_x

    def _through_layer(self, s: int, grad, by_raw: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient by the residual stream that leaves attention; queries' is kept."""
        forward = self.forward
        step = forward.steps[s]
        grad = self._through_norm("norm", forward.drafter.norm, grad, step.out, step.out_scale)
        if by_raw is not None:
            grad += by_raw
        self.by_out.append(grad.to(forward.low))
        self.by_gates.append(swiglu_gradient(product(self.by_out[-1], forward.down.T), step.gates))
        grad = grad + self._through_norm(
            "layers.0.post_attention_layernorm",
            forward.layer.post_attention_layernorm,
            product(self.by_gates[-1], forward.gate_up.T),
            step.middle,
            step.middle_scale,
        )
        self.by_middle.append(grad.to(forward.low))
        by_attended = product(self.by_middle[-1], forward.o.T).to(grad.dtype)
        self.by_q.append(forward.rotated_back(self._through_attention(s, by_attended), s + 1))
        by_q = self.by_q[-1].to(self.by_embeds.dtype)
        self.by_embeds[:, : forward.q_size].index_add_(0, forward.rows[s], by_q)
        return grad

    def _through_inputs(self, s: int, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient by the hidden states that entered step s > 0."""
        forward = self.forward
        step = forward.steps[s]
        by_k, by_v = self.by_own[s - 1]
        self.by_kv.append(
            torch.cat([forward.rotated_back(by_k, s + 1), by_v.flatten(1).to(forward.low)], dim=-1)
        )
        by_kv = self.by_kv[-1].to(self.by_embeds.dtype)
        self.by_embeds[:, forward.q_size :].index_add_(0, forward.rows[s], by_kv)
        by_x = product(torch.cat([self.by_q[-1], self.by_kv[-1]], dim=-1), forward.of_hidden.T)
        name = "layers.0.hidden_norm"
        return grad + self._through_norm(
            name, forward.layer.hidden_norm, by_x, step.hidden, step.x_scale
        )

    def _through_step_0(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient [S, H] by the fused states of all slots."""
        forward = self.forward
        by_k, by_v = forward.attention.key_gradients()
        self.by_kv.append(
            torch.cat([forward.rotated_back(by_k, 0), by_v.flatten(1).to(forward.low)], dim=-1)
        )  # [S, 2 kv]
        by_kv = self.by_kv[-1].to(self.by_embeds.dtype)
        self.by_embeds[:, forward.q_size :].index_add_(0, forward.token_rows, by_kv)
        by_x = product(self.by_kv[-1], forward.of_hidden[forward.q_size :].T)  # [S, H]
        active = forward.batch.active
        by_x.index_add_(0, active, product(self.by_q[-1], forward.of_hidden[: forward.q_size].T))
        by_fused = self._through_norm(
            "layers.0.hidden_norm",
            forward.layer.hidden_norm,
            by_x,
            forward.fused,
            forward.fused_scale,
        )
        return by_fused.index_add_(0, active, grad)

    def _through_attention(self, s: int, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient by the queries of step s, [A, heads, head_dim].

        grad: [A, heads * head_dim], by the attention's output. The gradients of the slots' own keys
        and values are added up.
        """
        forward = self.forward
        step = forward.steps[s]
        q, out, log_sum = step.q, step.attended, step.log_sum
        scale = forward.attention.scale
        grad = grad.view_as(out)
        grad_q = forward.attention.gradient(grad, q, out, log_sum)
        delta = torch.linalg.vecdot(grad, out) if s else None  # [A, kv heads, group]
        for k, v, (grad_k, grad_v) in zip(forward.own_k[:s], forward.own_v, self.by_own):
            weight = (forward.scores(q, k) - log_sum).exp_()
            by_weight = torch.linalg.vecdot(grad, v[:, :, None]) - delta
            grad_score = by_weight.mul_(weight).mul_(scale)
            grad_q.addcmul_(grad_score[..., None], k[:, :, None])
            grad_k += (grad_score[..., None] * q).sum(2)
            grad_v += (weight[..., None] * grad).sum(2)
        return grad_q.flatten(1, 2)

    # ---- weights: one product over all steps each

    def _fuse_gradients(self, by_fused: torch.Tensor) -> dict[str, torch.Tensor]:
        forward = self.forward
        found = {"fc.weight": weight_product([by_fused], [forward.states])}
        if forward.drafter.fc_norm is None:
            return found
        by_states = product(by_fused, forward.fc.T).split(forward.config.target_hidden_size, dim=-1)
        parts = zip(by_states, forward.parts, forward.drafter.fc_norm, forward.parts_scale)
        for i, (grad, part, norm, scale) in enumerate(parts):
            found[f"fc_norm.{i}.weight"] = norm_gradient(grad, part, norm.weight, scale)[1]
        return found

    def _attention_gradients(self) -> dict[str, torch.Tensor]:
        forward = self.forward
        by_embeds = self.by_embeds.to(forward.low)
        by_x_embeds = product(by_embeds, forward.of_embeds.T)
        weight = forward.layer.input_layernorm.weight
        by_norm = norm_gradient(by_x_embeds, forward.embedded, weight, forward.embeds_scale)[1]
        found = {"layers.0.input_layernorm.weight": by_norm}
        xs = [step.x for step in forward.steps]
        of_q = weight_product(self.by_q[::-1], xs)
        of_kv = weight_product(self.by_kv[::-1], [forward.x_fused, *xs[1:]])
        hidden_parts = (of_q, *of_kv.split(forward.kv_size))
        of_embeds = weight_product([by_embeds], [forward.x_embeds])
        embeds_parts = of_embeds.split([forward.q_size, forward.kv_size, forward.kv_size])
        for name, embeds_part, hidden_part in zip("qkv", embeds_parts, hidden_parts):
            both = torch.cat([embeds_part, hidden_part], dim=1)
            found[f"layers.0.self_attn.{name}_proj.weight"] = both
        attended = [step.attended.flatten(1).to(forward.low) for step in forward.steps]
        of_o = weight_product(self.by_middle[::-1], attended)
        return found | {"layers.0.self_attn.o_proj.weight": of_o}

    def _mlp_gradients(self) -> dict[str, torch.Tensor]:
        forward = self.forward
        of_gate_up = weight_product(self.by_gates[::-1], [step.y for step in forward.steps])
        of_gate, of_up = of_gate_up.chunk(2)
        of_down = weight_product(self.by_out[::-1], [step.gated for step in forward.steps])
        return {
            "layers.0.mlp.gate_proj.weight": of_gate,
            "layers.0.mlp.up_proj.weight": of_up,
            "layers.0.mlp.down_proj.weight": of_down,
        }
