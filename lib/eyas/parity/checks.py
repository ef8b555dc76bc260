"""Judge whether a store holds the right states. `python -m eyas parity --profile P` calls this.

The command compares a bounded sample of the store with two independent references: what the server
returns for the same tokens, and Hugging Face's forward pass of the same weights. That pass is
computed twice: in float32 (`exact`), and in the dtype of serving, bfloat16 (`rounded`).

There are five tests:

- text: The token ids and the loss mask equal those of the prompt set, which is encoded again.
  An imported store has no prompt set. There, every supervised run must start right after the
  template's generation prompt. It must end with a control token, right before one, or at the
  end of the sample.
- head: The copied norm and head equal the target's weights, and head(norm(last state)) gives the
  server's own log-probability of every next token and of the server's first choice.
- boundary: Every stored boundary is nearest to the reference's boundary of the same id, among all
  N+1, and its distance is within the limit for rounding. No row is lost: each row is nearer to
  its own token's reference than half the distance to a neighbouring token's.
- serving: The server computes the same tokens in another batch and by decoding. Its states are the
  stored ones.
- policy: How many supervised tokens are the target's own choice. This test only reports numbers,
  because training on another model's text is a choice and no fault.

The rule for every limit: no limit is tuned, and none comes from what it judges. Floors and ties are
computed by Hugging Face from the target's files alone: its states, its norm and its head.

- The *floor* is measured: it is the distance between `rounded` and `exact` on these very tokens,
  after both have been converted to the store's number format and back.
- Two results that are each one floor from the truth are at most two floors apart (the triangle
  inequality). So every limit is two floors.
- The limit holds for the median over the tokens of each sample, and for the 90th percentile over
  the tokens of all samples.
- Where two different floors meet, the wider one counts: the head test compares the stored state,
  sent through the copied head, with the server's own logits.

Massive activations cannot decide a test. Every distance is per token, sum |x - r| / sum |r|, and
every test looks at quantiles of tokens. An fp8 store is judged by the same rule, because
quantisation does not increase this distance (L1): an fp8 code that flips moves by a whole step,
but a wide step flips proportionally less often. For a float32 store the floor, which is that of
bfloat16, is wider than necessary.

A bounded sample can miss a fault that is in few samples: n samples miss a fault that is in a
fraction p of the store with probability (1 - p)^n. The certificate's `unseen` states this.

Axes: T tokens of one sample, B stored boundaries, N+1 boundaries of the model, H hidden size,
V vocabulary.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from eyas.models.target import Head
from eyas.prompts.chat_template import Sample, template_hash, tokenizer_hash
from eyas.store.reader import from_fp8, to_fp8

FLOORS = 2  # the triangle inequality: two results, each one floor from the truth

# A reference with a wider floor than this is no reference. bfloat16 gives 0.002 an operation. On
# three tiny families the median floor was at most 0.02 (DeepSeek-V3, stored as fp8).
WIDEST_FLOOR = 0.25
WIDEST_LOGP_FLOOR = 0.5  # the same for log-probabilities, in nats (median)
LEAST_AGREEING = 0.5  # least fraction of positions whose first choice is the server's


@dataclass(frozen=True)
class ReferenceHead:
    """Hold the target's final norm and head in float32, as Hugging Face loads them from its files.

    The copies in the store are not used here.
    """

    norm: torch.nn.Module
    lm_head: torch.nn.Module
    after_norm: bool = False  # the states passed to `logits` are already normed

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., V] of states [..., H], in float32."""
        states = states.float()
        return self.lm_head(states if self.after_norm else self.norm(states)).float()

    def differences(self, head: Head) -> list[str]:
        """Return one sentence for each weight of `head` that differs from the target's."""
        faults = [
            _weight_difference("final norm", head.norm_weight, self.norm.weight.float()),
            _weight_difference("head", head.lm_head, self.lm_head.weight.float()),
        ]
        eps = getattr(self.norm, "variance_epsilon", getattr(self.norm, "eps", None))
        if eps is not None and not math.isclose(eps, head.eps, rel_tol=1e-6):
            faults.append(
                f"the copied norm adds {head.eps:g} to the variance, the target's {eps:g}"
            )
        return [fault for fault in faults if fault]

    def same_shapes(self, head: Head) -> bool:
        """Return whether the weights of `head` have the shapes of the target's."""
        return (
            head.lm_head.shape == self.lm_head.weight.shape
            and head.norm_weight.shape == self.norm.weight.shape
        )


def _weight_difference(name: str, copied: torch.Tensor, target: torch.Tensor) -> str:
    """Return how a copied weight differs from the target's, in words; empty if it is equal."""
    if copied.shape != target.shape:
        return f"the copied {name} is {list(copied.shape)}, the target's {list(target.shape)}"
    if torch.equal(copied, target):
        return ""
    differs = copied != target
    unit = "weights"
    if target.ndim > 1:
        differs = differs.flatten(1).any(1)
        unit = "rows"
    n_wrong = int(differs.sum())
    return f"{n_wrong:,} of {len(target):,} {unit} of the copied {name} are not the target's"


@dataclass(frozen=True)
class Reference:
    """Hold Hugging Face's forward pass over one sequence of token ids, in float32 and bfloat16.

    exact, rounded: the boundaries' states, [N+1, T, H].
    exact_logp, rounded_logp: log-probabilities [2, T-1] of the next token (row 0) and of the
    server's first choice (row 1).
    """

    exact: torch.Tensor
    rounded: torch.Tensor
    exact_logp: torch.Tensor
    rounded_logp: torch.Tensor
    head: ReferenceHead


@dataclass(frozen=True)
class Served:
    """Hold what the server returns for one sequence of T tokens.

    next_logp: log-probability of each next token, [T-1].
    top_ids: the server's first choice after each token but the last, [T-1].
    top_logp: log-probability of that first choice, [T-1].
    states: {way of computing: (positions [n], {boundary: rows [n, H]})}.
    """

    next_logp: torch.Tensor
    top_ids: torch.Tensor
    top_logp: torch.Tensor
    states: dict[str, tuple[torch.Tensor, dict[int, torch.Tensor]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """Hold everything that one sample is compared with.

    expected: the conversation, encoded again; None without a prompt set.
    """

    served: Served
    reference: Reference
    expected: Sample | None = None


@dataclass(frozen=True)
class Verdict:
    """Hold the result of one test.

    ok: None means that the test only measures.
    excess: the largest measured value in units of its limit; above 1 the test fails.
    rows: the numbers, one dict a row of a table.
    """

    name: str
    ok: bool | None
    detail: str
    excess: float = 0.0
    rows: tuple[dict, ...] = ()


def _failed(name: str, detail: str) -> Verdict:
    """Return the verdict on data that no limit can be applied to."""
    return Verdict(name, False, detail, math.inf)


# ---- distances


def distance(rows: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return sum |x - r| / sum |r| of each token: [..., H] -> [...].

    A row with NaN gives NaN, which no limit accepts.
    """
    rows = rows.float()
    reference = reference.float()
    return (rows - reference).abs().sum(-1) / reference.abs().sum(-1)


def as_stored(rows: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return states [..., H] after conversion to the store's number format and back.

    `Store.read` returns states in this form.
    """
    if dtype == "float8_e4m3fn":
        return from_fp8(*to_fp8(rows.to(torch.bfloat16).flatten(0, -2))).view(rows.shape)
    return rows.to(getattr(torch, dtype))


def _quantile(values: torch.Tensor, q: float) -> float:
    return float(torch.quantile(values.double(), q))


def _excess(measured: float, limit: float) -> float:
    """Return measured / limit.

    It is 0 if `measured` is 0. Otherwise it is infinite if `measured` is NaN or the limit is 0.
    """
    if measured == 0:
        return 0.0
    return measured / limit if limit > 0 and not math.isnan(measured) else math.inf


def _error_and_limit(error: torch.Tensor, floor: torch.Tensor) -> dict[str, float]:
    """Return the median and the 90th percentile over all tokens, of the error and of its limit.

    `excess` is the larger of the two ratios of error to limit.
    """
    row = {}
    ratios = []
    for name, q in (("p50", 0.5), ("p90", 0.9)):
        measured = _quantile(error, q)
        limit = FLOORS * _quantile(floor, q)
        row |= {f"error_{name}": measured, f"limit_{name}": limit}
        ratios.append(_excess(measured, limit))
    return row | {"excess": max(ratios)}


# ---- the tests


def examine(
    samples: dict[str, dict],
    evidence: dict[str, Evidence],
    head: Head,
    dtype: str,
    tokenizer,
    hashes: dict | None = None,
) -> list[Verdict]:
    """Run all tests on samples, as `Store.read` returns them, each against its own evidence.

    Nothing is read from disk and no server is called. `dtype` is the store's number format.
    `hashes` are tokenizer_hash and template_hash of the store's manifest, where it has them.
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
    """Compare token ids and loss masks with the prompt set's, or with the template's form."""
    wrong = []
    for name, hash_of in (("tokenizer_hash", tokenizer_hash), ("template_hash", template_hash)):
        if hashes.get(name) and hashes[name] != hash_of(tokenizer):
            wrong.append(f"the store's {name.replace('_', ' ')} is not the target's")
    opening = generation_prompt(tokenizer)
    with_prompt = 0
    for id, sample in samples.items():
        expected = evidence[id].expected
        fault = ""
        if expected is not None:
            with_prompt += 1
            fault = _encoding_fault(sample, expected)
        elif opening:
            fault = _mask_fault(sample, tokenizer, opening)
        if fault:
            wrong.append(f"{id}: {fault}")
    if wrong:
        others = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return _failed("text", "; ".join(wrong[:3]) + others)
    if with_prompt < len(samples) and not opening:
        detail = "no prompt set, and the template has no generation prompt:"
        return Verdict("text", None, f"{detail} the loss mask could not be checked")
    where = "where the template puts its answers"
    if with_prompt == len(samples):
        where = "the prompt set's"
    return Verdict("text", True, f"token ids and loss mask of {len(samples)} samples are {where}")


def _encoding_fault(sample: dict, expected: Sample) -> str:
    """Return how a sample differs from its conversation, encoded again; empty if it is equal."""
    if not np.array_equal(sample["input_ids"].numpy(), expected.input_ids):
        return "other token ids than its conversation, encoded again"
    if not np.array_equal(sample["loss_mask"].numpy(), expected.loss_mask):
        return "another loss mask than its conversation's"
    return ""


def generation_prompt(tokenizer) -> str:
    """Return what the template writes before an answer, for example '<|im_start|>assistant\\n'.

    The result is empty if the template has no generation prompt.
    """
    question = [{"role": "user", "content": "a"}]
    if not isinstance(tokenizer.chat_template, str):
        return ""
    plain = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=False)
    opened = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    return opened[len(plain) :] if opened.startswith(plain) else ""


def _mask_fault(sample: dict, tokenizer, opening: str) -> str:
    """Return what is wrong with the first faulty supervised run; empty if there is none.

    A run must start right after the generation prompt and end where an answer ends.
    """
    ids = sample["input_ids"].tolist()  # [T]
    mask = sample["loss_mask"].int()  # [T]
    control = set(tokenizer.all_special_ids)
    edges = torch.diff(mask, prepend=mask.new_zeros(1), append=mask.new_zeros(1))  # [T+1]
    starts = edges.eq(1).nonzero().flatten().tolist()
    ends = edges.eq(-1).nonzero().flatten().tolist()
    if not starts:
        return "nothing is supervised"
    for start, end in zip(starts, ends):
        if not tokenizer.decode(ids[:start], skip_special_tokens=False).endswith(opening):
            return f"the supervised run from token {start} does not follow {opening!r}"
        if end < len(ids) and ids[end - 1] not in control and ids[end] not in control:
            return f"the supervised run to token {end} does not end with its turn"
    return ""


@dataclass(frozen=True)
class HeadErrors:
    """Hold how the log-probabilities of one sample differ, in nats.

    There are two log-probabilities a position: of the next token and of the server's first choice.

    error: stored state through the copied head, compared with the server, [2(T-1)].
    stored_floor: rounding of the stored state, sent through the reference's head, [2(T-1)].
    server_floor: rounding of the server's own logits, [2(T-1)].
    preference: log-probability of the copied head's first choice minus that of the server's, [T-1].
    """

    error: torch.Tensor
    stored_floor: torch.Tensor
    server_floor: torch.Tensor
    preference: torch.Tensor

    def excess(self) -> float:
        """Return this sample's median error in units of its limit."""
        floor = max(_quantile(self.stored_floor, 0.5), _quantile(self.server_floor, 0.5))
        return _excess(_quantile(self.error, 0.5), FLOORS * floor)

    @classmethod
    def joined(cls, parts: "list[HeadErrors]") -> "HeadErrors":
        """Return the tokens of several samples as if they were one."""
        return cls(
            torch.cat([part.error for part in parts]),
            torch.cat([part.stored_floor for part in parts]),
            torch.cat([part.server_floor for part in parts]),
            torch.cat([part.preference for part in parts]),
        )


def head_test(
    samples: dict[str, dict], evidence: dict[str, Evidence], head: Head, dtype: str
) -> Verdict:
    """Judge the copied norm and head, and the stored last state through them.

    The weights must all be the target's; that needs no sample. The log-probabilities are judged by
    the server's own. Where the first choice is not the server's, the two tokens must tie: each
    log-probability may be off by two of the largest floors. The floors are measured with the
    reference's own head.
    """
    reference_head = next(iter(evidence.values())).reference.head
    wrong = reference_head.differences(head)
    if wrong:
        wrong[-1] += " (python -m eyas verify --repair writes them again)"
    if not reference_head.same_shapes(head):
        return _failed("head", "; ".join(wrong))
    parts = []
    for id, sample in samples.items():
        n_rows = sample["states"][max(sample["states"])].shape[0]
        n_tok = len(sample["input_ids"])
        if n_rows != n_tok:
            return _failed("head", f"{id}: {n_rows} rows for {n_tok} tokens")
        parts.append(_head_errors(sample, evidence[id], head, dtype))
    numbers, floor = _head_numbers(parts)
    if floor > WIDEST_LOGP_FLOOR:
        wrong.append(
            f"the reference itself is {floor:.2f} nats from exact,"
            f" rounding gives at most {WIDEST_LOGP_FLOOR}: it is no reference"
        )
    excess = numbers["excess"]
    detail = (
        f"first choice as the server's at {numbers['agreeing']:,} of {numbers['positions']:,}"
        f" positions, {numbers['ties']} more tie; log-probabilities {numbers['error_p50']:.3f}"
        f" apart (median), {excess:.2f} of the limit"
    )
    return Verdict(
        "head",
        excess <= 1 and not wrong,
        "; ".join([*wrong, detail]),
        math.inf if wrong else excess,
        (numbers | {"wrong_weights": wrong},),
    )


def _head_errors(sample: dict, evidence: Evidence, head: Head, dtype: str) -> HeadErrors:
    """Return the errors and floors of one sample's log-probabilities."""
    served = evidence.served
    reference = evidence.reference
    last = sample["states"][max(sample["states"])]  # [T, H]
    both = torch.stack([sample["input_ids"][1:], served.top_ids])  # [2, T-1]
    copied, copied_first = _log_probabilities(head, last, both)
    rounded_last = as_stored(reference.rounded[-1], dtype)
    through_store, _ = _log_probabilities(reference.head, rounded_last, both)
    error = copied - torch.stack([served.next_logp, served.top_logp])  # [2, T-1]
    stored_floor = through_store - reference.exact_logp
    server_floor = reference.rounded_logp - reference.exact_logp
    return HeadErrors(
        error.abs().flatten(),
        stored_floor.abs().flatten(),
        server_floor.abs().flatten(),
        copied_first - copied[1],
    )


def _head_numbers(parts: list[HeadErrors]) -> tuple[dict, float]:
    """Return the head test's numbers over all samples, and the median floor in nats."""
    tokens = HeadErrors.joined(parts)
    wider = tokens.server_floor
    if tokens.stored_floor.median() > tokens.server_floor.median():
        wider = tokens.stored_floor
    row = _error_and_limit(tokens.error, wider)
    # Two log-probabilities are compared, each of which may be off by FLOORS floors.
    tie = FLOORS**2 * float(torch.maximum(tokens.stored_floor, tokens.server_floor).max())
    preference = tokens.preference
    agreeing = int((preference <= 0).sum())
    ties = int(((preference > 0) & (preference <= tie)).sum())
    floor = _quantile(wider, 0.5)
    excess = max(
        row["excess"],
        *[part.excess() for part in parts],
        _excess(float(preference.max()), tie),
        LEAST_AGREEING * len(preference) / max(agreeing, 1e-9),
        floor / WIDEST_LOGP_FLOOR,
    )
    counts = {"positions": len(preference), "agreeing": agreeing, "ties": ties}
    return counts | row | {"excess": excess}, floor


def _log_probabilities(
    head: Head | ReferenceHead,
    states: torch.Tensor,  # [T, H]
    ids: torch.Tensor,  # [2, T-1]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities [2, T-1] of `ids`, and those [T-1] of the head's first choices.

    `ids` are candidates for the token that follows each state but the last.
    """
    logp = head.logits(states[:-1]).log_softmax(-1)  # [T-1, V]
    return logp.gather(1, ids.T).T, logp.amax(-1)


def boundary_test(samples: dict[str, dict], evidence: dict[str, Evidence], dtype: str) -> Verdict:
    """Compare every stored boundary with all N+1 boundaries of the reference."""
    matches: dict[int, list[Match]] = {}
    for id, sample in samples.items():
        reference = evidence[id].reference
        exact = as_stored(reference.exact, dtype)  # [N+1, T, H]
        for b, rows in sample["states"].items():
            if rows.shape != exact[b].shape:
                n_tok = len(sample["input_ids"])
                return _failed(
                    "boundary", f"{id}: boundary {b} is {tuple(rows.shape)} for {n_tok} tokens"
                )
            rounded = as_stored(reference.rounded[b], dtype)  # [T, H]
            matches.setdefault(b, []).append(match(rows, exact, rounded, b))
    table = [_boundary_row(b, of_samples) for b, of_samples in sorted(matches.items())]
    wrong = [fault for fault in map(_boundary_fault, table) if fault]
    excess = max(row["excess"] for row in table)
    n_boundaries = next(iter(evidence.values())).reference.exact.shape[0]
    margin = min(row["margin"] for row in table)
    good = (
        f"each is nearest to its own of {n_boundaries},"
        f" the second is {margin:.0f} times as far; {excess:.2f} of the limit"
    )
    return Verdict("boundary", not wrong, "; ".join(wrong) or good, excess, tuple(table))


def _boundary_row(b: int, matches: "list[Match]") -> dict:
    """Return the numbers of boundary `b` over all samples."""
    wrongly_nearest = [m.nearest for m in matches if m.nearest != b]
    row = {
        "boundary": b,
        "nearest": wrongly_nearest[0] if wrongly_nearest else b,
        "margin": min(m.margin for m in matches),
        "lost_rows": sum(m.lost for m in matches),
    }
    error = torch.cat([m.error for m in matches])
    floor = torch.cat([m.floor for m in matches])
    row |= _error_and_limit(error, floor)
    excesses = [row["excess"], *(m.excess() for m in matches)]
    if row["lost_rows"]:
        excesses += [m.worst for m in matches]
    excesses.append(_median_floor(row) / WIDEST_FLOOR)
    return row | {"excess": max(excesses)}


def _median_floor(row: dict) -> float:
    return row["limit_p50"] / FLOORS


def _boundary_fault(row: dict) -> str:
    """Return in words why a row of the boundary table fails; empty if it passes."""
    b = row["boundary"]
    floor = _median_floor(row)
    if row["nearest"] != b:
        return f"{b} is nearest to {row['nearest']}"
    if row["lost_rows"]:
        return f"{row['lost_rows']} rows of boundary {b} are not their tokens'"
    if floor > WIDEST_FLOOR:
        return (
            f"the reference of {b} is {floor:.0%} from exact,"
            f" rounding gives at most {WIDEST_FLOOR:.0%}: it is no reference"
        )
    if row["excess"] > 1:
        return f"{b} is {FLOORS * row['excess']:.1f} floors away"
    return ""


@dataclass(frozen=True)
class Match:
    """Hold how one boundary of one sample compares with all boundaries of the reference.

    nearest: the reference's nearest boundary, by the median over tokens.
    margin: distance to the second nearest boundary / distance to the right one.
    lost: number of rows that are not their own token's.
    worst: the largest distance of a row, in units of the distance at which it counts as lost.
    error, floor: distance of each row to the reference, and of the reference's rounding, [T].
    """

    nearest: int
    margin: float
    lost: int
    worst: float
    error: torch.Tensor
    floor: torch.Tensor

    def excess(self) -> float:
        """Return this sample's median error in units of its limit."""
        return _excess(_quantile(self.error, 0.5), FLOORS * _quantile(self.floor, 0.5))


def match(
    rows: torch.Tensor,  # [T, H], stored as boundary b
    exact: torch.Tensor,  # [N+1, T, H]
    rounded: torch.Tensor,  # [T, H], the reference's own rounding of boundary b
    b: int,
) -> Match:
    """Compare the stored rows of boundary `b` with every boundary of the reference."""
    to_each = distance(rows, exact)  # [N+1, T]
    error = to_each[b]  # [T]
    floor = distance(rounded, exact[b])  # [T]
    medians = torch.nan_to_num(to_each.median(-1).values, nan=math.inf)  # [N+1]
    second = float(torch.cat([medians[:b], medians[b + 1 :]]).min())
    nearest = b if medians[b] <= second else int(medians.argmin())
    margin = second / float(medians[b]) if medians[b] else math.inf

    lost_at = torch.maximum(_neighbour_distance(exact[b]) / 2, FLOORS * floor.max())  # [T]
    lost = torch.nan_to_num(error / lost_at, nan=math.inf)  # [T], above 1: lost
    # Boundary 0 is not rounded. A token that follows itself is its own neighbour there: 0 / 0.
    lost[error == 0] = 0.0
    return Match(nearest, margin, int((lost > 1).sum()), float(lost.max()), error, floor)


def _neighbour_distance(rows: torch.Tensor) -> torch.Tensor:
    """Return the distance [T] of each row [T, H] to the nearer of its two neighbours."""
    none = torch.full((1,), math.inf)
    to_previous = torch.cat([none, distance(rows[:-1], rows[1:])])  # relative to the later row
    to_next = torch.cat([distance(rows[1:], rows[:-1]), none])  # relative to the earlier row
    return torch.minimum(to_previous, to_next)


def serving_test(samples: dict[str, dict], evidence: dict[str, Evidence], dtype: str) -> Verdict:
    """Compare the stored rows with what the server computes for the same tokens in other ways."""
    parts: dict[tuple[str, int], list] = {}  # (way, boundary) -> [(error [n], floor [n])]
    for id, sample in samples.items():
        reference = evidence[id].reference
        for way, (positions, states) in evidence[id].served.states.items():
            for b, rows in sample["states"].items():
                n_tok = len(sample["input_ids"])
                if len(rows) != n_tok:
                    return _failed("serving", f"{id}: {len(rows)} rows for {n_tok} tokens")
                rounded = as_stored(reference.rounded[b][positions], dtype)
                floor = distance(rounded, as_stored(reference.exact[b][positions], dtype))
                error = distance(rows[positions], as_stored(states[b], dtype))
                parts.setdefault((way, b), []).append((error, floor))
    if not parts:
        return Verdict(
            "serving", None, "the server was not asked for other ways to compute these tokens"
        )
    table = []
    for (way, b), pairs in sorted(parts.items()):
        error, floor = map(torch.cat, zip(*pairs))
        row = {"how": way, "boundary": b, "tok": len(error)}
        table.append(row | _error_and_limit(error, floor))
    worst = max(table, key=lambda row: row["excess"])
    ways = ", ".join(dict.fromkeys(row["how"] for row in table))
    detail = (
        f"{ways}: at most {FLOORS * worst['excess']:.2f} floors apart"
        f" (boundary {worst['boundary']}, {worst['how']}), {FLOORS} are allowed"
    )
    return Verdict("serving", worst["excess"] <= 1, detail, worst["excess"], tuple(table))


def policy_test(samples: dict[str, dict], evidence: dict[str, Evidence]) -> Verdict:
    """Count the supervised tokens that are the server's greedy choice.

    The mean log-probability (nats) of the supervised tokens is reported too.
    """
    greedy = ties = total = 0
    logp_sum = 0.0
    for id, sample in samples.items():
        served = evidence[id].served
        reference = evidence[id].reference
        supervised = sample["loss_mask"][1:][: len(served.next_logp)]  # [T-1]
        is_greedy = (served.top_ids == sample["input_ids"][1:]) & supervised
        tie = FLOORS * (reference.rounded_logp - reference.exact_logp).abs().max()
        is_tie = supervised & ~is_greedy & (served.top_logp - served.next_logp <= tie)
        greedy += int(is_greedy.sum())
        total += int(supervised.sum())
        ties += int(is_tie.sum())
        logp_sum += float(served.next_logp[supervised].sum())
    others = total - greedy - ties
    words = f"{others} are not the target's own" if others else "the target's own words"
    mean_logp = logp_sum / max(total, 1)
    detail = (
        f"{greedy:,} of {total:,} supervised tokens are the server's first choice,"
        f" {ties} more are within rounding of it; {words};"
        f" mean log-probability {mean_logp:.3f}"
    )
    row = {"supervised": total, "greedy": greedy, "ties": ties, "mean_logp": mean_logp}
    return Verdict("policy", None, detail, 0.0, (row,))


def after_norm(evidence: Evidence) -> Evidence:
    """Return the evidence with the final norm applied to its last states.

    Some imported stores hold their last states after the final norm.
    """
    served = evidence.served
    reference = evidence.reference

    @torch.inference_mode()
    def normed(states: torch.Tensor) -> torch.Tensor:
        return reference.head.norm(states.float()).to(states.dtype)

    def last_normed(states: torch.Tensor) -> torch.Tensor:  # [N+1, T, H]
        return torch.cat([states[:-1], normed(states[-1:])])

    last = len(reference.exact) - 1
    ways = {
        way: (positions, rows | {last: normed(rows[last])})
        for way, (positions, rows) in served.states.items()
    }
    normed_reference = replace(
        reference,
        exact=last_normed(reference.exact),
        rounded=last_normed(reference.rounded),
        head=replace(reference.head, after_norm=True),
    )
    return replace(evidence, served=replace(served, states=ways), reference=normed_reference)
