"""Write the residual stream of the requests that ask for it: an SGLang plugin.

It is on if EYAS_CAPTURE holds {"boundaries": [2, 15, 27, 30], "spool": "/folder", "quota": bytes}.
Without that variable nothing is hooked.

A request asks by `sampling_params.custom_params = {"eyas_capture": "name"}`.

- Its answer has `meta_info.eyas_capture = [{"path": ..., "rows": T, "boundaries": [...]}]`, or
  `[{"error": ...}]` ("again": true if the same request may succeed later).
- The file at `path` is written in the background soon after, and is complete as soon as it exists:
  safetensors, `boundary_<b>` [T, H] in the dtype that the server computed, and `input_ids` [T].
- If the file cannot be written, `/server_info` has its name and the reason under `failures`.
- A request is refused if its rows would not be one for each prompt token, because prefix cache or
  chunked prefill took some away.

Two more options serve comparisons, never stores:

- `"as_computed": true` gives whatever the passes of a request compute, decoding too. `positions`
  [rows] names their tokens. Answer and file come with the last token (use `ignore_eos`, so that the
  answer has `max_new_tokens`).
- `"follow": [ids]` replaces the tokens that the request would generate, so that a given text is
  decoded. That needs a server without the overlap scheduler.

On a server that drafts, `{"eyas_accepted": true}` asks what each verify step accepted:
`meta_info.eyas_accepted` has a value for each output token. It is the number of accepted draft
tokens where a step begins, otherwise null.

Nothing of the installed SGLang is edited. The functions of HOOKS are wrapped. Once the model is
loaded, each captured block and the final norm get a forward pre-hook. It returns at once unless a
request of the running batch asked. SGLang only logs a hook that fails to apply. So `check()`, and
`Scheduler.get_internal_state` (shown by `python -m eyas server status`), report whether it is on.
"""

import json
import os
import sys

VERSION = "0.2.0"
SGLANG_VERSIONS = ("0.5.23",)
_RESULT_PROCESSOR = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
)
HOOKS = {  # dotted name -> function in eyas_capture.hooks
    "sglang.srt.managers.scheduler.Scheduler.init_model_worker": "install",
    "sglang.srt.managers.scheduler.Scheduler.run_batch": "run_batch",
    "sglang.srt.managers.scheduler.Scheduler.get_internal_state": "internal_state",
    f"{_RESULT_PROCESSOR}._resolve_spec_v2_tokens": "accepted",
}


def register() -> None:
    """Register the hooks: entry point `sglang.srt.plugins`, called in each process of SGLang.

    No module of SGLang may be imported here (SGLang only logs circular imports), so hooks are given
    by dotted names. An SGLang version that this plugin was not made for ends the process: serving
    without capture, and without a word, would be worse.
    """
    if not os.environ.get("EYAS_CAPTURE"):
        return
    from importlib.metadata import version

    if version("sglang") not in SGLANG_VERSIONS:
        print(
            f"eyas_capture {VERSION} is made for SGLang {', '.join(SGLANG_VERSIONS)},"
            f" found {version('sglang')}",
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
    """Check that the plugin fits the installed SGLang and that all its hooks apply.

    Run it in a process of its own: it imports SGLang's scheduler.
    """
    from importlib.metadata import version

    sglang = version("sglang")
    result = {
        "name": "eyas_capture",
        "version": VERSION,
        "sglang": sglang,
        "ok": False,
        "detail": "",
    }
    if sglang not in SGLANG_VERSIONS:
        return result | {"detail": f"made for SGLang {', '.join(SGLANG_VERSIONS)}, found {sglang}"}
    import importlib

    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    os.environ.setdefault("EYAS_CAPTURE", json.dumps({"boundaries": [], "spool": os.devnull}))
    load_plugins()
    importlib.import_module("sglang.srt.managers.scheduler")
    missing = [target for target in HOOKS if target not in HookRegistry._patched]
    if missing:
        return result | {"detail": "not applied: " + ", ".join(missing)}
    return result | {"ok": True, "detail": f"{len(HOOKS)} hooks applied"}
