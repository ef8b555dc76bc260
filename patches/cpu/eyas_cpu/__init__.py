"""SGLang platform plugin: a plain CPU, plain torch kernels, nothing from a vendor.

SGLang's own CPU engine (SGLANG_USE_CPU_ENGINE=1) imports kernels that the PyPI wheel does not carry. An out-of-tree
platform takes the `native` (plain torch) path of every layer instead. Chosen by SGLANG_PLATFORM=eyas_cpu.
A server that is given a drafter (--speculative-algorithm EAGLE3) drafts chains and trees with it: `eyas_cpu.eagle`.
"""

import multiprocessing
import os

VERSION = "0.2.0"
SGLANG_VERSIONS = ("0.5.23",)


def activate() -> str | None:
    """Entry point `sglang.srt.platforms`: the class to use, or None where this platform was not asked for.

    None keeps a GPU box with this package installed on its own platform.
    """
    if os.environ.get("SGLANG_PLATFORM") != "eyas_cpu":
        return None
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.entrypoints.engine._set_envs_and_config", _fork, HookType.AFTER
    )
    return "eyas_cpu.platform.PlainCpuPlatform"


def _fork(result, *_):
    """SGLang's other processes begin as copies of the first, which has everything imported, half a minute of CPU time. It spawns them since CUDA takes no fork."""
    multiprocessing.set_start_method("fork", force=True)


def check() -> dict:
    """Is this plugin found, for this SGLang, does it apply, and is everything there that drafting replaces? Run with SGLANG_PLATFORM=eyas_cpu in a
    process of its own; imports SGLang's EAGLE worker."""
    from importlib.metadata import version

    sglang = version("sglang")
    found = {"name": "eyas_cpu", "version": VERSION, "sglang": sglang, "ok": False, "detail": ""}
    if sglang not in SGLANG_VERSIONS:
        return found | {"detail": f"made for SGLang {', '.join(SGLANG_VERSIONS)}, found {sglang}"}
    from sglang.srt.platforms import current_platform

    if type(current_platform).__name__ != "PlainCpuPlatform":
        return found | {
            "detail": f"SGLang chose the platform {type(current_platform).__name__}; set SGLANG_PLATFORM=eyas_cpu"
        }
    from eyas_cpu.eagle import OPS, missing, worker_class

    worker_class()
    platform = type(current_platform)
    gone = [
        name
        for name in vars(platform)
        if not name.startswith("_") and not any(hasattr(base, name) for base in platform.__bases__)
    ] + missing()
    if gone:
        return found | {
            "detail": f"not as in SGLang {', '.join(SGLANG_VERSIONS)}: {', '.join(gone)}"
        }
    return found | {
        "ok": True,
        "detail": f"SGLang runs on the plain CPU platform; EAGLE3: {len(OPS)} functions to put in place",
    }
