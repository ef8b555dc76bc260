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

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from eyas.models.target import Head
from eyas.prompts.chat_template import Sample, template_hash, tokenizer_hash
from eyas.store.reader import from_fp8, to_fp8

FLOORS = 2  # the triangle inequality: two results, each one floor from the truth
WIDEST_FLOOR = 0.25  # of a boundary's states, median; bfloat16 gives 0.002 an operation and was measured at up to 0.05
WIDEST_LOGP_FLOOR = 0.5  # of log-probabilities in nats, median
LEAST_AGREEING = 0.5  # share of positions whose first choice is the server's, ties left out


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
                wrong.append(
                    f"the copied {name} is {list(copied.shape)}, the target's {list(own.shape)}"
                )
            elif not torch.equal(copied, own):
                rows = int(
                    (copied != own).flatten(1).any(1).sum()
                    if own.ndim > 1
                    else (copied != own).sum()
                )
                unit = "rows" if own.ndim > 1 else "weights"
                wrong.append(
                    f"{rows:,} of {len(own):,} {unit} of the copied {name} are not the target's"
                )
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
    return row | {
        "excess": max(
            _excess(row[f"error_{name}"], row[f"limit_{name}"]) for name in ("p50", "p90")
        )
    }


# ---- the tests


def examine(
    samples: dict[str, dict],
    evidence: dict[str, Evidence],
    head: Head,
    dtype: str,
    tokenizer,
    hashes: dict | None = None,
) -> list[Verdict]:
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


def text_test(
    samples: dict[str, dict], evidence: dict[str, Evidence], tokenizer, hashes: dict
) -> Verdict:
    """Token ids and loss mask."""
    wrong = [
        f"the store's {name.replace('_', ' ')} is not the target's"
        for name, of in (("tokenizer_hash", tokenizer_hash), ("template_hash", template_hash))
        if hashes.get(name) and hashes[name] != of(tokenizer)
    ]
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
        return Verdict(
            "text",
            False,
            "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""),
            math.inf,
        )
    if by_prompts < len(samples) and not opening:
        return Verdict(
            "text",
            None,
            "no prompt set, and the template has no generation prompt: the loss mask could not be checked",
        )
    where = (
        "the prompt set's" if by_prompts == len(samples) else "where the template puts its answers"
    )
    return Verdict("text", True, f"token ids and loss mask of {len(samples)} samples are {where}")


def generation_prompt(tokenizer) -> str:
    """What the template writes before an answer, such as '<|im_start|>assistant\\n'; empty where it has none."""
    question = [{"role": "user", "content": "a"}]
    if not isinstance(tokenizer.chat_template, str):
        return ""
    plain, opened = (
        tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=flag)
        for flag in (False, True)
    )
    return opened[len(plain) :] if opened.startswith(plain) else ""


def _mask_fault(sample: dict, tokenizer, opening: str) -> str:
    """The first supervised run that does not start behind the generation prompt or does not end where an answer does, or nothing."""
    ids, mask = sample["input_ids"].tolist(), sample["loss_mask"].int()
    control = set(tokenizer.all_special_ids)
    edges = torch.diff(mask, prepend=mask.new_zeros(1), append=mask.new_zeros(1))
    starts, ends = (
        edges.eq(1).nonzero().flatten().tolist(),
        edges.eq(-1).nonzero().flatten().tolist(),
    )
    if not starts:
        return "nothing is supervised"
    for start, end in zip(starts, ends):
        if not tokenizer.decode(ids[:start], skip_special_tokens=False).endswith(opening):
            return f"the supervised run from token {start} does not follow {opening!r}"
        if end < len(ids) and ids[end - 1] not in control and ids[end] not in control:
            return f"the supervised run to token {end} does not end with its turn"
    return ""


def head_test(
    samples: dict[str, dict], evidence: dict[str, Evidence], head: Head, dtype: str
) -> Verdict:
    """Judge the copied norm and head, and the stored last state through them, by the server's own log-probabilities.

    The weights have to be the target's, all of them: that needs no sample. A first choice that is not the server's has to be a tie: neither
    token's log-probability further off than two of the largest floors. The floors are those of the reference's own head.
    """
    judge = next(iter(evidence.values())).reference.head
    wrong = judge.differences(head)
    if wrong:
        wrong[-1] += " (python -m eyas verify --repair writes them again)"
    if any(
        tuple(weight.shape) != tuple(own.shape)
        for weight, own in (
            (head.lm_head, judge.lm_head.weight),
            (head.norm_weight, judge.norm.weight),
        )
    ):
        return Verdict("head", False, "; ".join(wrong), math.inf)
    parts = []  # (error [2(T-1)], floor of the store's way [2(T-1)], floor of the server's [2(T-1)], what the head prefers its own first choice by [T-1])
    for id, sample in samples.items():
        served, reference, ids = evidence[id].served, evidence[id].reference, sample["input_ids"]
        last = sample["states"][max(sample["states"])]
        if last.shape[0] != len(ids):
            return Verdict(
                "head", False, f"{id}: {last.shape[0]} rows for {len(ids)} tokens", math.inf
            )
        both = torch.stack([ids[1:], served.top_ids])  # [2, T-1]
        mine, first = _log_probabilities(head, last, both)
        analogue, _ = _log_probabilities(judge, as_stored(reference.rounded[-1], dtype), both)
        error = mine - torch.stack([served.next_logp, served.top_logp])
        stored = analogue - reference.exact_logp
        own = reference.rounded_logp - reference.exact_logp
        parts.append(
            (error.abs().flatten(), stored.abs().flatten(), own.abs().flatten(), first - mine[1])
        )
    error, stored, own, behind = map(torch.cat, zip(*parts))
    wider = stored if stored.median() > own.median() else own
    row, tie = _summary(error, wider), FLOORS**2 * float(torch.maximum(stored, own).max())
    each = [
        _excess(_quantile(e, 0.5), FLOORS * max(_quantile(s, 0.5), _quantile(o, 0.5)))
        for e, s, o, _ in parts
    ]
    agreeing, ties = int((behind <= 0).sum()), int(((behind > 0) & (behind <= tie)).sum())
    floor = _quantile(wider, 0.5)
    excess = max(
        row["excess"],
        *each,
        _excess(float(behind.max()), tie),
        LEAST_AGREEING * len(behind) / max(agreeing, 1e-9),
        floor / WIDEST_LOGP_FLOOR,
    )
    if floor > WIDEST_LOGP_FLOOR:
        wrong.append(
            f"the reference itself is {floor:.2f} nats from exact, rounding gives at most {WIDEST_LOGP_FLOOR}: it is no reference"
        )
    detail = f"first choice as the server's at {agreeing:,} of {len(behind):,} positions, {ties} more tie; "
    detail += f"log-probabilities {row['error_p50']:.3f} apart (median), {excess:.2f} of the limit"
    numbers = (
        {"positions": len(behind), "agreeing": agreeing, "ties": ties}
        | row
        | {"excess": excess, "wrong_weights": wrong}
    )
    return Verdict(
        "head",
        excess <= 1 and not wrong,
        "; ".join([*wrong, detail]),
        math.inf if wrong else excess,
        (numbers,),
    )


def _log_probabilities(
    head: Head, states: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
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
                return Verdict(
                    "boundary",
                    False,
                    f"{id}: boundary {b} is {tuple(rows.shape)} for {len(sample['input_ids'])} tokens",
                    math.inf,
                )
            parts.setdefault(b, []).append(
                match(rows, exact, as_stored(reference.rounded[b], dtype), b)
            )
    table, wrong = [], []
    for b, found in sorted(parts.items()):
        row = {
            "boundary": b,
            "nearest": next((m.nearest for m in found if m.nearest != b), b),
            "margin": min(m.margin for m in found),
        }
        row["lost_rows"] = sum(m.lost for m in found)
        row |= _summary(torch.cat([m.error for m in found]), torch.cat([m.floor for m in found]))
        row["excess"] = max(
            row["excess"],
            *(_excess(_quantile(m.error, 0.5), FLOORS * _quantile(m.floor, 0.5)) for m in found),
        )
        if row["lost_rows"]:
            row["excess"] = max(row["excess"], *(m.worst for m in found))
        floor = row["limit_p50"] / FLOORS
        row["excess"] = max(row["excess"], floor / WIDEST_FLOOR)
        if row["nearest"] != b:
            wrong.append(f"{b} is nearest to {row['nearest']}")
        elif row["lost_rows"]:
            wrong.append(f"{row['lost_rows']} rows of boundary {b} are not their tokens'")
        elif floor > WIDEST_FLOOR:
            wrong.append(
                f"the reference of {b} is {floor:.0%} from exact, rounding gives at most {WIDEST_FLOOR:.0%}: it is no reference"
            )
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
    behind, ahead = (
        distance(exact[b][:-1], exact[b][1:]),
        distance(exact[b][1:], exact[b][:-1]),
    )  # [T-1], relative to the later and to the earlier row
    neighbour = torch.minimum(torch.cat([inf, behind]), torch.cat([ahead, inf]))  # [T]
    lost = torch.nan_to_num(
        error / torch.maximum(neighbour / 2, FLOORS * floor.max()), nan=math.inf
    )  # [T], above 1: lost
    lost[error == 0] = (
        0.0  # at boundary 0, where nothing is rounded, a token that stands there twice in a row is its own neighbour: 0 / 0
    )
    nearest = b if middle[b] <= second else int(middle.argmin())
    return Match(
        nearest,
        second / float(middle[b]) if middle[b] else math.inf,
        int((lost > 1).sum()),
        float(lost.max()),
        error,
        floor,
    )


def serving_test(samples: dict[str, dict], evidence: dict[str, Evidence], dtype: str) -> Verdict:
    """The stored rows against what the server computes for the same tokens in other ways, beside the floor."""
    parts: dict[tuple[str, int], list] = {}
    for id, sample in samples.items():
        reference = evidence[id].reference
        for how, (positions, states) in evidence[id].served.states.items():
            for b, rows in sample["states"].items():
                if len(rows) != len(sample["input_ids"]):
                    return Verdict(
                        "serving",
                        False,
                        f"{id}: {len(rows)} rows for {len(sample['input_ids'])} tokens",
                        math.inf,
                    )
                floor = distance(
                    as_stored(reference.rounded[b][positions], dtype),
                    as_stored(reference.exact[b][positions], dtype),
                )
                parts.setdefault((how, b), []).append(
                    (distance(rows[positions], as_stored(states[b], dtype)), floor)
                )
    if not parts:
        return Verdict(
            "serving", None, "the server was not asked for other ways to compute these tokens"
        )
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
    return Verdict(
        "policy",
        None,
        detail,
        0.0,
        ({"supervised": total, "greedy": greedy, "ties": near, "mean_logp": logp / max(total, 1)},),
    )


def after_norm(evidence: Evidence) -> Evidence:
    """Return the same for a store whose last states stand after the final norm, as some imports have them."""
    served, reference = evidence.served, evidence.reference

    @torch.inference_mode()
    def normed(states: torch.Tensor) -> torch.Tensor:
        return reference.head.norm(states.float()).to(states.dtype)

    def last_normed(states: torch.Tensor) -> torch.Tensor:  # [N+1, T, H]
        return torch.cat([states[:-1], normed(states[-1:])])

    last = len(reference.exact) - 1
    ways = {
        how: (at, rows | {last: normed(rows[last])}) for how, (at, rows) in served.states.items()
    }
    judged = replace(
        reference,
        exact=last_normed(reference.exact),
        rounded=last_normed(reference.rounded),
        head=replace(reference.head, after_norm=True),
    )
    return replace(evidence, served=replace(served, states=ways), reference=judged)
