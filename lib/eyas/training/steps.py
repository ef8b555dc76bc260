"""K steps of the drafter over a pack, and the gradient of all of its weights."""

import torch

from eyas.models.drafter import Drafter
from eyas.training.attention import Attention
from eyas.training.batch import Batch
from eyas.training.operators import (
    norm,
    norm_gradient,
    product,
    rotary_tables,
    swiglu,
    swiglu_gradient,
    turn,
    weight_product,
)


class Steps:
    """K steps of the drafter over a pack, forward, with all that `gradients` needs to go back.

    Every step has a row for each active slot of step 0, so that the weights' gradients are one product over all steps; what a row holds in a step in which
    its slot is not active any more is neither used nor supervised. `out` [K, A, H] are the raw outputs, `normed` [K, A, H] what the head reads.
    """

    def __init__(self, drafter: Drafter, batch: Batch, n_steps: int, low: torch.dtype):
        config, layer = drafter.config, drafter.layers[0]
        heads, mlp = layer.self_attn, layer.mlp
        self.drafter, self.config, self.batch, self.n_steps, self.low, self.eps = (
            drafter,
            config,
            batch,
            n_steps,
            low,
            config.rms_norm_eps,
        )
        self.q_size, self.kv_size, h = (
            config.n_heads * config.head_dim,
            config.n_kv_heads * config.head_dim,
            config.hidden_size,
        )
        qkv = torch.cat([heads.q_proj.weight, heads.k_proj.weight, heads.v_proj.weight]).to(
            low
        )  # [q + 2 kv, 2H]
        self.of_embeds, self.of_hidden = qkv[:, :h].contiguous(), qkv[:, h:].contiguous()
        self.gate_up, self.o, self.down = (
            torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(low),
            heads.o_proj.weight.to(low),
            mlp.down_proj.weight.to(low),
        )
        self.fc, wide = drafter.fc.weight.to(low), drafter.fc.weight.dtype
        cos, sin = rotary_tables(
            config, max(end - start for start, end in batch.spans) + n_steps, drafter.fc.weight
        )
        self.turns = [
            (cos[at], sin[at])
            for at in (
                batch.positions,
                *(batch.positions[batch.active] + s for s in range(n_steps)),
            )
        ]  # of all slots, then of the active ones by step
        tokens, self.token_rows = batch.tokens.unique(
            return_inverse=True
        )  # [U], and the row of each slot's token among them [S]
        self.rows = [
            self.token_rows[(batch.active + s).clamp_(max=len(batch.tokens) - 1)]
            for s in range(n_steps)
        ]  # token j+1+s stands s slots further on

        self.embedded = drafter.embed_tokens(tokens).to(wide)  # [U, H]
        self.x_embeds, self.embeds_scale = norm(
            self.embedded, layer.input_layernorm.weight, self.eps, low
        )
        embeds = product(self.x_embeds, self.of_embeds)  # [U, q + 2 kv]
        self.states = batch.states.to(low)
        if drafter.fc_norm is not None:
            self.parts = batch.states.to(wide).split(config.target_hidden_size, dim=-1)
            normed, self.parts_scale = zip(
                *(
                    norm(part, each.weight, self.eps, low)
                    for part, each in zip(self.parts, drafter.fc_norm)
                )
            )
            self.states = torch.cat(normed, dim=-1)
        self.fused = product(self.states, self.fc).to(
            wide
        )  # [S, H]; the residual stream keeps the precision of the weights
        self.x_fused, self.fused_scale = norm(self.fused, layer.hidden_norm.weight, self.eps, low)
        keys, values = (
            product(self.x_fused, self.of_hidden[self.q_size :])
            + embeds[:, self.q_size :].index_select(0, self.token_rows)
        ).split(self.kv_size, dim=-1)
        self.attention = Attention(
            batch, self._turned(keys, 0), self._by_kv(values).to(wide), self.q_size // self.kv_size
        )

        (
            self.x,
            self.scale,
            self.hidden,
            self.q,
            self.own_k,
            self.own_v,
            self.attended,
            self.log_sum,
        ) = [], [], [], [], [], [], [], []
        (
            self.middle,
            self.middle_scale,
            self.y,
            self.gates,
            self.gated,
            self.out,
            self.out_scale,
            self.normed,
        ) = [], [], [], [], [], [], [], []
        for s in range(n_steps):
            if s:
                hidden = self.normed[-1] if config.norm_output else self.out[-1]
                x, scale = norm(hidden, layer.hidden_norm.weight, self.eps, low)
                q, k, v = (product(x, self.of_hidden) + embeds.index_select(0, self.rows[s])).split(
                    [self.q_size, self.kv_size, self.kv_size], dim=-1
                )
                self.own_k.append(self._turned(k, s + 1))
                self.own_v.append(self._by_kv(v).to(wide))
            else:
                hidden, x, scale = (
                    t.index_select(0, batch.active)
                    for t in (self.fused, self.x_fused, self.fused_scale)
                )
                q = product(x, self.of_hidden[: self.q_size]) + embeds[
                    :, : self.q_size
                ].index_select(0, self.rows[0])
            q = self._turned(q, s + 1).unflatten(
                1, (config.n_kv_heads, -1)
            )  # [A, kv heads, group, head_dim]
            attended, log_sum = self._attend(q)
            middle = hidden + product(attended.flatten(1).to(low), self.o)
            y, middle_scale = norm(middle, layer.post_attention_layernorm.weight, self.eps, low)
            gates = product(y, self.gate_up)
            gated = swiglu(gates)
            out = middle + product(gated, self.down)
            normed, out_scale = norm(out, drafter.norm.weight, self.eps, wide)
            for name, value in (
                ("x", x),
                ("scale", scale),
                ("hidden", hidden),
                ("q", q),
                ("attended", attended),
                ("log_sum", log_sum),
                ("middle", middle),
                ("middle_scale", middle_scale),
                ("y", y),
                ("gates", gates),
                ("gated", gated),
                ("out", out),
                ("out_scale", out_scale),
                ("normed", normed),
            ):
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
            scores = torch.stack(
                [self._scores(q, k) for k in self.own_k]
            )  # [own, A, kv heads, group]
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
        config, drafter, layer, batch, low = (
            self.config,
            self.drafter,
            self.drafter.layers[0],
            self.batch,
            self.low,
        )
        norms = {
            name: torch.zeros_like(weight)
            for name, weight in (
                ("norm", drafter.norm.weight),
                ("layers.0.post_attention_layernorm", layer.post_attention_layernorm.weight),
                ("layers.0.hidden_norm", layer.hidden_norm.weight),
            )
        }

        def through(name: str, weight, grad, x, scale):
            grad_x, grad_weight = norm_gradient(grad, x, weight, scale)
            norms[name] += grad_weight
            return grad_x

        by_embeds = torch.zeros(
            len(self.embedded),
            self.q_size + 2 * self.kv_size,
            dtype=drafter.fc.weight.dtype,
            device=batch.states.device,
        )
        by_own = [
            (torch.zeros_like(k), torch.zeros_like(v)) for k, v in zip(self.own_k, self.own_v)
        ]
        by_out, by_gates, by_middle, by_q, by_kv, by_raw = (
            [],
            [],
            [],
            [],
            [],
            None,
        )  # of all steps, the last one first; by_raw: of the outputs themselves, from the step behind
        for s in reversed(range(self.n_steps)):
            grad = through(
                "norm", drafter.norm.weight, grad_normed[s], self.out[s], self.out_scale[s]
            )
            if by_raw is not None:
                grad += by_raw
            by_out.append(grad.to(low))
            by_gates.append(swiglu_gradient(product(by_out[-1], self.down.T), self.gates[s]))
            grad = grad + through(
                "layers.0.post_attention_layernorm",
                layer.post_attention_layernorm.weight,
                product(by_gates[-1], self.gate_up.T),
                self.middle[s],
                self.middle_scale[s],
            )
            by_middle.append(grad.to(low))
            grad_q = self._attention_gradient(
                s, product(by_middle[-1], self.o.T).to(grad.dtype), by_own
            )
            by_q.append(self._turned_back(grad_q, s + 1))
            by_embeds[:, : self.q_size].index_add_(0, self.rows[s], by_q[-1].to(by_embeds.dtype))
            if s == 0:
                break
            by_kv.append(
                torch.cat(
                    [
                        self._turned_back(by_own[s - 1][0], s + 1),
                        by_own[s - 1][1].flatten(1).to(low),
                    ],
                    dim=-1,
                )
            )
            by_embeds[:, self.q_size :].index_add_(0, self.rows[s], by_kv[-1].to(by_embeds.dtype))
            by_x = product(torch.cat([by_q[-1], by_kv[-1]], dim=-1), self.of_hidden.T)
            grad = grad + through(
                "layers.0.hidden_norm",
                layer.hidden_norm.weight,
                by_x,
                self.hidden[s],
                self.scale[s],
            )
            if config.norm_output:
                grad_normed[s - 1] += grad
            else:
                by_raw = grad
        by_k, by_v = self.attention.key_gradients()
        by_kv.append(
            torch.cat([self._turned_back(by_k, 0), by_v.flatten(1).to(low)], dim=-1)
        )  # [S, 2 kv]
        by_embeds[:, self.q_size :].index_add_(0, self.token_rows, by_kv[-1].to(by_embeds.dtype))
        by_x = product(by_kv[-1], self.of_hidden[self.q_size :].T)  # [S, H]
        by_x.index_add_(0, batch.active, product(by_q[-1], self.of_hidden[: self.q_size].T))
        by_fused = through(
            "layers.0.hidden_norm", layer.hidden_norm.weight, by_x, self.fused, self.fused_scale
        )
        by_fused.index_add_(0, batch.active, grad)
        by_fused, by_embeds = by_fused.to(low), by_embeds.to(low)

        found = {f"{name}.weight": grad for name, grad in norms.items()}
        found["fc.weight"] = weight_product([by_fused], [self.states])
        if drafter.fc_norm is not None:
            for i, (grad, part, each, scale) in enumerate(
                zip(
                    product(by_fused, self.fc.T).split(config.target_hidden_size, dim=-1),
                    self.parts,
                    drafter.fc_norm,
                    self.parts_scale,
                )
            ):
                found[f"fc_norm.{i}.weight"] = norm_gradient(grad, part, each.weight, scale)[1]
        found["layers.0.input_layernorm.weight"] = norm_gradient(
            product(by_embeds, self.of_embeds.T),
            self.embedded,
            layer.input_layernorm.weight,
            self.embeds_scale,
        )[1]
        of_q, of_kv = (
            weight_product(by_q[::-1], self.x),
            weight_product(by_kv[::-1], [self.x_fused, *self.x[1:]]),
        )
        of_embeds = weight_product([by_embeds], [self.x_embeds])
        for name, embeds_part, hidden_part in zip(
            "qkv",
            of_embeds.split([self.q_size, self.kv_size, self.kv_size]),
            (of_q, *of_kv.split(self.kv_size)),
        ):
            found[f"layers.0.self_attn.{name}_proj.weight"] = torch.cat(
                [embeds_part, hidden_part], dim=1
            )
        found["layers.0.self_attn.o_proj.weight"] = weight_product(
            by_middle[::-1], [attended.flatten(1).to(low) for attended in self.attended]
        )
        found["layers.0.mlp.gate_proj.weight"], found["layers.0.mlp.up_proj.weight"] = (
            weight_product(by_gates[::-1], self.y).chunk(2)
        )
        found["layers.0.mlp.down_proj.weight"] = weight_product(by_out[::-1], self.gated)
        wide = drafter.fc.weight.dtype
        return {name: grad.to(wide) for name, grad in found.items()}

    def _attention_gradient(
        self, s: int, grad: torch.Tensor, by_own: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """[A, heads * head_dim] by the output of step s -> [A, heads, head_dim] by its queries; the gradients of the slots' own keys and values are added to `by_own`."""
        q, out, log_sum = self.q[s], self.attended[s], self.log_sum[s]
        grad = grad.view_as(out)
        grad_q = self.attention.gradient(grad, q, out, log_sum)
        delta = torch.linalg.vecdot(grad, out) if s else None  # [A, kv heads, group]
        for k, v, (grad_k, grad_v) in zip(self.own_k[:s], self.own_v, by_own):
            weight = (self._scores(q, k) - log_sum).exp_()
            grad_score = (
                (torch.linalg.vecdot(grad, v[:, :, None]) - delta)
                .mul_(weight)
                .mul_(self.attention.scale)
            )
            grad_q.addcmul_(grad_score[..., None], k[:, :, None])
            grad_k += (grad_score[..., None] * q).sum(2)
            grad_v += (weight[..., None] * grad).sum(2)
        return grad_q.flatten(1, 2)
