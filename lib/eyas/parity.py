"""Are a store's states the right thing? `python -m eyas parity --profile P` (its server up) writes `parity.json` into the store.

A bounded sample of the store is compared with two independent references: what the server itself says of the same tokens, and Hugging
Face's forward pass of the same weights, once in float32 (`exact`) and once in the dtype of serving, bfloat16 (`rounded`).

    text      token ids and loss mask are the prompt set's, encoded again; without one (an imported store) every supervised run starts
              right after the template's generation prompt and ends with a control token, before one, or with the sample
    head      the copied norm and head are the target's, weight for weight, and head(norm(last state)) gives the server's own log-probability of
              every next token and of its first choice
    boundary  every stored boundary is nearest to the reference's boundary of that id, among all N+1, and as near as rounding allows;
              no row is lost: each is nearer to its own token's reference than half way to a neighbour's
    serving   the states that the server computes for the same tokens in another batch and while decoding them are the stored ones
    policy    is the text the target's own words? Numbers without a verdict: another's words are a choice, not a fault

The rule for every limit: nothing here is tuned. The *floor* is measured: how far `rounded` lies from `exact` on these very tokens, both
taken through the store's number format. Two results that are each one floor from the truth are at most two floors apart (the triangle
inequality), so two floors are the limit: for the median over the tokens of each sample, and for the 90th percentile over all tokens. Where two different
floors meet (the stored state through the copied head; the server's own logits) the wider one counts.

Massive activations decide nothing: all distances are per token, sum |x - r| / sum |r|, and the verdicts are about quantiles of tokens.
That distance (L1) also does not grow by quantisation: an fp8 code that flips moves by a whole step, as seldom as the step is wide, so
an fp8 store is judged by the same rule. For a float32 store the floor of bfloat16 is wider than need be.

What a bounded sample cannot see is a fault in few samples: n samples miss one that is in a share p of the store with (1 - p)^n. `unseen` says so in the certificate.

Axes: T tokens of one sample, B stored boundaries, N+1 boundaries of the model, H hidden, V vocabulary.
"""

import datetime
import importlib.metadata
import json
import math
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import httpx
import numpy as np
import pandas as pd
import psutil
import torch
from safetensors.torch import load

from eyas import __version__
from eyas.boundaries import tensor_name
from eyas.certificate import FORMAT, write_certificate
from eyas.config import Config
from eyas.errors import EyasError
from eyas.extract import SampleError, take_file
from eyas.files import read_json
from eyas.progress import Progress, bytes_text
from eyas.prompts import PromptSet, Sample, encode, template_hash, tokenizer_hash
from eyas.serve import LIMITS, Server, check_for_capture, server_up
from eyas.store import Store, from_fp8, to_fp8
from eyas.target import Head, Target

DECODED_TOK = 32  # of each sample, from its first supervised token on, are decoded again
CHUNK_TOK = 32  # prefill chunks of the second server that `full` starts
REFERENCE_BYTES = 4 * 2**30  # of all N+1 boundaries in both dtypes
IN_A_GRAPH = "CUDA graph"  # what the plugin says of passes whose rows it cannot see
IN_FLIGHT = 4  # requests for log-probabilities: their logits are [S, V]
FLOORS = 2  # the triangle inequality: two results, each one floor from the truth
WIDEST_FLOOR = 0.25  # of a boundary's states, median; bfloat16 gives 0.002 an operation and was measured at up to 0.05
WIDEST_LOGP_FLOOR = 0.5  # of log-probabilities in nats, median
LEAST_AGREEING = 0.5  # share of positions whose first choice is the server's, ties left out
ESCAPES = 0.05  # chance at which a fault's share of the samples is named in `unseen`
SAME_LOGITS = 1e-3  # largest difference between a model's logits and those of its norm and head, by the largest logit


@dataclass(frozen=True)
class ReferenceHead:
    """The target's final norm and head in float32, as Hugging Face loads them from its files. The store has no part in it."""

    norm: torch.nn.Module
    lm_head: torch.nn.Module
    after_norm: bool = False  # the states that it is given stand after the norm already

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., V] of states [..., H], in float32."""
        states = states.float()
        return self.lm_head(states if self.after_norm else self.norm(states)).float()

    def differences(self, head: Head) -> list[str]:
        """Return in words which weights of `head` are not the target's; an empty list if all are."""
        wrong = []
        norm_weight, lm_head = self.norm.weight.float(), self.lm_head.weight.float()
        for name, copied, own in (
            ("final norm", head.norm_weight, norm_weight),
            ("head", head.lm_head, lm_head),
        ):
            if copied.shape != own.shape:
                wrong.append(f"the copied {name} is {list(copied.shape)}, the target's {list(own.shape)}")
            elif not torch.equal(copied, own):
                rows = int((copied != own).flatten(1).any(1).sum() if own.ndim > 1 else (copied != own).sum())
                unit = "rows" if own.ndim > 1 else "weights"
                wrong.append(f"{rows:,} of {len(own):,} {unit} of the copied {name} are not the target's")
        eps = getattr(self.norm, "variance_epsilon", getattr(self.norm, "eps", None))
        if eps is not None and not math.isclose(eps, head.eps, rel_tol=1e-6):
            wrong.append(f"the copied norm adds {head.eps:g} to the variance, the target's {eps:g}")
        return wrong


@dataclass(frozen=True)
class Reference:
    """Hugging Face's forward pass over one sequence of token ids, in float32 and in bfloat16.

    exact, rounded: [N+1, T, H]; exact_logp, rounded_logp: [2, T-1], log-probability of the next token and of the server's first choice.
    """

    exact: torch.Tensor
    rounded: torch.Tensor
    exact_logp: torch.Tensor
    rounded_logp: torch.Tensor
    head: ReferenceHead


@dataclass(frozen=True)
class Served:
    """What the server says of one sequence: log-probability of each next token, its first choice and that one's log-probability, [T-1] each.

    `states`: how they were computed -> (positions [n], {boundary: [n, H]}).
    """

    next_logp: torch.Tensor
    top_ids: torch.Tensor
    top_logp: torch.Tensor
    states: dict[str, tuple[torch.Tensor, dict[int, torch.Tensor]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """Everything that one sample is compared with. `expected`: the sample encoded again; None without a prompt set."""

    served: Served
    reference: Reference
    expected: Sample | None = None


@dataclass(frozen=True)
class Verdict:
    """`ok` None: measured, decides nothing. `excess`: the largest measured value in units of its limit. `rows`: the numbers, a dict each."""

    name: str
    ok: bool | None
    detail: str
    excess: float = 0.0
    rows: tuple[dict, ...] = ()


# ---- distances


def distance(rows: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Per token: sum |x - r| / sum |r|, [..., H] -> [...]. NaN rows stay NaN, which no limit accepts."""
    rows, reference = rows.float(), reference.float()
    return (rows - reference).abs().sum(-1) / reference.abs().sum(-1)


def as_stored(rows: torch.Tensor, dtype: str) -> torch.Tensor:
    """A state in the store's number format and back, as `Store.read` gives it."""
    if dtype == "float8_e4m3fn":
        return from_fp8(*to_fp8(rows.to(torch.bfloat16).flatten(0, -2))).view(rows.shape)
    return rows.to(getattr(torch, dtype))


def _quantile(values: torch.Tensor, q: float) -> float:
    return float(torch.quantile(values.double(), q))


def _excess(measured: float, limit: float) -> float:
    """measured / limit; 0 where both are 0, infinite where the measured one is NaN or the limit alone is 0."""
    if measured == 0:
        return 0.0
    return measured / limit if limit > 0 and not math.isnan(measured) else math.inf


def _summary(error: torch.Tensor, floor: torch.Tensor) -> dict[str, float]:
    """Median and 90th percentile of all tokens, of the error and of its limit, and the larger ratio of the two."""
    row = {}
    for name, q in (("p50", 0.5), ("p90", 0.9)):
        row |= {f"error_{name}": _quantile(error, q), f"limit_{name}": FLOORS * _quantile(floor, q)}
    return row | {"excess": max(_excess(row[f"error_{name}"], row[f"limit_{name}"]) for name in ("p50", "p90"))}


# ---- the tests


def examine(samples: dict[str, dict], evidence: dict[str, Evidence], head: Head, dtype: str, tokenizer, hashes: dict | None = None) -> list[Verdict]:
    """The verdicts on samples as `Store.read` gives them, each against its own evidence; reads and fetches nothing.

    `dtype`: the store's number format. `hashes`: tokenizer_hash and template_hash of the store's manifest, where it has them.
    """
    return [
        text_test(samples, evidence, tokenizer, hashes or {}),
        head_test(samples, evidence, head, dtype),
        boundary_test(samples, evidence, dtype),
        serving_test(samples, evidence, dtype),
        policy_test(samples, evidence),
    ]


def text_test(samples: dict[str, dict], evidence: dict[str, Evidence], tokenizer, hashes: dict) -> Verdict:
    """Token ids and loss mask."""
    wrong = [f"the store's {name.replace('_', ' ')} is not the target's" for name, of in (("tokenizer_hash", tokenizer_hash), ("template_hash", template_hash))
             if hashes.get(name) and hashes[name] != of(tokenizer)]
    opening = generation_prompt(tokenizer)
    by_prompts = 0
    for id, sample in samples.items():
        expected = evidence[id].expected
        if expected is not None:
            by_prompts += 1
            if not np.array_equal(sample["input_ids"].numpy(), expected.input_ids):
                wrong.append(f"{id}: other token ids than its conversation, encoded again")
            elif not np.array_equal(sample["loss_mask"].numpy(), expected.loss_mask):
                wrong.append(f"{id}: another loss mask than its conversation's")
        elif opening and (what := _mask_fault(sample, tokenizer, opening)):
            wrong.append(f"{id}: {what}")
    if wrong:
        return Verdict("text", False, "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""), math.inf)
    if by_prompts < len(samples) and not opening:
        return Verdict("text", None, "no prompt set, and the template has no generation prompt: the loss mask could not be checked")
    where = "the prompt set's" if by_prompts == len(samples) else "where the template puts its answers"
    return Verdict("text", True, f"token ids and loss mask of {len(samples)} samples are {where}")


def generation_prompt(tokenizer) -> str:
    """What the template writes before an answer, such as '<|im_start|>assistant\\n'; empty where it has none."""
    question = [{"role": "user", "content": "a"}]
    if not isinstance(tokenizer.chat_template, str):
        return ""
    plain, opened = (tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=flag) for flag in (False, True))
    return opened[len(plain) :] if opened.startswith(plain) else ""


def _mask_fault(sample: dict, tokenizer, opening: str) -> str:
    """The first supervised run that does not start behind the generation prompt or does not end where an answer does, or nothing."""
    ids, mask = sample["input_ids"].tolist(), sample["loss_mask"].int()
    control = set(tokenizer.all_special_ids)
    edges = torch.diff(mask, prepend=mask.new_zeros(1), append=mask.new_zeros(1))
    starts, ends = edges.eq(1).nonzero().flatten().tolist(), edges.eq(-1).nonzero().flatten().tolist()
    if not starts:
        return "nothing is supervised"
    for start, end in zip(starts, ends):
        if not tokenizer.decode(ids[:start], skip_special_tokens=False).endswith(opening):
            return f"the supervised run from token {start} does not follow {opening!r}"
        if end < len(ids) and ids[end - 1] not in control and ids[end] not in control:
            return f"the supervised run to token {end} does not end with its turn"
    return ""


def head_test(samples: dict[str, dict], evidence: dict[str, Evidence], head: Head, dtype: str) -> Verdict:
    """Judge the copied norm and head, and the stored last state through them, by the server's own log-probabilities.

    The weights have to be the target's, all of them: that needs no sample. A first choice that is not the server's has to be a tie: neither
    token's log-probability further off than two of the largest floors. The floors are those of the reference's own head.
    """
    judge = next(iter(evidence.values())).reference.head
    wrong = judge.differences(head)
    if wrong:
        wrong[-1] += " (python -m eyas verify --repair writes them again)"
    if any(tuple(weight.shape) != tuple(own.shape) for weight, own in ((head.lm_head, judge.lm_head.weight), (head.norm_weight, judge.norm.weight))):
        return Verdict("head", False, "; ".join(wrong), math.inf)
    parts = []  # (error [2(T-1)], floor of the store's way [2(T-1)], floor of the server's [2(T-1)], what the head prefers its own first choice by [T-1])
    for id, sample in samples.items():
        served, reference, ids = evidence[id].served, evidence[id].reference, sample["input_ids"]
        last = sample["states"][max(sample["states"])]
        if last.shape[0] != len(ids):
            return Verdict("head", False, f"{id}: {last.shape[0]} rows for {len(ids)} tokens", math.inf)
        both = torch.stack([ids[1:], served.top_ids])  # [2, T-1]
        mine, first = _log_probabilities(head, last, both)
        analogue, _ = _log_probabilities(judge, as_stored(reference.rounded[-1], dtype), both)
        error = mine - torch.stack([served.next_logp, served.top_logp])
        stored = analogue - reference.exact_logp
        own = reference.rounded_logp - reference.exact_logp
        parts.append((error.abs().flatten(), stored.abs().flatten(), own.abs().flatten(), first - mine[1]))
    error, stored, own, behind = map(torch.cat, zip(*parts))
    wider = stored if stored.median() > own.median() else own
    row, tie = _summary(error, wider), FLOORS**2 * float(torch.maximum(stored, own).max())
    each = [_excess(_quantile(e, 0.5), FLOORS * max(_quantile(s, 0.5), _quantile(o, 0.5))) for e, s, o, _ in parts]
    agreeing, ties = int((behind <= 0).sum()), int(((behind > 0) & (behind <= tie)).sum())
    floor = _quantile(wider, 0.5)
    excess = max(row["excess"], *each, _excess(float(behind.max()), tie), LEAST_AGREEING * len(behind) / max(agreeing, 1e-9), floor / WIDEST_LOGP_FLOOR)
    if floor > WIDEST_LOGP_FLOOR:
        wrong.append(f"the reference itself is {floor:.2f} nats from exact, rounding gives at most {WIDEST_LOGP_FLOOR}: it is no reference")
    detail = f"first choice as the server's at {agreeing:,} of {len(behind):,} positions, {ties} more tie; "
    detail += f"log-probabilities {row['error_p50']:.3f} apart (median), {excess:.2f} of the limit"
    numbers = {"positions": len(behind), "agreeing": agreeing, "ties": ties} | row | {"excess": excess, "wrong_weights": wrong}
    return Verdict("head", excess <= 1 and not wrong, "; ".join([*wrong, detail]), math.inf if wrong else excess, (numbers,))


def _log_probabilities(head: Head, states: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H], ids [2, T-1] of the tokens that follow -> their log-probabilities [2, T-1], and those of the first choices [T-1]."""
    found = head.logits(states[:-1]).log_softmax(-1)  # [T-1, V]
    return found.gather(1, ids.T).T, found.amax(-1)


def boundary_test(samples: dict[str, dict], evidence: dict[str, Evidence], dtype: str) -> Verdict:
    """Every stored boundary against all N+1 of the reference."""
    parts: dict[int, list[Match]] = {}
    for id, sample in samples.items():
        reference = evidence[id].reference
        exact = as_stored(reference.exact, dtype)  # [N+1, T, H]
        for b, rows in sample["states"].items():
            if rows.shape != exact[b].shape:
                return Verdict("boundary", False, f"{id}: boundary {b} is {tuple(rows.shape)} for {len(sample['input_ids'])} tokens", math.inf)
            parts.setdefault(b, []).append(match(rows, exact, as_stored(reference.rounded[b], dtype), b))
    table, wrong = [], []
    for b, found in sorted(parts.items()):
        row = {"boundary": b, "nearest": next((m.nearest for m in found if m.nearest != b), b), "margin": min(m.margin for m in found)}
        row["lost_rows"] = sum(m.lost for m in found)
        row |= _summary(torch.cat([m.error for m in found]), torch.cat([m.floor for m in found]))
        row["excess"] = max(row["excess"], *(_excess(_quantile(m.error, 0.5), FLOORS * _quantile(m.floor, 0.5)) for m in found))
        if row["lost_rows"]:
            row["excess"] = max(row["excess"], *(m.worst for m in found))
        floor = row["limit_p50"] / FLOORS
        row["excess"] = max(row["excess"], floor / WIDEST_FLOOR)
        if row["nearest"] != b:
            wrong.append(f"{b} is nearest to {row['nearest']}")
        elif row["lost_rows"]:
            wrong.append(f"{row['lost_rows']} rows of boundary {b} are not their tokens'")
        elif floor > WIDEST_FLOOR:
            wrong.append(f"the reference of {b} is {floor:.0%} from exact, rounding gives at most {WIDEST_FLOOR:.0%}: it is no reference")
        elif row["excess"] > 1:
            wrong.append(f"{b} is {FLOORS * row['excess']:.1f} floors away")
        table.append(row)
    excess = max(row["excess"] for row in table)
    every = next(iter(evidence.values())).reference.exact.shape[0]
    good = f"each is nearest to its own of {every}, the second is {min(row['margin'] for row in table):.0f} times as far; {excess:.2f} of the limit"
    return Verdict("boundary", not wrong, "; ".join(wrong) or good, excess, tuple(table))


@dataclass(frozen=True)
class Match:
    """One boundary of one sample. `margin`: how many times as far the second nearest is; `lost`: rows that are not their token's; `worst`: of a row, in
    units of what would be lost; error, floor: [T]."""

    nearest: int
    margin: float
    lost: int
    worst: float
    error: torch.Tensor
    floor: torch.Tensor


def match(rows: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor, b: int) -> Match:
    """rows [T, H], stored as boundary b, against exact [N+1, T, H]; rounded [T, H] is the reference's own rounding of b."""
    every = distance(rows, exact)  # [N+1, T]
    error, floor = every[b], distance(rounded, exact[b])  # [T]
    middle = torch.nan_to_num(every.median(-1).values, nan=math.inf)  # [N+1]
    second = float(torch.cat([middle[:b], middle[b + 1 :]]).min())
    inf = torch.full((1,), math.inf)
    behind, ahead = distance(exact[b][:-1], exact[b][1:]), distance(exact[b][1:], exact[b][:-1])  # [T-1], relative to the later and to the earlier row
    neighbour = torch.minimum(torch.cat([inf, behind]), torch.cat([ahead, inf]))  # [T]
    lost = torch.nan_to_num(error / torch.maximum(neighbour / 2, FLOORS * floor.max()), nan=math.inf)  # [T], above 1: lost
    lost[error == 0] = 0.0  # at boundary 0, where nothing is rounded, a token that stands there twice in a row is its own neighbour: 0 / 0
    nearest = b if middle[b] <= second else int(middle.argmin())
    return Match(nearest, second / float(middle[b]) if middle[b] else math.inf, int((lost > 1).sum()), float(lost.max()), error, floor)


def serving_test(samples: dict[str, dict], evidence: dict[str, Evidence], dtype: str) -> Verdict:
    """The stored rows against what the server computes for the same tokens in other ways, beside the floor."""
    parts: dict[tuple[str, int], list] = {}
    for id, sample in samples.items():
        reference = evidence[id].reference
        for how, (positions, states) in evidence[id].served.states.items():
            for b, rows in sample["states"].items():
                if len(rows) != len(sample["input_ids"]):
                    return Verdict("serving", False, f"{id}: {len(rows)} rows for {len(sample['input_ids'])} tokens", math.inf)
                floor = distance(as_stored(reference.rounded[b][positions], dtype), as_stored(reference.exact[b][positions], dtype))
                parts.setdefault((how, b), []).append((distance(rows[positions], as_stored(states[b], dtype)), floor))
    if not parts:
        return Verdict("serving", None, "the server was not asked for other ways to compute these tokens")
    table = []
    for (how, b), found in sorted(parts.items()):
        error, floor = map(torch.cat, zip(*found))
        table.append({"how": how, "boundary": b, "tok": len(error)} | _summary(error, floor))
    worst = max(table, key=lambda row: row["excess"])
    ways = ", ".join(dict.fromkeys(row["how"] for row in table))
    detail = f"{ways}: at most {FLOORS * worst['excess']:.2f} floors apart (boundary {worst['boundary']}, {worst['how']}), {FLOORS} are allowed"
    return Verdict("serving", worst["excess"] <= 1, detail, worst["excess"], tuple(table))


def policy_test(samples: dict[str, dict], evidence: dict[str, Evidence]) -> Verdict:
    """Supervised tokens that are the server's greedy choice, and their mean log-probability."""
    greedy = near = total = 0
    logp = 0.0
    for id, sample in samples.items():
        served, reference = evidence[id].served, evidence[id].reference
        at = sample["loss_mask"][1:][: len(served.next_logp)]  # [T-1]
        same = (served.top_ids == sample["input_ids"][1:]) & at
        tie = FLOORS * (reference.rounded_logp - reference.exact_logp).abs().max()
        greedy, total = greedy + int(same.sum()), total + int(at.sum())
        near += int((at & ~same & (served.top_logp - served.next_logp <= tie)).sum())
        logp += float(served.next_logp[at].sum())
    others = total - greedy - near
    words = "the target's own words" if not others else f"{others} are not the target's own"
    detail = f"{greedy:,} of {total:,} supervised tokens are the server's first choice, {near} more are within rounding of it; {words}; "
    detail += f"mean log-probability {logp / max(total, 1):.3f}"
    return Verdict("policy", None, detail, 0.0, ({"supervised": total, "greedy": greedy, "ties": near, "mean_logp": logp / max(total, 1)},))


# ---- the references


def n_parameters(folder: Path) -> int:
    """Weights of a model folder, from the headers of its safetensors files, whatever their dtype. Packed integers (I32, U8) are counted as 4 bits each."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for tensor in (header[name] for name in header if name != "__metadata__"):
            start, end = tensor["data_offsets"]
            total += 2 * (end - start) if tensor["dtype"] in ("I32", "U8") else math.prod(tensor["shape"])
    return total


def _stack(model: torch.nn.Module) -> torch.nn.Module:
    """Return the one module that has both `layers` and `norm`, in any family."""
    return next(m for m in model.modules() if isinstance(getattr(m, "layers", None), torch.nn.ModuleList) and isinstance(getattr(m, "norm", None), torch.nn.Module))


class HuggingFace:
    """The target in Hugging Face's implementation, in float32 and in bfloat16. EyasError when the machine has no room for both."""

    def __init__(self, target: Target, threads: int):
        torch.set_num_threads(threads)
        need = (4 + 2) * n_parameters(target.folder)  # both dtypes side by side
        if need > psutil.virtual_memory().available:
            raise EyasError(f"the reference of {target.name} takes {bytes_text(need)} of memory", f"that much free ({bytes_text(psutil.virtual_memory().available)} are)",
                            "python -m eyas parity on a machine that has it and sees the server's spool; or train with -p without_parity true")
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
            logps.append((logits.gather(1, both).float() - logits.float().logsumexp(-1, keepdim=True)).T)
            passes.append(torch.stack([self.rows[b] for b in sorted(self.rows)]))
            self.rows.clear()
            if model is self.models[0]:
                self._check_form(passes[0][-1][:-1], logits)
        return Reference(passes[0], passes[1], logps[0], logps[1], self.head)

    def _check_form(self, last: torch.Tensor, logits: torch.Tensor) -> None:
        """Raise EyasError unless the model's logits [T, V] are its head applied to its normed last states [T, H]."""
        mine = self.head.logits(last)
        self.rows.clear()  # the norm's hook saw these too
        if mine.shape != logits.shape or float((mine - logits).abs().max()) > SAME_LOGITS * float(logits.abs().max()):
            raise EyasError(f"the logits of {self.target.name} are not its head applied to its normed last state: it scales or caps them",
                            "a family whose head is a matrix alone, since logits are recomputed from a store that way", f"python -m eyas doctor --target {self.target.folder}")


class Asked:
    """A server that is asked for parity: log-probabilities, and the states of the same tokens, computed in other ways. EyasError names what it refuses."""

    def __init__(self, server: Server, boundaries: tuple[int, ...]):
        self.boundaries = boundaries
        self.client = httpx.Client(base_url=server.url, timeout=600, limits=LIMITS)

    def prefill(self, ids: list[int]) -> Served:
        """One prefill, beside others: log-probabilities of its tokens, and its rows."""
        meta, tensors = self._generate(ids, 1, {}, {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1})
        top = [entry[0] for entry in meta["input_top_logprobs"][1:]]
        return Served(
            torch.tensor([entry[0] for entry in meta["input_token_logprobs"][1:]]), torch.tensor([entry[1] for entry in top]), torch.tensor([entry[0] for entry in top]),
            {"another batch": (torch.arange(len(ids)), self._rows(tensors))},
        )

    def decode(self, ids: list[int], start: int, n: int) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Positions [n] and rows of the tokens start .. start+n-1, each computed by a decode step of its own after a prefill of what comes before."""
        follow = ids[start : start + n]
        _, tensors = self._generate(ids[:start], n + 1, {"follow": follow, "as_computed": True}, {})
        return self._from(tensors, ids, start)

    def prefill_as_it_comes(self, ids: list[int], start: int) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Positions and rows from `start` on, of a prefill that may come in chunks or find a part of itself in the prefix cache."""
        return self._from(self._generate(ids, 1, {"as_computed": True}, {})[1], ids, start)

    def _generate(self, ids: list[int], new_tok: int, custom: dict, options: dict) -> tuple[dict, dict[str, torch.Tensor]]:
        name = f"parity-{uuid.uuid4().hex}"
        sampling = {"max_new_tokens": new_tok, "temperature": 0.0, "ignore_eos": True, "custom_params": {"eyas_capture": name} | custom}
        try:
            answer = self.client.post("/generate", json={"input_ids": ids, "sampling_params": sampling} | options)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise EyasError(f"the server does not answer a question of parity: {type(error).__name__}", "a running server", "python -m eyas server status") from None
        meta = answer.json()["meta_info"]
        found = meta["eyas_capture"][0]
        if "error" in found:
            raise EyasError(f"the server cannot give the states: {found['error']}", "its rows", "python -m eyas server status")
        try:
            return meta, load(take_file(self.client, Path(found["path"]), name))
        except SampleError as error:
            raise EyasError(f"the server's rows have not come: {error}", "a spool that server and client share", "python -m eyas server status") from None

    def _rows(self, tensors: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {b: tensors[tensor_name(b)] for b in self.boundaries}

    def _from(self, tensors: dict[str, torch.Tensor], ids: list[int], start: int) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        kept = tensors["positions"] >= start
        positions = tensors["positions"][kept]
        if tensors["input_ids"][kept].tolist() != [ids[p] for p in positions.tolist()]:
            raise EyasError("the server computed other tokens than it was given", "the same", "python -m eyas doctor")
        return positions, {b: rows[kept] for b, rows in self._rows(tensors).items()}

    def __enter__(self) -> "Asked":
        return self

    def __exit__(self, *_) -> None:
        self.client.close()


# ---- the certificate


def certify(config: Config, server: Server, store: Store, target: Target, prompts: PromptSet | None = None, full: bool = False) -> dict:
    """Compare a bounded sample of the store with the references, write `parity.json` and give it back.

    `full` also starts a second server, with prefix cache and chunked prefill, and asks it for the same tokens. EyasError: nothing to check, a
    server that would lose rows or serves something else, no room for the reference. A failed test is no error: see `passed`.
    """
    started_s = time.monotonic()
    boundaries, dtype, tokenizer, head = store.boundaries, store.manifest["dtype"], target.tokenizer(), store.head()
    check_for_capture(server.status(), boundaries, target)
    ids = chosen_samples(store, config.parity_samples, config.seed, (target.n_blocks + 1) * target.hidden_size * 6)
    if not ids:
        raise EyasError(f"the store of run {config.run_name!r} has no samples", "some to check", "python -m eyas extract")
    samples = {id: store.read(id) for id in ids}
    with Progress(len(ids)) as progress:
        progress.update(note="asked of the server")
        served = ask(server, samples, boundaries)
        if full:
            beside = replace(config, run_name=f"{config.run_name}-parity", server_url="", port=0)
            with server_up(beside, tied=True, chunk_tok=CHUNK_TOK) as second:
                served = ask_full(second, samples, boundaries, served)
        served_s = time.monotonic()
        reference = HuggingFace(target, config.threads)
        expected, evidence = expected_samples(config, prompts, tokenizer, ids), {}
        for id in ids:
            evidence[id] = Evidence(served[id], reference(samples[id]["input_ids"], served[id].top_ids), expected.get(id))
            progress.update(samples=1, tok=len(samples[id]["input_ids"]), note="compared with Hugging Face")
        del reference
    if store.manifest.get("last_state") == "post-norm":
        evidence = {id: after_norm(e) for id, e in evidence.items()}
    referred_s = time.monotonic()
    hashes = {name: store.manifest.get(name) for name in ("tokenizer_hash", "template_hash")}
    tests = examine(samples, evidence, head, dtype, tokenizer, hashes)
    judged_s = time.monotonic()
    table = demonstration(samples, evidence, head, dtype, tokenizer, target.embedding())
    hidden = not any("decoding" in s.states for s in served.values())
    seconds = {"server": served_s - started_s, "reference": referred_s - served_s, "tests": judged_s - referred_s, "faults": time.monotonic() - judged_s}
    record = {
        "format": FORMAT, "passed": all(test.ok is not False for test in tests), "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"eyas": __version__} | {name: importlib.metadata.version(name) for name in ("torch", "transformers", "sglang")},
        "target": store.manifest["target"], "engine": store.manifest["engine"], "dtype": dtype,
        "samples": ids, "of_samples": len(store.samples()), "tok": sum(len(s["input_ids"]) for s in samples.values()),
        "seconds": {name: round(value, 2) for name, value in seconds.items()} | {"all": round(sum(seconds.values()), 2)},
        "share_of_extraction": _share_of_extraction(store, sum(seconds.values())),
        "tests": [asdict(test) for test in tests], "faults": table,
        "unseen": unseen(len(ids), len(store.samples()), hidden),
    }  # fmt: skip
    write_certificate(store, _finite(record))
    return record


def chosen_samples(store: Store, limit: int, seed: int, token_bytes: int) -> list[str]:
    """At most `limit` ids, drawn without replacement from both splits, in the order of the store; two at least, and no more than their reference may take."""
    lengths = store.index.set_index("id")["length"]
    ids = store.samples()
    drawn = np.random.default_rng(seed).permutation(len(ids))[:limit]
    fit = int((np.cumsum([int(lengths[ids[n]]) * token_bytes for n in drawn]) <= REFERENCE_BYTES).sum())
    return [ids[n] for n in sorted(drawn[: max(fit, 2)])]


def ask(server: Server, samples: dict[str, dict], boundaries: tuple[int, ...]) -> dict[str, Served]:
    """What a running server says of the samples: prefill in another batch, and decoding (where no graph hides it), all of them side by side."""
    with Asked(server, boundaries) as asked:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            prefills = pool.map(lambda s: asked.prefill(s["input_ids"].tolist()), samples.values())
            served = dict(zip(samples, prefills))
        with ThreadPoolExecutor(len(samples)) as pool:
            try:
                decoded = list(pool.map(lambda s: asked.decode(s["input_ids"].tolist(), *answer_span(s)), samples.values()))
            except EyasError as error:
                if IN_A_GRAPH in error.found:  # said in the certificate
                    return served
                raise
    return {id: replace(served[id], states=served[id].states | {"decoding": rows}) for id, rows in zip(samples, decoded)}


def answer_span(sample: dict) -> tuple[int, int]:
    """(first supervised position, number of tokens from there that are decoded); the second half where nothing is supervised."""
    at = sample["loss_mask"].nonzero().flatten()
    T = len(sample["input_ids"])
    start = max(int(at[0]) if len(at) else T // 2, 1)
    return start, min(DECODED_TOK, T - start)


def ask_full(server: Server, samples: dict[str, dict], boundaries: tuple[int, ...], served: dict[str, Served]) -> dict[str, Served]:
    """The same tokens from a server with chunked prefill and prefix cache: the first half in chunks, then the second half after a cached first one."""
    found = {}
    with Asked(server, boundaries) as asked:
        for id, sample in samples.items():
            ids = sample["input_ids"].tolist()
            chunked = asked.prefill_as_it_comes(ids[: len(ids) // 2], 0)
            cached = asked.prefill_as_it_comes(ids, len(ids) // 2)
            found[id] = replace(served[id], states=served[id].states | {"chunked prefill": chunked, "prefix cache": cached})
    return found


def expected_samples(config: Config, prompts: PromptSet | None, tokenizer, ids: list[str]) -> dict[str, Sample]:
    if prompts is None:
        return {}
    conversations = {c.id: c for c in prompts.conversations}
    missing = [id for id in ids if id not in conversations]
    if missing:
        raise EyasError(f"sample {missing[0]} is not in {prompts.path.name}", "the prompt set of the store", "python -m eyas verify")
    return {id: encode(conversations[id], tokenizer, config.max_length) for id in ids}


def demonstration(samples: dict[str, dict], evidence: dict[str, Evidence], head: Head, dtype: str, tokenizer, embedding: torch.Tensor) -> list[dict]:
    """The detection table on the two shortest samples: what each test would have said of faulty data."""
    from eyas.faults import clean, detection_table, faults

    two = sorted(samples, key=lambda id: len(samples[id]["input_ids"]))[:2]
    if len(two) < 2:
        return []
    some, of = {id: samples[id] for id in two}, {id: evidence[id] for id in two}
    return detection_table([*clean(some, of, head, dtype), *faults(some, of, head, dtype, tokenizer, embedding)], tokenizer)


def after_norm(evidence: Evidence) -> Evidence:
    """Return the same for a store whose last states stand after the final norm, as some imports have them."""
    served, reference = evidence.served, evidence.reference

    @torch.inference_mode()
    def normed(states: torch.Tensor) -> torch.Tensor:
        return reference.head.norm(states.float()).to(states.dtype)

    def last_normed(states: torch.Tensor) -> torch.Tensor:  # [N+1, T, H]
        return torch.cat([states[:-1], normed(states[-1:])])

    last = len(reference.exact) - 1
    ways = {how: (at, rows | {last: normed(rows[last])}) for how, (at, rows) in served.states.items()}
    judged = replace(
        reference,
        exact=last_normed(reference.exact),
        rounded=last_normed(reference.rounded),
        head=replace(reference.head, after_norm=True),
    )
    return replace(evidence, served=replace(served, states=ways), reference=judged)


def unseen(n_samples: int, of_samples: int, in_graph: bool) -> list[str]:
    """Return in sentences what a certificate over n of so many samples cannot see."""
    said = []
    if n_samples < of_samples:
        share = 1 - ESCAPES ** (1 / n_samples)
        said.append(
            f"{n_samples} of {of_samples:,} samples were compared: a fault in {share:.0%} of the samples"
            f" escapes in {ESCAPES:.0%} of certificates, a fault in fewer samples more often"
            " (-p parity_samples N compares more)"
        )
    said.append(
        "within a sample, a fault in up to a tenth of its rows escapes while each row stays nearer to its"
        " own token's reference than half way to a neighbouring token's"
    )
    if in_graph:
        said.append(
            "decoding: the server decodes inside CUDA graphs;"
            " --cuda-graph-backend-decode disabled would show it"
        )
    return said


def _share_of_extraction(store: Store, seconds: float) -> float | None:
    """Of the time that extracting this many samples takes, by the last run's rate; None when that extracted nothing."""
    path = store.folder / "data_config.json"
    last = read_json(path).get("last_run", {}) if path.is_file() else {}
    return seconds / (last["seconds"] / last["extracted"] * len(store.samples())) if last.get("extracted") else None


def _finite(value):
    """JSON knows no NaN and no infinity: None."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tests_table(record: dict) -> pd.DataFrame:
    words = {True: "passed", False: "FAILED", None: "measured only"}
    return pd.DataFrame([{"test": test["name"], "verdict": words[test["ok"]], "detail": test["detail"]} for test in record["tests"]])


def summary(record: dict) -> str:
    """A line per test, then the cost."""
    words = {True: "ok  ", False: "FAIL", None: "    "}
    lines = [f"{words[test['ok']]}  {test['name']:9} {test['detail']}" for test in record["tests"]] + [f"not seen: {what}" for what in record["unseen"]]
    return "\n".join([*lines, cost(record)])


def cost(record: dict) -> str:
    share = record["share_of_extraction"]
    text = f"{len(record['samples'])} of {record['of_samples']:,} samples, {record['tok']:,} tokens, {record['seconds']['all']:.1f} s"
    return text + (f", {share:.1%} of what extraction takes" if share else "")
