"""The training loss from its definition: one slot, one step, one key at a time, in float64.

It shares no code with `eyas.models.drafter` or `eyas.training`.
"""

import math

import torch

from eyas.models.target import Head
from helpers.drafters import BOUNDARIES, SHAPE, H, V


def norm(x, weight):
    return x / (x.square().mean() + SHAPE.rms_norm_eps).sqrt() * weight


def rotate(x, position):
    """RoPE of one head: the pair (x[i], x[i + d/2]) turned by position * theta^(-2i/d)."""
    half, turned = len(x) // 2, list(x)
    for i in range(half):
        angle = position * SHAPE.rope_theta ** (-2 * i / len(x))
        turned[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        turned[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return torch.stack(turned)


def heads(x, weight, position=None):
    """[2H] -> list of heads, rotated where a position is given."""
    parts = (weight @ x).split(SHAPE.head_dim)
    return list(parts) if position is None else [rotate(part, position) for part in parts]


def row_loss(name, log_q, p_draft, p_whole):
    """Return the loss of one row, from the definitions.

    `p_draft` sums to 1 over the draft vocabulary, `p_whole` over the target's whole one.
    """
    q = log_q.exp()
    alpha = torch.minimum(p_whole, q).sum()
    kl = sum(p * (p.log() - log) for p, log in zip(p_draft, log_q))
    lam = (-3.0 * alpha.detach()).exp()
    return {
        "kl": -(p_draft * log_q).sum(),
        "tv": 1 - alpha,
        "lk_alpha": -alpha.log(),
        "lk_lambda": lam * kl + (1 - lam) * (1 - alpha),
    }[name]


def reference_loss(
    drafter, samples, head, n_steps, decay, loss_name="kl", mask_shift=1, grid=False
):
    """Return (total, loss sums, hits, slots by draft step) of the samples. Nothing is packed."""
    weights, shape, vocab_ids = (
        dict(drafter.named_parameters()),
        drafter.config,
        drafter.vocab.ids.tolist(),
    )
    layer = {name.removeprefix("layers.0."): w for name, w in weights.items()}
    sums, hits, slots, rows = (
        [torch.zeros((), dtype=torch.float64) for _ in range(n_steps)],
        [0] * n_steps,
        [0] * n_steps,
        0,
    )
    for sample in samples:
        ids, mask, states = (
            sample.input_ids.tolist(),
            sample.loss_mask.tolist(),
            sample.states,
        )

        def mixed(token, hidden):
            return torch.cat(
                [
                    norm(weights["embed_tokens.weight"][token], layer["input_layernorm.weight"]),
                    norm(hidden, layer["hidden_norm.weight"]),
                ]
            )

        def fused(j):
            parts = [states[b][j] for b in sorted(BOUNDARIES)]
            if shape.fc_norm:
                parts = [norm(part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
            return weights["fc.weight"] @ torch.cat(parts)

        hidden0 = [fused(j) for j in range(len(ids))]
        x0 = [mixed(ids[j + 1], hidden0[j]) for j in range(len(ids) - 1)]
        keys0 = [heads(x, layer["self_attn.k_proj.weight"], j) for j, x in enumerate(x0)]
        values0 = [heads(x, layer["self_attn.v_proj.weight"]) for x in x0]
        seen = 0  # slots up to the last one that any step of any slot reads
        for j in range(len(ids) - 1):
            hidden, keys, values = (
                hidden0[j],
                keys0[: j + 1],
                values0[: j + 1],
            )  # grows by the slot's own keys of the later steps
            for s in range(n_steps):
                if not (
                    j + 1 + s < len(ids) and all(mask[j + mask_shift : j + mask_shift + s + 1])
                ):
                    break
                seen = max(seen, j + s + 1)
                x = mixed(ids[j + 1 + s], hidden)
                if s:
                    keys, values = (
                        [*keys, heads(x, layer["self_attn.k_proj.weight"], j + s)],
                        [*values, heads(x, layer["self_attn.v_proj.weight"])],
                    )
                attended = []
                for h, q in enumerate(heads(x, layer["self_attn.q_proj.weight"], j + s)):
                    group = h // (SHAPE.n_heads // SHAPE.n_kv_heads)
                    p = torch.stack(
                        [q @ k[group] / math.sqrt(SHAPE.head_dim) for k in keys]
                    ).softmax(0)
                    attended.append(sum(w * v[group] for w, v in zip(p, values)))
                out = hidden + layer["self_attn.o_proj.weight"] @ torch.cat(attended)
                normed = norm(out, layer["post_attention_layernorm.weight"])
                gate = layer["mlp.gate_proj.weight"] @ normed
                out = out + layer["mlp.down_proj.weight"] @ (
                    gate / (1 + (-gate).exp()) * (layer["mlp.up_proj.weight"] @ normed)
                )
                hidden = norm(out, weights["norm.weight"]) if shape.norm_output else out
                following = ids[j + 2 + s] if j + 2 + s < len(ids) else None
                if following not in vocab_ids:
                    continue
                log_q = (weights["lm_head.weight"] @ norm(out, weights["norm.weight"])).log_softmax(
                    0
                )
                logits = head.lm_head @ head.normed(states[max(states)][j + 1 + s])
                sums[s] = sums[s] + row_loss(
                    loss_name, log_q, logits[vocab_ids].softmax(0), logits.softmax(0)[vocab_ids]
                )
                hits[s] += vocab_ids[int(log_q.argmax())] == following
                slots[s] += 1
        rows += seen
    step_weights = [decay**s for s in range(n_steps)]
    total = sum(
        w / sum(step_weights) * loss / max(rows if grid else n, 1)
        for w, loss, n in zip(step_weights, sums, slots)
    )
    return total, [float(loss.detach()) for loss in sums], hits, slots


class WideHead(Head):
    """In float64."""

    def normed(self, states):
        return (
            states / (states.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.norm_weight
        )


def make_head():
    g = torch.Generator().manual_seed(5)
    weight = torch.rand(H, generator=g, dtype=torch.float64) + 0.5
    return WideHead(weight, torch.randn(V, H, generator=g, dtype=torch.float64), 1e-5)


MASKS = {
    "one answer": [[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0]],
    "turns": [[0, 0, 1, 1, 1, 0, 0, 1, 0, 0, 1, 1, 1, 1, 0]],
    "cut": [[0, 0, 0, 1, 1, 1, 1, 1]],
    "from the first token": [[1, 1, 1, 1, 1, 1, 0, 0, 1, 1]],
    "packed": [
        [0, 0, 0, 1, 1, 1, 1, 0, 0],
        [0, 1, 0],
        [0, 0, 1, 1, 1, 0, 1, 1],
        [0, 0, 0, 0],
        [1, 1, 1, 1, 1],
    ],
}
