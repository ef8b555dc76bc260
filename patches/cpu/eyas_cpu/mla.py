"""Multi-head latent attention (DeepSeek's family, Kimi-K2.5) in plain torch, for the CPU platform.

A prefill without a cached prefix gets its keys and values as they are, of two sizes, and `torch_native` would not look at them: it reads its
pool, where there are only latents, one row a token, [rank + rope]. Whatever sees cached tokens (decoding, a verify step, a prefix) is absorbed:
one key head, the latent rows, whose first `rank` columns are the values too; `PlainAttention` and SGLang's own loop do that like any other layer.
Axis names: S tokens, Hq heads, E size of keys, Ev of values.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention


def absorbed(layer) -> bool:
    """One key head for all queries, values that are the front of the keys."""
    return layer.tp_k_head_num == 1 and layer.v_head_dim < layer.qk_head_dim


def explicit(q, k, v, layer) -> bool:
    """Keys and values a head each, of different sizes, for just these queries."""
    return (
        k is not None
        and v is not None
        and len(k) == len(q)
        and layer.qk_head_dim != layer.v_head_dim
        and layer.tp_q_head_num == layer.tp_k_head_num
    )


def prefill(q, k, v, layer, lengths: list[int]) -> torch.Tensor:
    """Causal attention of each sequence to itself; q and k [S, Hq * E], v [S, Hq * Ev] -> [S, Hq * Ev]. The model has written the latents already."""
    queries, keys = (
        x.reshape(len(q), -1, layer.qk_head_dim).transpose(0, 1) for x in (q, k)
    )  # [Hq, S, E]
    values = v.reshape(len(q), -1, layer.v_head_dim).transpose(0, 1)  # [Hq, S, Ev]
    parts = zip(*(x.split(lengths, dim=1) for x in (queries, keys, values)))
    out = torch.cat(
        [
            scaled_dot_product_attention(
                a[None], b[None], c[None], is_causal=True, scale=layer.scaling
            )[0]
            for a, b, c in parts
        ],
        dim=1,
    )
    return out.transpose(0, 1).flatten(1)
