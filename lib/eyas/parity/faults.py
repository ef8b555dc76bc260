"""Put faults that stores have had into good data in memory, and list which test catches each.

Nothing is written to disk, and nothing is requested from a server. Every fault is made from the
samples, as `Store.read` returns them, and from their evidence.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from eyas.models.target import Head
from eyas.parity.checks import (
    Evidence,
    Reference,
    Served,
    as_stored,
    distance,
    examine,
    generation_prompt,
    text_test,
)
from eyas.store.reader import from_fp8, to_fp8

FP8 = "float8_e4m3fn"


@dataclass(frozen=True)
class Altered:
    """Hold altered samples with their evidence, as a store of number format `dtype` has them.

    fault: the name of the fault. size: how much was altered, in words.
    head: the copied norm and head of the altered store.
    """

    fault: str
    size: str
    samples: dict[str, dict]
    evidence: dict[str, Evidence]
    dtype: str
    head: Head


def clean(
    samples: dict[str, dict], evidence: dict[str, Evidence], head: Head, dtype: str
) -> Iterator[Altered]:
    """Yield what must pass: the data as they are, and as an fp8 store holds them."""
    yield Altered("none", "the data as they are", samples, evidence, dtype, head)
    if dtype != FP8:
        stored = {id: _with(s, lambda b, rows: as_stored(rows, FP8)) for id, s in samples.items()}
        yield Altered(
            "none, stored as fp8", "a scale per token and boundary", stored, evidence, FP8, head
        )


def faults(
    samples: dict[str, dict],
    evidence: dict[str, Evidence],
    head: Head,
    dtype: str,
    tokenizer,
    embedding: torch.Tensor,  # [V, H] of the target
) -> Iterator[Altered]:
    """Yield each fault, put into the first sample or into the first two.

    Each fault is as small as it can be.
    """
    pair = _Pair(samples, evidence, head, dtype)
    yield from _wrong_states(pair)
    yield from _exchanged_samples(pair)
    yield from _shared_fp8_scale(pair)
    yield from _wrong_text(pair, tokenizer)
    for fault, size, wrong in wrong_heads(head, embedding):
        yield Altered(fault, size, samples, evidence, dtype, wrong)
    yield from _single_rows(pair)


class _Pair:
    """Hold two good samples, and make altered copies of them."""

    def __init__(
        self, samples: dict[str, dict], evidence: dict[str, Evidence], head: Head, dtype: str
    ):
        self.ids = list(samples)[:2]
        self.first = samples[self.ids[0]]
        self.second = samples[self.ids[1]]
        self.first_evidence = evidence[self.ids[0]]
        self.second_evidence = evidence[self.ids[1]]
        self.head = head
        self.dtype = dtype
        self.boundaries = sorted(self.first["states"])
        self.n_tok = len(self.first["input_ids"])
        # The second sample's row for each token of the first, from the start again where it ends
        self.second_row = torch.arange(self.n_tok) % len(self.second["input_ids"])  # [T]

    def in_first(self, fault: str, size: str, sample: dict, dtype: str = "") -> Altered:
        """Return a fault whose altered data are `sample` in place of the first one."""
        first = self.ids[0]
        return Altered(
            fault,
            size,
            {first: sample},
            {first: self.first_evidence},
            dtype or self.dtype,
            self.head,
        )

    def in_states(self, fault: str, size: str, change) -> Altered:
        """Return a fault in the first sample's states: change(b, rows [T, H]) -> rows."""
        return self.in_first(fault, size, _with(self.first, change))

    def in_both(
        self, fault: str, samples: tuple[dict, dict], evidence: tuple[Evidence, Evidence]
    ) -> Altered:
        """Return a fault that needs both samples."""
        return Altered(
            fault,
            "2 samples",
            dict(zip(self.ids, samples)),
            dict(zip(self.ids, evidence)),
            self.dtype,
            self.head,
        )


def _wrong_states(pair: _Pair) -> Iterator[Altered]:
    """Yield faults in many rows of one sample."""
    T = pair.n_tok
    middle = T // 2
    last = pair.boundaries[-1]
    middle_boundary = pair.boundaries[(len(pair.boundaries) - 1) // 2]
    for where, b in (
        ("start", pair.boundaries[0]),
        ("middle", middle_boundary),
        ("end", last),
    ):
        yield _shifted_boundary(pair, where, b)

    last_rows = pair.first["states"][last]
    normed = as_stored(pair.head.normed(last_rows), pair.dtype)
    if not torch.equal(normed, last_rows):
        yield pair.in_states(
            "last state after the norm",
            f"{distance(normed, last_rows).median():.0%} away",
            lambda b, x: normed if b == last else x,
        )
    yield pair.in_states(
        "rows shifted by one token",
        f"{T - 1} of {T} rows",
        lambda b, x: torch.cat([x[:1], x[:-1]]),
    )
    yield pair.in_states(
        "one row repeated, the next dropped",
        f"1 of {T} rows",
        lambda b, x: torch.cat([x[: middle + 1], x[middle : middle + 1], x[middle + 2 :]]),
    )
    yield pair.in_states(
        "half the rows from a prefix-cache hit",
        f"{middle} of {T} rows were never written",
        lambda b, x: torch.cat([torch.zeros_like(x[:middle]), x[middle:]]),
    )
    stale = pair.second_row[:middle]
    yield pair.in_states(
        "the same, another request's rows in their place",
        f"{middle} of {T} rows",
        lambda b, x: torch.cat([pair.second["states"][b][stale], x[middle:]]),
    )


def _shifted_boundary(pair: _Pair, where: str, stored: int) -> Altered:
    """Return the fault that boundary `stored` holds the states of the next (or previous) one."""
    holds = stored + 1 if stored < pair.boundaries[-1] else stored - 1
    rows = as_stored(pair.first_evidence.reference.rounded[holds], pair.dtype)
    apart = distance(rows, pair.first["states"][stored]).median()
    return pair.in_states(
        f"boundary shifted by one, {where}",
        f"boundary {stored} holds {holds}, {apart:.0%} away",
        lambda b, x: rows if b == stored else x,
    )


def _exchanged_samples(pair: _Pair) -> Iterator[Altered]:
    """Yield faults in which one sample holds what belongs to the other."""
    first = pair.first
    second = pair.second
    first_row = torch.arange(len(second["input_ids"])) % pair.n_tok
    yield pair.in_both(
        "states of two samples swapped",
        (
            _with(first, lambda b, x: second["states"][b][pair.second_row]),
            _with(second, lambda b, x: first["states"][b][first_row]),
        ),
        (pair.first_evidence, pair.second_evidence),
    )
    if pair.first_evidence.expected is not None:
        yield pair.in_both(
            "two samples swapped whole",
            (second, first),
            (
                replace(pair.second_evidence, expected=pair.first_evidence.expected),
                replace(pair.first_evidence, expected=pair.second_evidence.expected),
            ),
        )
    n = min(pair.n_tok, len(second["input_ids"]))
    ids = {"input_ids": second["input_ids"][:n], "loss_mask": first["loss_mask"][:n]}
    mixed = pair.in_first(
        "right tensor, another sample's token ids",
        f"{n} ids",
        _with(first, lambda b, x: x[:n]) | ids,
    )
    yield replace(mixed, evidence={pair.ids[0]: cut(pair.second_evidence, n)})


def _shared_fp8_scale(pair: _Pair) -> Iterator[Altered]:
    """Yield speculators' fp8 layout, in which all boundaries of a token share one scale."""
    states = [pair.first["states"][b] for b in pair.boundaries]
    shared = dict(zip(pair.boundaries, _shared_scale(states)))
    yield pair.in_first(
        "fp8 scale shared over boundaries",
        f"{len(pair.boundaries)} boundaries",
        {**pair.first, "states": shared},
        FP8,
    )


def _wrong_text(pair: _Pair, tokenizer) -> Iterator[Altered]:
    """Yield faults in the token ids and the loss mask."""
    for name, shift in (("late", 1), ("early", -1)):
        yield pair.in_first(
            f"loss mask off by one, {name}",
            "1 token at each end of a turn",
            {**pair.first, "loss_mask": pair.first["loss_mask"].roll(shift)},
        )
    if generation_prompt(tokenizer):
        yield pair.in_first(
            "template mismatch",
            "another header before each answer",
            template_mismatch(pair.first, tokenizer),
        )


def _single_rows(pair: _Pair) -> Iterator[Altered]:
    """Yield faults in one row of one sample."""
    size = f"1 of {pair.n_tok} rows"
    middle = pair.n_tok // 2
    other_row = pair.second_row[middle : middle + 1]

    def with_row(make_row):
        """Return the change that puts make_row(b, row [1, H]) into the middle row."""

        def change(b: int, x: torch.Tensor) -> torch.Tensor:
            row = make_row(b, x[middle : middle + 1])
            return torch.cat([x[:middle], row, x[middle + 1 :]])

        return change

    other = pair.second["states"]
    yield pair.in_states(
        "one row of another sample", size, with_row(lambda b, row: other[b][other_row])
    )
    yield pair.in_states("one row not finite", size, with_row(lambda b, row: row * torch.nan))
    yield pair.in_states("one row of zeros", size, with_row(lambda b, row: torch.zeros_like(row)))


def wrong_heads(
    head: Head,
    embedding: torch.Tensor,  # [V, H] of the target
) -> Iterator[tuple[str, str, Head]]:
    """Yield (fault, its size, the copied norm and head with that fault).

    The embedding as head is left out where the target ties the two.
    """
    rows = head.lm_head
    V = len(rows)
    half = V // 2
    n_weights = f"{len(head.norm_weight)} weights"
    order = torch.randperm(V, generator=torch.Generator().manual_seed(0))
    yield "head permuted", f"{V:,} rows", replace(head, lm_head=rows[order])
    if not torch.equal(embedding.float(), rows):
        yield "embedding as head", f"{V:,} rows", replace(head, lm_head=embedding.float())
    yield "head scaled by 1.01", f"{V:,} rows", replace(head, lm_head=rows * 1.01)
    shifted = torch.cat([rows[:half].roll(1, 0), rows[half:]])
    yield (
        "half the head's rows shifted by one",
        f"{half:,} rows",
        replace(head, lm_head=shifted),
    )
    exchanged = rows.clone()
    exchanged[[half, half + 1]] = rows[[half + 1, half]]
    yield "two rows of the head exchanged", f"2 of {V:,} rows", replace(head, lm_head=exchanged)
    ones = torch.ones_like(head.norm_weight)
    yield "final norm's weight left at 1", n_weights, replace(head, norm_weight=ones)
    yield (
        "final norm's weight of another model",
        n_weights,
        replace(head, norm_weight=head.norm_weight.roll(1)),
    )
    yield (
        "final norm with another epsilon",
        f"{head.eps * 10:g} for {head.eps:g}",
        replace(head, eps=head.eps * 10),
    )


def template_mismatch(sample: dict, tokenizer) -> dict:
    """Return the ids and mask of another template, which writes another header before an answer.

    The result has no states: other ids would have other states.
    """
    ids = sample["input_ids"].tolist()
    mask = sample["loss_mask"].tolist()
    opening = generation_prompt(tokenizer)
    new_ids = []
    new_mask = []
    start = 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and mask[end] == mask[start]:
            continue
        piece = ids[start:end]
        if not mask[start]:
            text = tokenizer.decode(piece, skip_special_tokens=False)
            text = text.replace(opening, "\n### Response:\n")
            piece = tokenizer.encode(text, add_special_tokens=False)
        new_ids += piece
        new_mask += [mask[start]] * len(piece)
        start = end
    return {"input_ids": torch.tensor(new_ids), "loss_mask": torch.tensor(new_mask), "states": {}}


def cut(evidence: Evidence, n: int) -> Evidence:
    """Return the evidence of the first n tokens: a causal model never looks at later ones."""
    served = evidence.served
    reference = evidence.reference
    return Evidence(
        Served(served.next_logp[: n - 1], served.top_ids[: n - 1], served.top_logp[: n - 1]),
        Reference(
            reference.exact[:, :n],
            reference.rounded[:, :n],
            reference.exact_logp[:, : n - 1],
            reference.rounded_logp[:, : n - 1],
            reference.head,
        ),
        evidence.expected,
    )


def detection_table(altered: list[Altered], tokenizer) -> list[dict]:
    """Return one row a fault: its size, the tests that caught it, and its excess over the limit."""
    table = []
    for case in altered:
        if all(sample["states"] for sample in case.samples.values()):
            verdicts = examine(case.samples, case.evidence, case.head, case.dtype, tokenizer)
        else:  # other token ids, for which there are no states
            verdicts = [text_test(case.samples, case.evidence, tokenizer, {})]
        caught = [v.name for v in verdicts if v.ok is False]
        table.append(
            {
                "fault": case.fault,
                "size": case.size,
                "caught by": ", ".join(caught) or "nothing",
                "of the limit": max(v.excess for v in verdicts),
            }
        )
    return table


def _with(sample: dict, change) -> dict:
    """Return the sample with change(b, rows [T, H]) in place of its rows."""
    return {**sample, "states": {b: change(b, rows) for b, rows in sample["states"].items()}}


def _shared_scale(states: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return states [T, H] after fp8 with one scale a token for all boundaries (speculators)."""
    wide = torch.cat(states, dim=1)  # [T, B*H]
    return list(from_fp8(*to_fp8(wide)).chunk(len(states), dim=1))
