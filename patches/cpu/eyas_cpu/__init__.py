"""Serve on a plain CPU with plain torch kernels: an SGLang platform plugin.

- SGLang's own CPU engine (SGLANG_USE_CPU_ENGINE=1) imports kernels that the PyPI wheel does not
  contain. An out-of-tree platform takes the `native` (plain torch) path of every layer instead.
- SGLANG_PLATFORM=eyas_cpu selects it.
- A server with a drafter (--speculative-algorithm EAGLE3) drafts chains and trees; see
  `eyas_cpu.eagle`.
"""

import multiprocessing
import os

VERSION = "0.2.0"
SGLANG_VERSIONS = ("0.5.23",)


def activate() -> str | None:
    """Return the platform class to use: entry point `sglang.srt.platforms`.

    Return None if this platform is not selected. So a GPU machine with this package keeps its own
    platform.
    """
    if os.environ.get("SGLANG_PLATFORM") != "eyas_cpu":
        return None
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.entrypoints.engine._set_envs_and_config", _fork, HookType.AFTER
    )
    return "eyas_cpu.platform.PlainCpuPlatform"


def _fork(result, *_):
    """Start SGLang's other processes as copies of the first, which has imported everything.

    That saves half a minute of CPU time for each. SGLang spawns them, because CUDA forbids a fork.
    """
    multiprocessing.set_start_method("fork", force=True)


def check() -> dict:
    """Check that the plugin fits the installed SGLang, and that all functions it replaces exist.

    Run it with SGLANG_PLATFORM=eyas_cpu in a process of its own: it imports SGLang's EAGLE worker.
    """
    from importlib.metadata import version

    sglang = version("sglang")
    result = {"name": "eyas_cpu", "version": VERSION, "sglang": sglang, "ok": False, "detail": ""}
    if sglang not in SGLANG_VERSIONS:
        return result | {"detail": f"made for SGLang {', '.join(SGLANG_VERSIONS)}, found {sglang}"}
    from sglang.srt.platforms import current_platform

    if type(current_platform).__name__ != "PlainCpuPlatform":
        return result | {
            "detail": f"SGLang chose the platform {type(current_platform).__name__};"
            " set SGLANG_PLATFORM=eyas_cpu"
        }
    from eyas_cpu.eagle import OPS, missing, worker_class

    worker_class()
    platform = type(current_platform)
    ours = [name for name in vars(platform) if not name.startswith("_")]
    gone = [name for name in ours if not any(hasattr(b, name) for b in platform.__bases__)]
    gone += missing()
    if gone:
        return result | {
            "detail": f"not as in SGLang {', '.join(SGLANG_VERSIONS)}: {', '.join(gone)}"
        }
    return result | {
        "ok": True,
        "detail": "SGLang runs on the plain CPU platform;"
        f" EAGLE3: {len(OPS)} functions to put in place",
    }
