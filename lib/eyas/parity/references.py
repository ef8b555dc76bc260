"""The two independent references: the server itself, and Hugging Face's forward pass of the same weights."""

import json
import math
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import torch
from safetensors.torch import load

from eyas.capture.extract import SampleError, take_file
from eyas.errors import EyasError
from eyas.models.boundaries import tensor_name
from eyas.models.target import Target
from eyas.parity.checks import Reference, ReferenceHead, Served
from eyas.progress import bytes_text
from eyas.server.serve import LIMITS, Server

DECODED_TOK = 32  # of each sample, from its first supervised token on, are decoded again
CHUNK_TOK = 32  # prefill chunks of the second server that `full` starts
IN_A_GRAPH = "CUDA graph"  # what the plugin says of passes whose rows it cannot see
IN_FLIGHT = 4  # requests for log-probabilities: their logits are [S, V]
SAME_LOGITS = 1e-3  # largest difference between a model's logits and those of its norm and head, by the largest logit


def n_parameters(folder: Path) -> int:
    """Weights of a model folder, from the headers of its safetensors files, whatever their dtype. Packed integers (I32, U8) are counted as 4 bits each."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for tensor in (header[name] for name in header if name != "__metadata__"):
            start, end = tensor["data_offsets"]
            total += (
                2 * (end - start)
                if tensor["dtype"] in ("I32", "U8")
                else math.prod(tensor["shape"])
            )
    return total


def _stack(model: torch.nn.Module) -> torch.nn.Module:
    """Return the one module that has both `layers` and `norm`, in any family."""
    return next(
        m
        for m in model.modules()
        if isinstance(getattr(m, "layers", None), torch.nn.ModuleList)
        and isinstance(getattr(m, "norm", None), torch.nn.Module)
    )


class HuggingFace:
    """The target in Hugging Face's implementation, in float32 and in bfloat16. EyasError when the machine has no room for both."""

    def __init__(self, target: Target, threads: int):
        torch.set_num_threads(threads)
        need = (4 + 2) * n_parameters(target.folder)  # both dtypes side by side
        if need > psutil.virtual_memory().available:
            raise EyasError(
                f"the reference of {target.name} takes {bytes_text(need)} of memory",
                f"that much free ({bytes_text(psutil.virtual_memory().available)} are)",
                "python -m eyas parity on a machine that has it and sees the server's spool; or train with -p without_parity true",
            )
        self.rows: dict[int, torch.Tensor] = {}
        self.target = target
        self.models = [target.causal_lm(dtype) for dtype in (torch.float32, torch.bfloat16)]
        for model in self.models:
            self._hook(_stack(model))
        exact = self.models[0]
        self.head = ReferenceHead(_stack(exact).norm, exact.get_output_embeddings())

    def _hook(self, stack: torch.nn.Module) -> None:
        """Keep the residual stream that enters each block and the final norm."""
        for b, module in enumerate([*stack.layers, stack.norm]):

            def hook(_, args, kwargs, b=b):
                self.rows[b] = (args[0] if args else kwargs["hidden_states"])[0]  # [T, H]

            module.register_forward_pre_hook(hook, with_kwargs=True)

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor, top_ids: torch.Tensor) -> Reference:
        """ids int64 [T]; top_ids int64 [T-1], the server's first choice after each token but the last."""
        passes, logps = [], []
        for model in self.models:
            logits = model(ids[None], use_cache=False).logits[0, :-1]  # [T-1, V]
            both = torch.stack([ids[1:], top_ids], dim=1)  # [T-1, 2]
            logps.append(
                (logits.gather(1, both).float() - logits.float().logsumexp(-1, keepdim=True)).T
            )
            passes.append(torch.stack([self.rows[b] for b in sorted(self.rows)]))
            self.rows.clear()
            if model is self.models[0]:
                self._check_form(passes[0][-1][:-1], logits)
        return Reference(passes[0], passes[1], logps[0], logps[1], self.head)

    def _check_form(self, last: torch.Tensor, logits: torch.Tensor) -> None:
        """Raise EyasError unless the model's logits [T, V] are its head applied to its normed last states [T, H]."""
        mine = self.head.logits(last)
        self.rows.clear()  # the norm's hook saw these too
        if mine.shape != logits.shape or float((mine - logits).abs().max()) > SAME_LOGITS * float(
            logits.abs().max()
        ):
            raise EyasError(
                f"the logits of {self.target.name} are not its head applied to its normed last state: it scales or caps them",
                "a family whose head is a matrix alone, since logits are recomputed from a store that way",
                f"python -m eyas doctor --target {self.target.folder}",
            )


class Asked:
    """A server that is asked for parity: log-probabilities, and the states of the same tokens, computed in other ways. EyasError names what it refuses."""

    def __init__(self, server: Server, boundaries: tuple[int, ...]):
        self.boundaries = boundaries
        self.client = httpx.Client(base_url=server.url, timeout=600, limits=LIMITS)

    def prefill(self, ids: list[int]) -> Served:
        """One prefill, beside others: log-probabilities of its tokens, and its rows."""
        meta, tensors = self._generate(
            ids, 1, {}, {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
        )
        top = [entry[0] for entry in meta["input_top_logprobs"][1:]]
        return Served(
            torch.tensor([entry[0] for entry in meta["input_token_logprobs"][1:]]),
            torch.tensor([entry[1] for entry in top]),
            torch.tensor([entry[0] for entry in top]),
            {"another batch": (torch.arange(len(ids)), self._rows(tensors))},
        )

    def decode(
        self, ids: list[int], start: int, n: int
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Positions [n] and rows of the tokens start .. start+n-1, each computed by a decode step of its own after a prefill of what comes before."""
        follow = ids[start : start + n]
        _, tensors = self._generate(ids[:start], n + 1, {"follow": follow, "as_computed": True}, {})
        return self._from(tensors, ids, start)

    def prefill_as_it_comes(
        self, ids: list[int], start: int
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Positions and rows from `start` on, of a prefill that may come in chunks or find a part of itself in the prefix cache."""
        return self._from(self._generate(ids, 1, {"as_computed": True}, {})[1], ids, start)

    def _generate(
        self, ids: list[int], new_tok: int, custom: dict, options: dict
    ) -> tuple[dict, dict[str, torch.Tensor]]:
        name = f"parity-{uuid.uuid4().hex}"
        sampling = {
            "max_new_tokens": new_tok,
            "temperature": 0.0,
            "ignore_eos": True,
            "custom_params": {"eyas_capture": name} | custom,
        }
        try:
            answer = self.client.post(
                "/generate", json={"input_ids": ids, "sampling_params": sampling} | options
            )
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise EyasError(
                f"the server does not answer a question of parity: {type(error).__name__}",
                "a running server",
                "python -m eyas server status",
            ) from None
        meta = answer.json()["meta_info"]
        found = meta["eyas_capture"][0]
        if "error" in found:
            raise EyasError(
                f"the server cannot give the states: {found['error']}",
                "its rows",
                "python -m eyas server status",
            )
        try:
            return meta, load(take_file(self.client, Path(found["path"]), name))
        except SampleError as error:
            raise EyasError(
                f"the server's rows have not come: {error}",
                "a spool that server and client share",
                "python -m eyas server status",
            ) from None

    def _rows(self, tensors: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {b: tensors[tensor_name(b)] for b in self.boundaries}

    def _from(
        self, tensors: dict[str, torch.Tensor], ids: list[int], start: int
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        kept = tensors["positions"] >= start
        positions = tensors["positions"][kept]
        if tensors["input_ids"][kept].tolist() != [ids[p] for p in positions.tolist()]:
            raise EyasError(
                "the server computed other tokens than it was given",
                "the same",
                "python -m eyas doctor",
            )
        return positions, {b: rows[kept] for b, rows in self._rows(tensors).items()}

    def __enter__(self) -> "Asked":
        return self

    def __exit__(self, *_) -> None:
        self.client.close()


def ask(server: Server, samples: dict[str, dict], boundaries: tuple[int, ...]) -> dict[str, Served]:
    """What a running server says of the samples: prefill in another batch, and decoding (where no graph hides it), all of them side by side."""
    with Asked(server, boundaries) as asked:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            prefills = pool.map(lambda s: asked.prefill(s["input_ids"].tolist()), samples.values())
            served = dict(zip(samples, prefills))
        with ThreadPoolExecutor(len(samples)) as pool:
            try:
                decoded = list(
                    pool.map(
                        lambda s: asked.decode(s["input_ids"].tolist(), *answer_span(s)),
                        samples.values(),
                    )
                )
            except EyasError as error:
                if IN_A_GRAPH in error.found:  # said in the certificate
                    return served
                raise
    return {
        id: replace(served[id], states=served[id].states | {"decoding": rows})
        for id, rows in zip(samples, decoded)
    }


def answer_span(sample: dict) -> tuple[int, int]:
    """(first supervised position, number of tokens from there that are decoded); the second half where nothing is supervised."""
    at = sample["loss_mask"].nonzero().flatten()
    T = len(sample["input_ids"])
    start = max(int(at[0]) if len(at) else T // 2, 1)
    return start, min(DECODED_TOK, T - start)


def ask_full(
    server: Server, samples: dict[str, dict], boundaries: tuple[int, ...], served: dict[str, Served]
) -> dict[str, Served]:
    """The same tokens from a server with chunked prefill and prefix cache: the first half in chunks, then the second half after a cached first one."""
    found = {}
    with Asked(server, boundaries) as asked:
        for id, sample in samples.items():
            ids = sample["input_ids"].tolist()
            chunked = asked.prefill_as_it_comes(ids[: len(ids) // 2], 0)
            cached = asked.prefill_as_it_comes(ids, len(ids) // 2)
            found[id] = replace(
                served[id],
                states=served[id].states | {"chunked prefill": chunked, "prefix cache": cached},
            )
    return found
