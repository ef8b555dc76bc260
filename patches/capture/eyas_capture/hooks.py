"""What the three hooks do, inside SGLang's scheduler process. Axis names: S tokens of the batch, T of one request, H hidden."""

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
FAILURES_KEPT = 256
QUOTA_BYTES = 4 * 2**30  # of the spool, where EYAS_CAPTURE names none


class Spool:
    """Files for the clients, written by a thread of its own, so that the scheduler never waits for a disk.

    What is queued and what lies in the folder, not yet taken by a client, is at most `quota` bytes: beyond that a request is told to come again.
    """

    def __init__(self, folder: str, quota: int):
        self.folder, self.quota = Path(folder), quota
        self.folder.mkdir(parents=True, exist_ok=True)
        self.queued_bytes = 0
        self.written = 0
        self.failures: dict[str, str] = {}  # name -> why its file will never come
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="eyas-spool", daemon=True).start()

    def room(self, n_bytes: int) -> bool:
        return self.queued_bytes + self.lying_bytes() + n_bytes <= self.quota

    def lying_bytes(self) -> int:
        total = 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # a client has just taken it
                    total += entry.stat().st_size
        return total

    def put(self, name: str, tensors: dict[str, torch.Tensor]) -> Path:
        """The path at which the file will be seen, complete; or `failures[name]` will say why not."""
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

        with tempfile.TemporaryDirectory(
            prefix=".", suffix=".tmp", dir=self.folder
        ) as temporary:  # save_file has a temporary name of its own
            save_file(tensors, Path(temporary) / "rows")
            os.replace(Path(temporary) / "rows", self.folder / f"{name}.safetensors")


class Capture:
    """The pre-hooks on one model, and the rows of the batch that is running."""

    def __init__(self, model: torch.nn.Module, boundaries: list[int], spool: Spool):
        self.layers, self.norm = find_stack(model)
        self.n_blocks = len(self.layers)
        self.boundaries = tuple(boundaries)
        if not self.boundaries or not all(0 <= b <= self.n_blocks for b in self.boundaries):
            raise RuntimeError(
                f"eyas_capture: boundaries {list(self.boundaries)} outside 0..{self.n_blocks} of this model"
            )
        self.hidden_size = self.norm.weight.shape[-1]
        self.spool = spool
        self.writes = _is_writer()
        self.armed = False
        self.rows: dict[int, torch.Tensor] = {}  # boundary -> [S, H] of the running batch
        self.captured = self.failed = 0
        for b in self.boundaries:
            if b < self.n_blocks:
                block = self.layers[b]
                block.register_forward_pre_hook(
                    self._block_hook(b, inspect.signature(block.forward)), with_kwargs=True
                )
            else:
                self.norm.register_forward_pre_hook(self._norm_hook, with_kwargs=True)

    def _block_hook(self, b: int, signature: inspect.Signature):
        """The residual stream that enters block b, taken as SGLang's own `StageBoundary.capture_output` does."""

        def hook(block, args, kwargs):
            if not self.armed:
                return None
            bound = signature.bind(*args, **kwargs)
            handle, rows = block.attn_boundary.capture_output(
                bound.arguments["hidden_states"], bound.arguments["forward_batch"]
            )
            self.rows[b] = rows  # [S, H]
            bound.arguments["hidden_states"] = handle
            return bound.args, bound.kwargs

        return hook

    def _norm_hook(self, norm, args, kwargs):
        """Boundary N: the final norm is given the last block's output and the residual; their sum is what it normalises."""
        if self.armed:
            hidden, residual = args[0], args[1] if len(args) > 1 else kwargs.get("residual")
            self.rows[self.n_blocks] = (
                hidden.clone() if residual is None else hidden + residual
            )  # [S, H]

    def whole(self, req, start: int, rows: int) -> dict[str, torch.Tensor]:
        """What a file holds of a request that was prefilled in one piece."""
        expected = len(req.origin_input_ids)
        if rows != expected:
            raise RuntimeError(
                f"{rows} rows for {expected} prompt tokens: prefix cache or chunked prefill is on"
            )
        return {
            "input_ids": torch.tensor(list(req.origin_input_ids), dtype=torch.int64)
        } | self._rows_of(start, rows)

    def piece(self, req, position: int, start: int, rows: int) -> dict[str, torch.Tensor]:
        """The same of whatever this forward pass computed of a request, from `position` of its sequence on."""
        ids = [*req.origin_input_ids, *req.output_ids][position : position + rows]
        where = {
            "positions": torch.arange(position, position + rows),
            "input_ids": torch.tensor(ids, dtype=torch.int64),
        }
        return where | self._rows_of(start, rows)

    def _rows_of(self, start: int, rows: int) -> dict[str, torch.Tensor]:
        missing = [b for b in self.boundaries if b not in self.rows]
        if missing:
            raise RuntimeError(
                f"no rows of boundary {missing[0]}: hooks do not run inside a CUDA graph"
            )
        return {
            f"boundary_{b}": self.rows[b][start : start + rows] for b in self.boundaries
        }  # [T, H] each

    def hand_over(self, name: str, gather) -> dict:
        """What `gather()` gives, to the spool: {"path", "rows", "boundaries"}; or {"error"}, with "again" where the request is not to blame."""
        try:
            if (
                not isinstance(name, str)
                or not name
                or name != Path(name).name
                or name.startswith(".")
            ):
                raise RuntimeError(f"capture name {name!r} is not a plain file name")
            tensors = gather()
            n_bytes = sum(t.nbytes for t in tensors.values())
            if n_bytes > self.spool.quota:
                raise RuntimeError(
                    f"{n_bytes:,} bytes of one request are more than the spool's quota of {self.spool.quota:,}"
                )
            if not self.spool.room(n_bytes):
                return {
                    "error": f"the spool is full: {self.spool.quota:,} bytes are queued or not yet taken",
                    "again": True,
                }
            path = self.spool.put(
                name, {key: tensor.to("cpu").contiguous() for key, tensor in tensors.items()}
            )
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
    """The decoder blocks and the final norm: the one module that has both `layers` and `norm`, wherever it is nested."""
    for _, module in model.named_modules():
        layers, norm = getattr(module, "layers", None), getattr(module, "norm", None)
        if isinstance(layers, torch.nn.ModuleList) and isinstance(norm, torch.nn.Module):
            without = sorted(
                {type(block).__name__ for block in layers if not hasattr(block, "attn_boundary")}
            )
            if without:
                raise RuntimeError(
                    f"eyas_capture {VERSION} cannot hook {type(module).__name__}: no stage boundary on {', '.join(without)}"
                )
            without = sorted(
                {
                    type(block).__name__
                    for block in layers
                    if not {"hidden_states", "forward_batch"}
                    <= {*inspect.signature(block.forward).parameters}
                }
            )
            if without:
                raise RuntimeError(
                    f"eyas_capture {VERSION} cannot hook {type(module).__name__}: forward of {', '.join(without)} names no hidden_states and forward_batch"
                )
            return layers, norm
    raise RuntimeError(f"eyas_capture {VERSION} finds no decoder stack in {type(model).__name__}")


def _is_writer() -> bool:
    """Every tensor-parallel rank runs this code; one of them writes."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().attn_tp_rank == 0


def install(original, scheduler, *args, **kwargs):
    """Around `Scheduler.init_model_worker`: the model is loaded, so put the pre-hooks on it. Raises when that cannot be done.

    Without boundaries nothing is captured: then the plugin only tells what feeds the drafter.
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
    """Around `Scheduler.run_batch`: take the rows of a forward pass in which a request asks for them."""
    extends = batch.forward_mode.is_extend()
    if _capture is None or not (extends or batch.forward_mode.is_decode()):
        return original(scheduler, batch, *args, **kwargs)
    wishes = [req.sampling_params.custom_params or {} for req in batch.reqs]
    if not any(
        wish.get("eyas_capture") and (extends or wish.get("as_computed")) for wish in wishes
    ):
        return original(scheduler, batch, *args, **kwargs)
    lengths = [int(n) for n in batch.extend_lens] if extends else [1] * len(batch.reqs)
    positions = list(batch.prefix_lens) if extends else [req.seqlen - 1 for req in batch.reqs]
    slots = batch.req_pool_indices
    _capture.armed = True
    try:
        result = original(scheduler, batch, *args, **kwargs)
        start = 0
        for i, (req, wish, position, rows) in enumerate(
            zip(batch.reqs, wishes, positions, lengths, strict=True)
        ):
            if wish.get("as_computed") and wish.get("eyas_capture"):
                _as_computed(scheduler, result, i, slots[i], req, wish, position, start, rows)
            elif wish.get("eyas_capture") and extends and _capture.writes:
                answer = _capture.hand_over(
                    wish["eyas_capture"], lambda: _capture.whole(req, start, rows)
                )
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
    wish: dict,
    position: int,
    start: int,
    rows: int,
) -> None:
    """One pass of a request that wants its rows however they come: keep them with the request, and hand all of them over with its last pass.

    `follow`: token ids that take the place of those that it would generate, so that given tokens are decoded.
    """
    pieces = req.__dict__.setdefault("eyas_pieces", [])
    if _capture.writes:
        try:
            pieces.append(_capture.piece(req, position, start, rows))
        except RuntimeError as error:  # told when they are handed over
            pieces.append(error)
    if position + rows < req.seqlen:  # a chunk, after which no token is generated
        return
    n, follow = len(req.output_ids), wish.get("follow") or []
    if n < len(follow):
        result.next_token_ids[i] = follow[n]
        scheduler.future_map.output_tokens_buf[slot] = follow[
            n
        ]  # where the next pass finds its input
    if n + 1 >= req.sampling_params.max_new_tokens and _capture.writes:
        answer = _capture.hand_over(wish["eyas_capture"], lambda: _joined(pieces))
        req.customized_info = (req.customized_info or {}) | {"eyas_capture": [answer]}
        del req.eyas_pieces


def _joined(pieces: list) -> dict[str, torch.Tensor]:
    for piece in pieces:
        if isinstance(piece, RuntimeError):
            raise piece
    return {key: torch.cat([piece[key] for piece in pieces]) for key in pieces[0]}


def accepted(original, processor, result, batch):
    """Around `SchedulerBatchResultProcessor._resolve_spec_v2_tokens`: for requests that ask, what each verify step accepted, where SGLang keeps sums.

    `meta_info.eyas_accepted` has a value for every output token: the accepted drafts of the verify step that begins there, or None.
    """
    asked = [
        (i, req)
        for i, req in enumerate(batch.reqs)
        if (req.sampling_params.custom_params or {}).get("eyas_accepted")
        and not (req.finished() or req.is_retracted)
    ]
    tokens = original(processor, result, batch)
    for i, req in asked:
        told, n = (
            (req.customized_info or {}).get("eyas_accepted", []),
            result.num_correct_drafts_per_req_cpu[i],
        )
        told += [None] * (len(req.output_ids) - len(told)) + [n] + [None] * n
        req.customized_info = (req.customized_info or {}) | {"eyas_accepted": told}
    return tokens


def drafter_state(scheduler) -> dict | None:
    """None where no model drafts (n-grams). What the running target gives the drafter: the boundaries in front of which its blocks hand out their residual stream, read from the
    loaded model (`layers_to_capture`, in boundaries in every family), beside the ids that the drafter's checkpoint asked for."""
    runner = getattr(getattr(scheduler.draft_worker, "draft_worker", None), "draft_runner", None)
    if runner is None:
        return None
    target = scheduler.tp_worker.model_runner.model
    captured = next(
        (
            module.layers_to_capture
            for module in target.modules()
            if getattr(module, "layers_to_capture", None)
        ),
        [],
    )
    config = runner.model_config.hf_config
    ids = (getattr(config, "eagle_config", None) or {}).get(
        "eagle_aux_hidden_state_layer_ids",
        getattr(config, "eagle_aux_hidden_state_layer_ids", None),
    )
    return {"boundaries": sorted(set(captured)), "ids": ids, "model": type(runner.model).__name__}


def internal_state(original, scheduler, *args, **kwargs):
    """Around `Scheduler.get_internal_state`: what `/server_info` shows of this plugin."""
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
