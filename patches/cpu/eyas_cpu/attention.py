"""Compute attention in plain torch for the CPU platform, with the results of `torch_native`.

- SGLang's backend gathers keys and values for each sequence of a batch: 72 % of the time of a
  decode batch of 64 on two cores. Here a decode batch is one padded call.
- A prefill without a cached prefix attends to the keys and values that it was given.
- The modes of speculative decoding, which SGLang's backend does not have, are padded calls too: the
  target's verify step, and the drafter's draft-extend and draft decode.
- The prefill of latent attention is in `mla`.
- Everything else (sliding window, cross-attention) is left to the parent class.
"""

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention

from eyas_cpu import mla


def window(req_to_token, req_pool_indices, start, length: int) -> torch.Tensor:
    """Return the slots [R, length] of `length` tokens of each request from its `start` on."""
    positions = start.long()[:, None] + torch.arange(length)  # [R, length]
    return req_to_token[req_pool_indices.long()[:, None], positions].long()


class PlainAttention(TorchNativeAttnBackend):
    """Attend in one padded call where possible.

    Axis names: S query tokens, R requests, n query tokens of each, L longest sequence, Hq and Hk
    heads, G = Hq / Hk, E head size.
    """

    slots = None  # [R, L], the pool's slots with the keys of this pass; None: not a padded pass
    seen = None  # [R, n, L] bool, which of them a query sees

    def init_forward_metadata(self, forward_batch):
        super().init_forward_metadata(forward_batch)
        self.slots = self.seen = self.lengths = None
        self.masks = {}  # G -> [R, 1, n * G, L], or n for n * G where n is 1
        mode = forward_batch.forward_mode
        if forward_batch.encoder_lens is not None:
            return
        if mode.is_decode():
            self.see(forward_batch.req_pool_indices, forward_batch.seq_lens - 1, 1)
        elif mode.is_target_verify():
            spec = forward_batch.spec_info
            n = spec.draft_token_num
            tree = None if spec.tree_topk == 1 else spec.custom_mask.view(-1, n, n)
            self.see(forward_batch.req_pool_indices, forward_batch.seq_lens, n, tree)
        elif mode.is_draft_extend_v2():
            n = forward_batch.spec_info.num_tokens_per_req
            self.see(forward_batch.req_pool_indices, forward_batch.seq_lens - n, n)
        elif mode.is_extend() and not any(forward_batch.extend_prefix_lens_cpu or [1]):
            self.lengths = [int(n) for n in forward_batch.extend_seq_lens_cpu]

    def see(self, requests, before, n: int, tree=None) -> None:
        """Set which keys the `n` query tokens of each request see.

        All of them see the `before` [R] tokens of their request. Of the `n`, each sees itself and
        those in front of it, or what `tree` [R, n, n] says.
        """
        # [R, L]: the key's place among the query tokens; negative before them
        column = torch.arange(int(before.max()) + n) - before[:, None]
        slots = self.req_to_token_pool.req_to_token[requests, : column.shape[1]].long()
        self.slots = slots.where(column < n, 0)
        if tree is None:
            self.seen = column[:, None] <= torch.arange(n)[:, None]
        else:
            own = column.clamp(0, n - 1)[:, None].expand(-1, n, -1)
            self.seen = (column < 0)[:, None] | ((column < n)[:, None] & tree.gather(2, own))

    def _plain(self, layer) -> bool:
        window = layer.sliding_window_size
        ordinary = (
            not layer.is_cross_attention
            and layer.attn_type == AttentionType.DECODER
            and layer.qk_head_dim == layer.v_head_dim
        )
        return ordinary and (window is None or window < 0)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if self.slots is None or not (self._plain(layer) or mla.absorbed(layer)) or k is None:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._padded(q, k, v, layer, forward_batch, save_kv_cache)

    def _padded(self, q, k, v, layer, forward_batch, save_kv_cache):
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v
            )
        requests, n, _ = self.seen.shape
        kv_heads = layer.tp_k_head_num
        q = q.reshape(requests, n, kv_heads, -1, layer.qk_head_dim).transpose(1, 2)
        # [R, Hk, n * G, E]: a group of heads shares a key head
        q = q.reshape(requests, kv_heads, -1, layer.qk_head_dim)
        group = q.shape[2] // n
        if group not in self.masks:
            seen = self.seen if n == 1 else self.seen.repeat_interleave(group, 1)
            self.masks[group] = seen[:, None]
        pool = self.token_to_kv_pool
        keys = self._gather(pool.get_key_buffer(layer.layer_id), kv_heads, q)
        values = self._gather(pool.get_value_buffer(layer.layer_id), kv_heads, q)
        out = scaled_dot_product_attention(
            q, keys, values, attn_mask=self.masks[group], scale=layer.scaling
        )  # [R, Hk, n * G, E]
        return out.view(requests, kv_heads, n, group, -1).transpose(1, 2).reshape(requests * n, -1)

    def _gather(self, buffer, kv_heads: int, q):
        """Return the rows [R, Hk, L, E] of a pool's buffer [slots, Hk, E].

        index_select copies whole rows: 8 times as fast as indexing with `self.slots`.
        """
        rows = buffer.view(len(buffer), -1).index_select(0, self.slots.flatten())  # [R * L, Hk * E]
        return rows.view(*self.slots.shape, kv_heads, -1).transpose(1, 2).to(q.dtype)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if self.slots is not None:
            if not (self._plain(layer) or mla.absorbed(layer)) or k is None:
                raise NotImplementedError(
                    "eyas_cpu: speculative decoding of layers with a sliding window"
                    " or cross-attention"
                )
            return self._padded(q, k, v, layer, forward_batch, save_kv_cache)
        fits = self.lengths is not None and sum(self.lengths) == len(q)
        if fits and mla.explicit(q, k, v, layer):
            return mla.prefill(q, k, v, layer, self.lengths)
        if not fits or not self._plain(layer) or k is None:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v
            )
        out = torch.empty_like(q)
        queries, keys, values, rows = (
            x.view(len(q), -1, layer.qk_head_dim).transpose(0, 1) for x in (q, k, v, out)
        )  # [heads, S, E]
        start = 0
        for length in self.lengths:
            part = slice(start, start + length)
            rows[:, part] = scaled_dot_product_attention(
                queries[None, :, part],
                keys[None, :, part],
                values[None, :, part],
                is_causal=True,
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )[0]
            start += length
        return out


class PlainDraftAttention:
    """Attend in draft decode, one backend a level.

    Level i + 1 of the drafts comes from the tokens of level i: `topk` branches of each request, in
    `attn_backends[i]`.

    A branch's keys are in slots of its own after the committed tokens, `steps` for each branch, as
    `EagleDraftWorker.draft_forward` writes them. They stay there when a level keeps two children of
    one branch and none of another. So deeper levels of a tree see keys of what was there before;
    SGLang's own backends do the same. That changes what is proposed, never what is accepted.
    """

    def __init__(self, runner, topk: int, steps: int):
        self.topk = topk
        self.steps = steps
        self.attn_backends = [PlainAttention(runner) for _ in range(steps - 1)]

    def init_forward_metadata(self, forward_batch):
        committed = forward_batch.seq_lens  # [R]
        longest = int(committed.max())
        requests = forward_batch.req_pool_indices
        rows = self.attn_backends[0].req_to_token_pool.req_to_token
        inside = torch.arange(longest) < committed[:, None]  # [R, L]
        shared = rows[requests, :longest].long().where(inside, 0)  # [R, L]
        shared = shared.repeat_interleave(self.topk, 0)  # [R * topk, L]
        inside = inside.repeat_interleave(self.topk, 0)
        own = window(rows, requests, committed, self.topk * self.steps)
        own = own.view(-1, self.steps)  # [R * topk, steps]
        for step, backend in enumerate(self.attn_backends, start=1):
            backend.masks = {}
            backend.swa_out_cache_loc = None
            backend.lengths = None
            backend.slots = torch.cat([shared, own[:, :step]], 1)  # [R * topk, L + step]
            seen = torch.cat([inside, inside.new_ones(len(own), step)], 1)
            backend.seen = seen[:, None]  # [R * topk, 1, L + step]
