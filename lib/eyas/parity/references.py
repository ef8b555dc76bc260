"""Compute the two independent references of the parity tests.

- `Asked`: the server itself, asked for the same tokens in several ways.
- `HuggingFace`: Hugging Face's forward pass of the same weights.
"""

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

DECODED_TOK = 32  # tokens of each sample, from its first supervised one, that are decoded again
CHUNK_TOK = 32  # prefill chunk of the second server that `full` starts, in tokens
IN_A_GRAPH = "CUDA graph"  # part of the plugin's message about passes whose rows it cannot see
IN_FLIGHT = 4  # requests for log-probabilities at a time: each needs logits [S, V]

# Largest accepted difference between a model's logits and norm-and-head's, / the largest logit.
SAME_LOGITS = 1e-3


def n_parameters(folder: Path) -> int:
    """Return the number of weights in a model folder, from the headers of its safetensors files.

    Packed integers (I32, U8) are counted as 4 bits each.
    """
    total = 0
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        for tensor in header.values():
            if tensor["dtype"] in ("I32", "U8"):
                start, end = tensor["data_offsets"]
                total += 2 * (end - start)
            else:
                total += math.prod(tensor["shape"])
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
    """Compute the target with Hugging Face's implementation, in float32 and in bfloat16.

    Raise EyasError if the machine has too little memory for both.
    """

    def __init__(self, target: Target, threads: int):
        torch.set_num_threads(threads)
        needed_bytes = (4 + 2) * n_parameters(target.folder)  # both dtypes side by side
        available_bytes = psutil.virtual_memory().available
        if needed_bytes > available_bytes:
            raise EyasError(
                f"the reference of {target.name} takes {bytes_text(needed_bytes)} of memory",
                f"that much free ({bytes_text(available_bytes)} are)",
                "python -m eyas parity on a machine that has it and sees the server's spool;"
                " or train with -p without_parity true",
            )
        self.rows: dict[int, torch.Tensor] = {}  # boundary -> states [T, H] of the last pass
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
    def __call__(
        self,
        ids: torch.Tensor,  # int64 [T]
        top_ids: torch.Tensor,  # int64 [T-1], the server's first choice after each token
    ) -> Reference:
        """Return the reference of one sequence of tokens."""
        states = []
        logps = []
        for model in self.models:
            logits = model(ids[None], use_cache=False).logits[0, :-1]  # [T-1, V]
            both = torch.stack([ids[1:], top_ids], dim=1)  # [T-1, 2]
            logp = logits.gather(1, both).float() - logits.float().logsumexp(-1, keepdim=True)
            logps.append(logp.T)
            states.append(torch.stack([self.rows[b] for b in sorted(self.rows)]))  # [N+1, T, H]
            self.rows.clear()
            if model is self.models[0]:
                self._check_form(states[0][-1][:-1], logits)
        return Reference(states[0], states[1], logps[0], logps[1], self.head)

    def _check_form(self, last: torch.Tensor, logits: torch.Tensor) -> None:
        """Raise EyasError unless logits [T, V] are head(norm(last)) of last states [T, H]."""
        recomputed = self.head.logits(last)
        self.rows.clear()  # the norm's hook saw these too
        differs = recomputed.shape != logits.shape
        if not differs:
            difference = float((recomputed - logits).abs().max())
            differs = difference > SAME_LOGITS * float(logits.abs().max())
        if differs:
            raise EyasError(
                f"the logits of {self.target.name} are not its head applied to its normed"
                " last state: it scales or caps them",
                "a family whose head is a matrix alone,"
                " since logits are recomputed from a store that way",
                f"python -m eyas doctor --target {self.target.folder}",
            )


class Asked:
    """Ask a server for log-probabilities and for the states of the same tokens, in several ways.

    Every method raises EyasError if the server does not answer or refuses.
    """

    def __init__(self, server: Server, boundaries: tuple[int, ...]):
        self.boundaries = boundaries
        self.client = httpx.Client(base_url=server.url, timeout=600, limits=LIMITS)

    def prefill(self, ids: list[int]) -> Served:
        """Return the log-probabilities and the rows of one prefill, batched with other requests."""
        options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
        meta, tensors = self._generate(ids, 1, {}, options)
        # The server gives no log-probability for the first token.
        following = meta["input_token_logprobs"][1:]
        first_choices = [entry[0] for entry in meta["input_top_logprobs"][1:]]
        return Served(
            next_logp=torch.tensor([entry[0] for entry in following]),
            top_ids=torch.tensor([entry[1] for entry in first_choices]),
            top_logp=torch.tensor([entry[0] for entry in first_choices]),
            states={"another batch": (torch.arange(len(ids)), self._rows(tensors))},
        )

    def decode(
        self, ids: list[int], start: int, n: int
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Return the positions [n] and rows of tokens start .. start+n-1, from decode steps.

        The tokens before `start` are prefilled. Each later token takes one decode step.
        """
        custom = {"follow": ids[start : start + n], "as_computed": True}
        _, tensors = self._generate(ids[:start], n + 1, custom, {})
        return self._rows_from(tensors, ids, start)

    def prefill_as_it_comes(
        self, ids: list[int], start: int
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Return the positions and rows from `start` on, of a prefill by chunks or with a cache."""
        _, tensors = self._generate(ids, 1, {"as_computed": True}, {})
        return self._rows_from(tensors, ids, start)

    def _generate(
        self, ids: list[int], new_tok: int, custom: dict, options: dict
    ) -> tuple[dict, dict[str, torch.Tensor]]:
        """Return the meta information of one request, and the tensors that the plugin wrote."""
        name = f"parity-{uuid.uuid4().hex}"
        sampling = {
            "max_new_tokens": new_tok,
            "temperature": 0.0,
            "ignore_eos": True,
            "custom_params": {"eyas_capture": name} | custom,
        }
        body = {"input_ids": ids, "sampling_params": sampling} | options
        try:
            answer = self.client.post("/generate", json=body)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise EyasError(
                f"the server does not answer a request of parity: {type(error).__name__}",
                "a running server",
                "python -m eyas server status",
            ) from None
        meta = answer.json()["meta_info"]
        captured = meta["eyas_capture"][0]
        if "error" in captured:
            raise EyasError(
                f"the server cannot give the states: {captured['error']}",
                "its rows",
                "python -m eyas server status",
            )
        try:
            return meta, load(take_file(self.client, Path(captured["path"]), name))
        except SampleError as error:
            raise EyasError(
                f"the server's rows did not arrive: {error}",
                "a spool that server and client share",
                "python -m eyas server status",
            ) from None

    def _rows(self, tensors: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {b: tensors[tensor_name(b)] for b in self.boundaries}

    def _rows_from(
        self, tensors: dict[str, torch.Tensor], ids: list[int], start: int
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Return the positions and rows from `start` on; check that they are of the tokens sent."""
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
    """Return what a running server computes for the samples: by prefill, and by decoding.

    The samples are sent side by side, so that batches differ from those of extraction. Rows of
    decoding are left out where the server decodes inside CUDA graphs.
    """
    with Asked(server, boundaries) as asked:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            prefills = pool.map(lambda s: asked.prefill(s["input_ids"].tolist()), samples.values())
            served = dict(zip(samples, prefills))

        def decode(sample: dict) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
            start, n = answer_span(sample)
            return asked.decode(sample["input_ids"].tolist(), start, n)

        with ThreadPoolExecutor(len(samples)) as pool:
            try:
                decoded = list(pool.map(decode, samples.values()))
            except EyasError as error:
                if IN_A_GRAPH in error.found:  # the certificate states it
                    return served
                raise
    return {
        id: replace(served[id], states=served[id].states | {"decoding": rows})
        for id, rows in zip(samples, decoded)
    }


def answer_span(sample: dict) -> tuple[int, int]:
    """Return the first position to decode, and the number of tokens to decode from there.

    Decoding starts at the first supervised token, or in the middle if nothing is supervised.
    """
    supervised = sample["loss_mask"].nonzero().flatten()
    T = len(sample["input_ids"])
    first = int(supervised[0]) if len(supervised) else T // 2
    start = max(first, 1)
    return start, min(DECODED_TOK, T - start)


def ask_full(
    server: Server, samples: dict[str, dict], boundaries: tuple[int, ...], served: dict[str, Served]
) -> dict[str, Served]:
    """Add what a server with chunked prefill and prefix cache computes for the same tokens.

    It prefills the first half in chunks, then the whole sample with the first half in the cache.
    """
    answers = {}
    with Asked(server, boundaries) as asked:
        for id, sample in samples.items():
            ids = sample["input_ids"].tolist()
            half = len(ids) // 2
            ways = {
                "chunked prefill": asked.prefill_as_it_comes(ids[:half], 0),
                "prefix cache": asked.prefill_as_it_comes(ids, half),
            }
            answers[id] = replace(served[id], states=served[id].states | ways)
    return answers
