"""SGLang plugin: write the residual stream of the requests that ask for it, one row per prompt token.

On when EYAS_CAPTURE holds {"boundaries": [2, 15, 27, 30], "spool": "/folder", "quota": bytes}; without it nothing is hooked.
A request asks by `sampling_params.custom_params = {"eyas_capture": "name"}`; its answer then carries
`meta_info.eyas_capture = [{"path": ..., "rows": T, "boundaries": [...]}]`, or `[{"error": ...}]` ("again": true where
the same request may succeed later). The file at `path` comes soon after, written in the background, and is complete
whenever it can be seen: safetensors, `boundary_<b>` [T, H] in the dtype that the server computed, and `input_ids` [T].
Should it fail to come, `/server_info` has its name and the reason under `failures`.

A request whose rows would not be one for each prompt token is refused: prefix cache or chunked prefill took some away. With
`"as_computed": true` beside the name it gets whatever its passes compute, decoding too, and `positions` [rows] says of which tokens; the
answer and the file come with its last token (`ignore_eos`, so that it is `max_new_tokens` long). `"follow": [ids]` are put in the place of
the tokens that it would generate: how a given text is decoded. That needs a server without the overlap scheduler. For comparisons, not for stores.

On a server that drafts, a request that asks by `{"eyas_accepted": true}` is told what each verify step accepted: `meta_info.eyas_accepted` has a
value for each output token, the number of accepted drafts where a step begins, else null.

Nothing of the installed SGLang is edited. Four functions are wrapped (HOOKS) and, once the model is loaded, a
forward pre-hook sits on each captured block and on the final norm; it returns at once unless a request of the
running batch asked. SGLang only logs a hook that fails to apply, so `check()` and `Scheduler.get_internal_state`
(read back by `python -m eyas server status`) say whether this one is on.
"""

import json
import os
import sys

VERSION = "0.2.0"
SGLANG_VERSIONS = ("0.5.23",)
HOOKS = {  # dotted name -> function in eyas_capture.hooks
    "sglang.srt.managers.scheduler.Scheduler.init_model_worker": "install",
    "sglang.srt.managers.scheduler.Scheduler.run_batch": "run_batch",
    "sglang.srt.managers.scheduler.Scheduler.get_internal_state": "internal_state",
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._resolve_spec_v2_tokens": "accepted",
}


def register() -> None:
    """Entry point `sglang.srt.plugins`, called in each of SGLang's processes while plugins load.

    No module of SGLang may be imported here (circular imports, which SGLang only logs): hooks go by dotted name.
    An SGLang version that this was not made for ends the process, since serving silently without capture is worse.
    """
    if not os.environ.get("EYAS_CAPTURE"):
        return
    from importlib.metadata import version

    if version("sglang") not in SGLANG_VERSIONS:
        print(
            f"eyas_capture {VERSION} is made for SGLang {', '.join(SGLANG_VERSIONS)}, found {version('sglang')}",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(3)
    json.loads(os.environ["EYAS_CAPTURE"])
    _register_hooks()


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, name in HOOKS.items():

        def late(original, *args, _name=name, **kwargs):
            from eyas_capture import hooks

            return getattr(hooks, _name)(original, *args, **kwargs)

        HookRegistry.register(target, late, HookType.AROUND)


def check() -> dict:
    """Is this plugin found, for this SGLang, and do all its hooks apply? Run in a process of its own; imports SGLang's scheduler."""
    from importlib.metadata import version

    sglang = version("sglang")
    found = {
        "name": "eyas_capture",
        "version": VERSION,
        "sglang": sglang,
        "ok": False,
        "detail": "",
    }
    if sglang not in SGLANG_VERSIONS:
        return found | {"detail": f"made for SGLang {', '.join(SGLANG_VERSIONS)}, found {sglang}"}
    import importlib

    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    os.environ.setdefault("EYAS_CAPTURE", json.dumps({"boundaries": [], "spool": os.devnull}))
    load_plugins()
    importlib.import_module("sglang.srt.managers.scheduler")
    missing = [target for target in HOOKS if target not in HookRegistry._patched]
    if missing:
        return found | {"detail": "not applied: " + ", ".join(missing)}
    return found | {"ok": True, "detail": f"{len(HOOKS)} hooks applied"}
