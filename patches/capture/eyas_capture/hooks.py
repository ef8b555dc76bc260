"""Capture rows inside SGLang's scheduler process: the functions that HOOKS names.

Axis names: S tokens of the batch, T tokens of one request, H hidden size.
"""

import contextlib
import inspect
import json
import logging
import os
import queue
import tempfile
import threading
from pathlib import Path

import torch

from eyas_capture import SGLANG_VERSIONS, VERSION

logger = logging.getLogger("eyas_capture")
_capture: "Capture | None" = None
FAILURES_KEPT = 256  # files that could not be written, for /server_info
QUOTA_BYTES = 4 * 2**30  # of the spool, if EYAS_CAPTURE names no quota


class Spool:
    """Write files for the clients in a thread, so that the scheduler never waits for a disk.

    What is queued, and what is in the folder and not yet taken by a client, is at most `quota`
    bytes. Beyond that a request is told to come again.
    """

    def __init__(self, folder: str, quota: int):
        self.folder = Path(folder)
        self.quota = quota
        self.folder.mkdir(parents=True, exist_ok=True)
        self.queued_bytes = 0
        self.written = 0
        self.failures: dict[str, str] = {}  # name -> why its file could not be written
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="eyas-spool", daemon=True).start()

    def room(self, n_bytes: int) -> bool:
        """Return whether `n_bytes` more fit into the quota."""
        return self.queued_bytes + self.lying_bytes() + n_bytes <= self.quota

    def lying_bytes(self) -> int:
        """Return the bytes in the folder that no client has taken."""
        total = 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # a client has just taken it
                    total += entry.stat().st_size
        return total

    def put(self, name: str, tensors: dict[str, torch.Tensor]) -> Path:
        """Queue a file and return its future path; on failure, `failures[name]` has the reason."""
        with self._lock:
            self.queued_bytes += sum(t.nbytes for t in tensors.values())
        self._queue.put((name, tensors))
        return self.folder / f"{name}.safetensors"

    def _run(self) -> None:
        while True:
            name, tensors = self._queue.get()
            try:
                self._write(name, tensors)
                self.written += 1
            except Exception as error:
                logger.exception("eyas_capture: %s", name)
                while len(self.failures) >= FAILURES_KEPT:
                    self.failures.pop(next(iter(self.failures)))
                self.failures[name] = f"{type(error).__name__}: {error}"
            with self._lock:
                self.queued_bytes -= sum(t.nbytes for t in tensors.values())
            del tensors

    def _write(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        # save_file uses a temporary name of its own, so it gets a folder of its own.
        with tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=self.folder) as temporary:
            rows = Path(temporary) / "rows"
            save_file(tensors, rows)
            os.replace(rows, self.folder / f"{name}.safetensors")


class Capture:
    """Hold the pre-hooks on one model, and the rows of the running batch."""

    def __init__(self, model: torch.nn.Module, boundaries: list[int], spool: Spool):
        self.layers, self.norm = find_stack(model)
        self.n_blocks = len(self.layers)
        self.boundaries = tuple(boundaries)
        if not self.boundaries or not all(0 <= b <= self.n_blocks for b in self.boundaries):
            raise RuntimeError(
                f"eyas_capture: boundaries {list(self.boundaries)} outside"
                f" 0..{self.n_blocks} of this model"
            )
        self.hidden_size = self.norm.weight.shape[-1]
        self.spool = spool
        self.writes = _is_writer()
        self.armed = False
        self.rows: dict[int, torch.Tensor] = {}  # boundary -> [S, H] of the running batch
        self.captured = 0
        self.failed = 0
        for b in self.boundaries:
            if b < self.n_blocks:
                block = self.layers[b]
                hook = self._block_hook(b, inspect.signature(block.forward))
                block.register_forward_pre_hook(hook, with_kwargs=True)
            else:
                self.norm.register_forward_pre_hook(self._norm_hook, with_kwargs=True)

    def _block_hook(self, b: int, signature: inspect.Signature):
        """Return a hook that takes the residual stream that enters block b.

        SGLang's own `StageBoundary.capture_output` takes it. It may sum over the tensor-parallel
        ranks, so every rank calls it; only the rank that writes keeps the rows.
        """

        def hook(block, args, kwargs):
            if not self.armed:
                return None
            bound = signature.bind(*args, **kwargs)
            handle, rows = block.attn_boundary.capture_output(
                bound.arguments["hidden_states"], bound.arguments["forward_batch"]
            )
            if self.writes:
                self.rows[b] = rows  # [S, H]
            bound.arguments["hidden_states"] = handle
            return bound.args, bound.kwargs

        return hook

    def _norm_hook(self, norm, args, kwargs):
        """Take boundary N: the sum of the last block's output and the residual.

        The final norm is given these two, and norms their sum.
        """
        if not (self.armed and self.writes):
            return
        hidden = args[0]  # [S, H]
        residual = args[1] if len(args) > 1 else kwargs.get("residual")
        self.rows[self.n_blocks] = hidden.clone() if residual is None else hidden + residual

    def whole(self, req, start: int, rows: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a request that was prefilled in one piece.

        Raise RuntimeError if there is not one row for each prompt token.
        """
        expected = len(req.origin_input_ids)
        if rows != expected:
            raise RuntimeError(
                f"{rows} rows for {expected} prompt tokens: prefix cache or chunked prefill is on"
            )
        ids = torch.tensor(list(req.origin_input_ids), dtype=torch.int64)  # [T]
        return {"input_ids": ids} | self._rows_of(start, rows)

    def piece(self, req, position: int, start: int, rows: int) -> dict[str, torch.Tensor]:
        """Return the tensors that this pass computed of a request, from `position` on."""
        ids = [*req.origin_input_ids, *req.output_ids][position : position + rows]
        where = {
            "positions": torch.arange(position, position + rows),
            "input_ids": torch.tensor(ids, dtype=torch.int64),
        }
        return where | self._rows_of(start, rows)

    def _rows_of(self, start: int, rows: int) -> dict[str, torch.Tensor]:
        """Return `rows` rows of every boundary from `start` of the batch on."""
        missing = [b for b in self.boundaries if b not in self.rows]
        if missing:
            raise RuntimeError(
                f"no rows of boundary {missing[0]}: hooks do not run inside a CUDA graph"
            )
        end = start + rows
        return {f"boundary_{b}": self.rows[b][start:end] for b in self.boundaries}  # [T, H] each

    def hand_over(self, name: str, gather) -> dict:
        """Pass what `gather()` returns to the spool.

        Return {"path", "rows", "boundaries"}, or {"error"} with "again" true if the request is not
        at fault.
        """
        try:
            plain = isinstance(name, str) and name and name == Path(name).name
            if not plain or name.startswith("."):
                raise RuntimeError(f"capture name {name!r} is not a plain file name")
            tensors = gather()
            n_bytes = sum(t.nbytes for t in tensors.values())
            quota = self.spool.quota
            if n_bytes > quota:
                raise RuntimeError(
                    f"{n_bytes:,} bytes of one request are more than the spool's quota of {quota:,}"
                )
            if not self.spool.room(n_bytes):
                return {
                    "error": f"the spool is full: {quota:,} bytes are queued or not yet taken",
                    "again": True,
                }
            on_host = {key: tensor.to("cpu").contiguous() for key, tensor in tensors.items()}
            path = self.spool.put(name, on_host)
            self.captured += 1
            return {
                "path": str(path),
                "rows": len(tensors["input_ids"]),
                "boundaries": list(self.boundaries),
            }
        except Exception as error:
            self.failed += 1
            logger.exception("eyas_capture: %s", name)
            return {
                "error": f"{type(error).__name__}: {error}",
                "again": isinstance(error, OSError),
            }


def find_stack(model: torch.nn.Module) -> tuple[torch.nn.ModuleList, torch.nn.Module]:
    """Return the decoder blocks and the final norm.

    They are in the one module that has both `layers` and `norm`, wherever it is nested. Raise
    RuntimeError if there is none, or if its blocks cannot be hooked.
    """
    for _, module in model.named_modules():
        layers = getattr(module, "layers", None)
        norm = getattr(module, "norm", None)
        if isinstance(layers, torch.nn.ModuleList) and isinstance(norm, torch.nn.Module):
            fault = _hook_fault(layers)
            if fault:
                raise RuntimeError(
                    f"eyas_capture {VERSION} cannot hook {type(module).__name__}: {fault}"
                )
            return layers, norm
    raise RuntimeError(f"eyas_capture {VERSION} finds no decoder stack in {type(model).__name__}")


def _hook_fault(layers: torch.nn.ModuleList) -> str:
    """Return why decoder blocks cannot be hooked, in words; empty if they can."""
    without = {type(block).__name__ for block in layers if not hasattr(block, "attn_boundary")}
    if without:
        return f"no stage boundary on {', '.join(sorted(without))}"
    needed = {"hidden_states", "forward_batch"}
    without = {
        type(block).__name__
        for block in layers
        if not needed <= {*inspect.signature(block.forward).parameters}
    }
    if without:
        names = ", ".join(sorted(without))
        return f"forward of {names} names no hidden_states and forward_batch"
    return ""


def _is_writer() -> bool:
    """Return whether this process writes: every tensor-parallel rank runs this code, one writes."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().attn_tp_rank == 0


def install(original, scheduler, *args, **kwargs):
    """Wrap `Scheduler.init_model_worker`: put the pre-hooks on the loaded model.

    Without boundaries nothing is captured: then the plugin only reports what feeds the drafter.
    Raise RuntimeError if the model cannot be hooked.
    """
    global _capture
    result = original(scheduler, *args, **kwargs)
    settings = json.loads(os.environ["EYAS_CAPTURE"])
    if not settings["boundaries"]:
        return result
    spool = Spool(settings["spool"], settings.get("quota", QUOTA_BYTES))
    _capture = Capture(scheduler.tp_worker.model_runner.model, settings["boundaries"], spool)
    logger.info(
        "eyas_capture %s: boundaries %s of %d blocks",
        VERSION,
        list(_capture.boundaries),
        _capture.n_blocks,
    )
    return result


def run_batch(original, scheduler, batch, *args, **kwargs):
    """Wrap `Scheduler.run_batch`: take the rows of a pass in which a request asks for them."""
    extends = batch.forward_mode.is_extend()
    if _capture is None or not (extends or batch.forward_mode.is_decode()):
        return original(scheduler, batch, *args, **kwargs)
    options = [req.sampling_params.custom_params or {} for req in batch.reqs]
    if not any(o.get("eyas_capture") and (extends or o.get("as_computed")) for o in options):
        return original(scheduler, batch, *args, **kwargs)
    if extends:
        lengths = [int(n) for n in batch.extend_lens]
        positions = list(batch.prefix_lens)
    else:
        lengths = [1 for _ in batch.reqs]
        positions = [req.seqlen - 1 for req in batch.reqs]
    slots = batch.req_pool_indices
    _capture.armed = True
    try:
        result = original(scheduler, batch, *args, **kwargs)
        start = 0
        for i, (req, option, position, rows) in enumerate(
            zip(batch.reqs, options, positions, lengths, strict=True)
        ):
            name = option.get("eyas_capture")
            if option.get("as_computed") and name:
                _as_computed(scheduler, result, i, slots[i], req, option, position, start, rows)
            elif name and extends and _capture.writes:
                answer = _capture.hand_over(name, lambda: _capture.whole(req, start, rows))
                req.customized_info = (req.customized_info or {}) | {"eyas_capture": [answer]}
            start += rows
        return result
    finally:
        _capture.armed = False
        _capture.rows.clear()


def _as_computed(
    scheduler,
    result,
    i: int,
    slot: torch.Tensor,
    req,
    option: dict,
    position: int,
    start: int,
    rows: int,
) -> None:
    """Keep the rows of one pass of a request; hand over all of them with its last pass.

    `follow` of the request's options: token ids that replace those it would generate, so that given
    tokens are decoded.
    """
    pieces = req.__dict__.setdefault("eyas_pieces", [])
    if _capture.writes:
        try:
            pieces.append(_capture.piece(req, position, start, rows))
        except RuntimeError as error:  # raised when the pieces are handed over
            pieces.append(error)
    if position + rows < req.seqlen:  # a chunk, after which no token is generated
        return
    n = len(req.output_ids)
    follow = option.get("follow") or []
    if n < len(follow):
        result.next_token_ids[i] = follow[n]
        # The next pass reads its input here.
        scheduler.future_map.output_tokens_buf[slot] = follow[n]
    if n + 1 >= req.sampling_params.max_new_tokens and _capture.writes:
        answer = _capture.hand_over(option["eyas_capture"], lambda: _joined(pieces))
        req.customized_info = (req.customized_info or {}) | {"eyas_capture": [answer]}
        del req.eyas_pieces


def _joined(pieces: list) -> dict[str, torch.Tensor]:
    """Return the pieces of a request as one. Raise the first error among them."""
    for piece in pieces:
        if isinstance(piece, RuntimeError):
            raise piece
    return {key: torch.cat([piece[key] for piece in pieces]) for key in pieces[0]}


def accepted(original, processor, result, batch):
    """Wrap `SchedulerBatchResultProcessor._resolve_spec_v2_tokens`: report each verify step.

    SGLang itself only keeps sums. For requests that ask, `meta_info.eyas_accepted` has a value for
    every output token: the accepted draft tokens of the verify step that begins there, or None.
    """
    asked = [
        (i, req)
        for i, req in enumerate(batch.reqs)
        if (req.sampling_params.custom_params or {}).get("eyas_accepted")
        and not (req.finished() or req.is_retracted)
    ]
    tokens = original(processor, result, batch)
    for i, req in asked:
        n = result.num_correct_drafts_per_req_cpu[i]
        steps = (req.customized_info or {}).get("eyas_accepted", [])
        steps.extend(None for _ in range(len(req.output_ids) - len(steps)))
        steps.append(n)
        steps.extend(None for _ in range(n))
        req.customized_info = (req.customized_info or {}) | {"eyas_accepted": steps}
    return tokens


def drafter_state(scheduler) -> dict | None:
    """Return what the running target gives the drafter; None if no model drafts (n-grams).

    boundaries: those in front of which the target's blocks hand out their residual stream. They are
    read from the loaded model (`layers_to_capture`, which holds boundaries in every family).
    ids: the layer ids that the drafter's checkpoint asked for.
    """
    runner = getattr(getattr(scheduler.draft_worker, "draft_worker", None), "draft_runner", None)
    if runner is None:
        return None
    target = scheduler.tp_worker.model_runner.model
    of_modules = (getattr(module, "layers_to_capture", None) for module in target.modules())
    captured = next(filter(None, of_modules), [])
    config = runner.model_config.hf_config
    ids = (getattr(config, "eagle_config", None) or {}).get(
        "eagle_aux_hidden_state_layer_ids",
        getattr(config, "eagle_aux_hidden_state_layer_ids", None),
    )
    return {"boundaries": sorted(set(captured)), "ids": ids, "model": type(runner.model).__name__}


def internal_state(original, scheduler, *args, **kwargs):
    """Wrap `Scheduler.get_internal_state`: add what `/server_info` shows of this plugin."""
    result = original(scheduler, *args, **kwargs)
    if (drafter := drafter_state(scheduler)) is not None:
        result.internal_state["eyas_drafter"] = drafter
    if _capture is not None:
        result.internal_state["eyas_capture"] = {
            "version": VERSION,
            "sglang_versions": list(SGLANG_VERSIONS),
            "boundaries": list(_capture.boundaries),
            "n_blocks": _capture.n_blocks,
            "hidden_size": _capture.hidden_size,
            "spool": str(_capture.spool.folder),
            "quota": _capture.spool.quota,
            "queued_bytes": _capture.spool.queued_bytes,
            "captured": _capture.captured,
            "written": _capture.spool.written,
            "failed": _capture.failed + len(_capture.spool.failures),
            "failures": dict(_capture.spool.failures),
        }
    return result
