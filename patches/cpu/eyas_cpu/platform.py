"""Define the platform class that SGLang loads in each of its processes."""

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Present a CPU as an out-of-tree device, so that SGLang asks for no CPU kernel package."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()  # no Triton, no graphs

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_kv_pool_cls(self, *, kind) -> type | None:
        if kind != "mha":
            return None
        from eyas_cpu.pool import PlainKVPool

        return PlainKVPool

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "EAGLE3"

    def get_speculative_worker_cls(self, algorithm: str) -> type:
        from eyas_cpu.eagle import worker_class

        return worker_class()

    def get_speculative_cache_locs_fn(self):
        from eyas_cpu.eagle import verify_slots

        return verify_slots

    def is_pin_memory_available(self, device=None) -> bool:
        return False

    def post_load_model(self, model) -> None:
        from eyas_cpu.linear import use_in

        use_in(model)

    def init_backend(self) -> None:
        """Register our attention in each worker, before a model runner chooses one."""
        from sglang.srt.layers.attention import attention_registry

        attention_registry.ATTENTION_BACKENDS["torch_native"] = _plain_attention


def _plain_attention(runner):
    from eyas_cpu.attention import PlainAttention

    return PlainAttention(runner)
