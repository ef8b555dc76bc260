"""Plain-torch attention for the CPU platform, same results as SGLang's `torch_native`, without a gather for each sequence.

SGLang's backend loops over the sequences of a batch and gathers keys and values for each of them: 72 % of the time of a
decode batch of 64 on two cores. Here a decode batch is one padded call, and a prefill without a cached prefix attends to
the keys and values that it was just given. Whatever else comes (sliding window, cross-attention, prefixes, MLA) goes to
the parent class.
"""

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention


class PlainAttention(TorchNativeAttnBackend):
    """Axis names: S query tokens, R requests, L longest sequence, Hq and Hk heads, G = Hq / Hk, E head size."""

    def init_forward_metadata(self, forward_batch):
        super().init_forward_metadata(forward_batch)
        self.slots = self.mask = self.lengths = None
        if forward_batch.encoder_lens is not None:
            return
        if forward_batch.forward_mode.is_decode():
            lengths = forward_batch.seq_lens  # [R]
            self.slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices, : int(lengths.max())].long()  # [R, L]
            inside = torch.arange(self.slots.shape[1], device=lengths.device) < lengths[:, None]  # [R, L]
            self.slots = self.slots.where(inside, 0)
            self.mask = inside[:, None, None, :]  # [R, 1, 1, L]
        elif forward_batch.forward_mode.is_extend() and not any(forward_batch.extend_prefix_lens_cpu or [1]):
            self.lengths = [int(n) for n in forward_batch.extend_seq_lens_cpu]

    def _plain(self, layer) -> bool:
        window = layer.sliding_window_size
        ordinary = not layer.is_cross_attention and layer.attn_type == AttentionType.DECODER and layer.qk_head_dim == layer.v_head_dim
        return ordinary and (window is None or window < 0)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if self.slots is None or not self._plain(layer) or k is None:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        requests, kv_heads, size = len(self.slots), layer.tp_k_head_num, layer.qk_head_dim
        q = q.reshape(requests, kv_heads, -1, size)  # [R, Hk, G, E]: the heads of a group are queries of one key head
        pool = self.token_to_kv_pool
        keys, values = (self._gather(buffer, kv_heads, q) for buffer in (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)))
        out = scaled_dot_product_attention(q, keys, values, attn_mask=self.mask, scale=layer.scaling)  # [R, Hk, G, E]
        return out.reshape(requests, -1)

    def _gather(self, buffer, kv_heads: int, q):
        """[slots of the pool, Hk, E] -> [R, Hk, L, E]. index_select copies whole rows: 8 times as fast as indexing with `self.slots`."""
        rows = buffer.view(len(buffer), -1).index_select(0, self.slots.flatten())  # [R * L, Hk * E]
        return rows.view(*self.slots.shape, kv_heads, -1).transpose(1, 2).to(q.dtype)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if self.lengths is None or not self._plain(layer) or k is None or sum(self.lengths) != len(q):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        out = torch.empty_like(q)
        queries, keys, values, rows = (x.view(len(q), -1, layer.qk_head_dim).transpose(0, 1) for x in (q, k, v, out))  # [heads, S, E]
        start = 0
        for length in self.lengths:
            part = slice(start, start + length)
            rows[:, part] = scaled_dot_product_attention(
                queries[None, :, part], keys[None, :, part], values[None, :, part], is_causal=True, scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )[0]
            start += length
        return out
