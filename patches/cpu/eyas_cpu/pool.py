"""The KV cache on the plain CPU: SGLang's own pool, whose rows move by indexing and not by a Triton kernel."""

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, move_kv_cache_native


class PlainKVPool(MHATokenToKVPool):
    """Rows move where a tree's accepted path is brought to the front of its window."""

    def _init_kv_copy_and_warmup(self):
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc, src_loc):
        move_kv_cache_native(self.k_buffer, self.v_buffer, tgt_loc, src_loc)
