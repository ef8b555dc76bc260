"""Hold the KV cache on the plain CPU: SGLang's own pool without its Triton kernel."""

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, move_kv_cache_native


class PlainKVPool(MHATokenToKVPool):
    """Move rows by indexing, to bring a tree's accepted path to the front of its window."""

    def _init_kv_copy_and_warmup(self):
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc, src_loc):
        move_kv_cache_native(self.k_buffer, self.v_buffer, tgt_loc, src_loc)
