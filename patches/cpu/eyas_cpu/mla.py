"""Compute multi-head latent attention (DeepSeek's family, Kimi-K2.5) in plain torch.

- A prefill without a cached prefix receives its keys and values as they are, of two sizes.
  `torch_native` would ignore them: it reads its pool, which only has latents, one row a token,
  [rank + rope]. `prefill` computes this case.
- Whatever sees cached tokens (decoding, a verify step, a prefix) is absorbed: there is one key
  head, the latent rows, whose first `rank` columns are the values too. `PlainAttention` and
  SGLang's own loop compute that like any other layer.

Axis names: S tokens, Hq heads, E size of keys, Ev size of values.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention


def absorbed(layer) -> bool:
    """Return whether all queries share one key head whose front is the values."""
    return layer.tp_k_head_num == 1 and layer.v_head_dim < layer.qk_head_dim


def explicit(q, k, v, layer) -> bool:
    """Return whether keys and values are given for each head, in different sizes."""
    return (
        k is not None
        and v is not None
        and len(k) == len(q)
        and layer.qk_head_dim != layer.v_head_dim
        and layer.tp_q_head_num == layer.tp_k_head_num
    )


def prefill(q, k, v, layer, lengths: list[int]) -> torch.Tensor:
    """Return the causal attention of each sequence to itself, [S, Hq * Ev].

    q, k: [S, Hq * E]. v: [S, Hq * Ev]. The model has written the latents already.
    """
    queries = q.reshape(len(q), -1, layer.qk_head_dim).transpose(0, 1)  # [Hq, S, E]
    keys = k.reshape(len(q), -1, layer.qk_head_dim).transpose(0, 1)  # [Hq, S, E]
    values = v.reshape(len(q), -1, layer.v_head_dim).transpose(0, 1)  # [Hq, S, Ev]
    outputs = []
    for sequence_q, sequence_k, sequence_v in zip(
        queries.split(lengths, dim=1), keys.split(lengths, dim=1), values.split(lengths, dim=1)
    ):
        attended = scaled_dot_product_attention(
            sequence_q[None],
            sequence_k[None],
            sequence_v[None],
            is_causal=True,
            scale=layer.scaling,
        )
        outputs.append(attended[0])
    out = torch.cat(outputs, dim=1)  # [Hq, S, Ev]
    return out.transpose(0, 1).flatten(1)
