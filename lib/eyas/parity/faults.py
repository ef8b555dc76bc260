"""Faults that stores have had, put into good data in memory, to see which test of eyas.parity.certify catches each: the detection table.

Nothing is written and nothing is fetched: what a fault needs comes from the samples, as `Store.read` gives them, and from their evidence.
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
    """The altered samples with their evidence, as a store of `dtype` would hold them; `size` says what was altered, in words.

    `head`: the copied norm and head of the altered store.
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
    """What must pass: the data as they are, and as an fp8 store holds them."""
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
    embedding: torch.Tensor,
) -> Iterator[Altered]:
    """Yield each fault in the first of the samples (or in the first two); a fault is as small as it can be. embedding [V, H] of the target."""
    a, b = list(samples)[:2]
    one, other = samples[a], samples[b]
    boundaries = sorted(one["states"])
    last, T = boundaries[-1], len(one["input_ids"])

    def in_one(fault: str, size: str, sample: dict, dtype: str = dtype) -> Altered:
        return Altered(fault, size, {a: sample}, {a: evidence[a]}, dtype, head)

    for where, stored in (
        ("start", boundaries[0]),
        ("middle", boundaries[(len(boundaries) - 1) // 2]),
        ("end", last),
    ):
        holds = stored + 1 if stored < last else stored - 1
        rows = as_stored(evidence[a].reference.rounded[holds], dtype)
        apart = distance(rows, one["states"][stored]).median()
        yield in_one(
            f"boundary shifted by one, {where}",
            f"boundary {stored} holds {holds}, {apart:.0%} away",
            _with(one, lambda b, x: rows if b == stored else x),
        )
    normed = as_stored(head.normed(one["states"][last]), dtype)
    if not torch.equal(normed, one["states"][last]):
        yield in_one(
            "last state after the norm",
            f"{distance(normed, one['states'][last]).median():.0%} away",
            _with(one, lambda b, x: normed if b == last else x),
        )
    yield in_one(
        "rows shifted by one token",
        f"{T - 1} of {T} rows",
        _with(one, lambda b, x: torch.cat([x[:1], x[:-1]])),
    )
    middle = T // 2
    yield in_one(
        "one row repeated, the next dropped",
        f"1 of {T} rows",
        _with(
            one, lambda b, x: torch.cat([x[: middle + 1], x[middle : middle + 1], x[middle + 2 :]])
        ),
    )
    yield in_one(
        "half the rows from a prefix-cache hit",
        f"{middle} of {T} rows were never written",
        _with(one, lambda b, x: torch.cat([torch.zeros_like(x[:middle]), x[middle:]])),
    )
    stale = torch.arange(T) % len(other["input_ids"])
    yield in_one(
        "the same, another request's rows in their place",
        f"{middle} of {T} rows",
        _with(one, lambda b, x: torch.cat([other["states"][b][stale[:middle]], x[middle:]])),
    )
    swapped = {
        a: _with(one, lambda b, x: other["states"][b][stale]),
        b: _with(other, lambda b, x: one["states"][b][torch.arange(len(x)) % T]),
    }
    yield Altered(
        "states of two samples swapped",
        "2 samples",
        swapped,
        {a: evidence[a], b: evidence[b]},
        dtype,
        head,
    )
    if evidence[a].expected is not None:
        yield Altered(
            "two samples swapped whole",
            "2 samples",
            {a: other, b: one},
            {
                a: replace(evidence[b], expected=evidence[a].expected),
                b: replace(evidence[a], expected=evidence[b].expected),
            },
            dtype,
            head,
        )
    n = min(T, len(other["input_ids"]))
    ids = {"input_ids": other["input_ids"][:n], "loss_mask": one["loss_mask"][:n]}
    yield Altered(
        "right tensor, another sample's token ids",
        f"{n} ids",
        {a: _with(one, lambda b, x: x[:n]) | ids},
        {a: cut(evidence[b], n)},
        dtype,
        head,
    )
    shared = {
        b: rows
        for b, rows in zip(boundaries, _shared_scale([one["states"][b] for b in boundaries]))
    }
    yield in_one(
        "fp8 scale shared over boundaries",
        f"{len(boundaries)} boundaries",
        {**one, "states": shared},
        FP8,
    )
    for name, shift in (("late", 1), ("early", -1)):
        yield in_one(
            f"loss mask off by one, {name}",
            "1 token at each end of a turn",
            {**one, "loss_mask": one["loss_mask"].roll(shift)},
        )
    if generation_prompt(tokenizer):
        yield in_one(
            "template mismatch",
            "another header before each answer",
            template_mismatch(one, tokenizer),
        )
    for fault, size, wrong in wrong_heads(head, embedding):
        yield Altered(fault, size, samples, evidence, dtype, wrong)
    # in few tokens only
    strange = other["states"]
    yield in_one(
        "one row of another sample",
        f"1 of {T} rows",
        _with(
            one,
            lambda b, x: torch.cat(
                [x[:middle], strange[b][stale[middle : middle + 1]], x[middle + 1 :]]
            ),
        ),
    )
    yield in_one(
        "one row not finite",
        f"1 of {T} rows",
        _with(
            one,
            lambda b, x: torch.cat(
                [x[:middle], x[middle : middle + 1] * torch.nan, x[middle + 1 :]]
            ),
        ),
    )
    yield in_one(
        "one row of zeros",
        f"1 of {T} rows",
        _with(one, lambda b, x: torch.cat([x[:middle], torch.zeros_like(x[:1]), x[middle + 1 :]])),
    )


def wrong_heads(head: Head, embedding: torch.Tensor) -> Iterator[tuple[str, str, Head]]:
    """(fault, its size, the copied norm and head with it). embedding [V, H] of the target; skipped where the head is tied to it."""
    rows, V = head.lm_head, len(head.lm_head)
    order = torch.randperm(V, generator=torch.Generator().manual_seed(0))
    half = V // 2
    exchanged = rows.clone()
    exchanged[[half, half + 1]] = rows[[half + 1, half]]
    yield "head permuted", f"{V:,} rows", replace(head, lm_head=rows[order])
    if not torch.equal(embedding.float(), rows):
        yield "embedding as head", f"{V:,} rows", replace(head, lm_head=embedding.float())
    yield "head scaled by 1.01", f"{V:,} rows", replace(head, lm_head=rows * 1.01)
    yield (
        "half the head's rows shifted by one",
        f"{half:,} rows",
        replace(head, lm_head=torch.cat([rows[:half].roll(1, 0), rows[half:]])),
    )
    yield "two rows of the head exchanged", f"2 of {V:,} rows", replace(head, lm_head=exchanged)
    yield (
        "final norm's weight left at 1",
        f"{len(head.norm_weight)} weights",
        replace(head, norm_weight=torch.ones_like(head.norm_weight)),
    )
    yield (
        "final norm's weight of another model",
        f"{len(head.norm_weight)} weights",
        replace(head, norm_weight=head.norm_weight.roll(1)),
    )
    yield (
        "final norm with another epsilon",
        f"{head.eps * 10:g} for {head.eps:g}",
        replace(head, eps=head.eps * 10),
    )


def template_mismatch(sample: dict, tokenizer) -> dict:
    """The sample's ids and mask as another template would have made them: another header before each answer. Without states: they would be others too."""
    ids, mask, opening = (
        sample["input_ids"].tolist(),
        sample["loss_mask"].tolist(),
        generation_prompt(tokenizer),
    )
    new_ids, new_mask, start = [], [], 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:
            piece = ids[start:end]
            if not mask[start]:
                piece = tokenizer.encode(
                    tokenizer.decode(piece, skip_special_tokens=False).replace(
                        opening, "\n### Response:\n"
                    ),
                    add_special_tokens=False,
                )
            new_ids, new_mask, start = new_ids + piece, new_mask + [mask[start]] * len(piece), end
    return {"input_ids": torch.tensor(new_ids), "loss_mask": torch.tensor(new_mask), "states": {}}


def cut(evidence: Evidence, n: int) -> Evidence:
    """Of the first n tokens: nothing in a causal model depends on later ones."""
    served, reference = evidence.served, evidence.reference
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
    """A row per fault: its size, the tests that caught it (none: it passed), and how far beyond the limit it was."""
    table = []
    for found in altered:
        if all(sample["states"] for sample in found.samples.values()):
            verdicts = examine(found.samples, found.evidence, found.head, found.dtype, tokenizer)
        else:  # other ids have other states, which are not at hand
            verdicts = [text_test(found.samples, found.evidence, tokenizer, {})]
        caught = [v.name for v in verdicts if v.ok is False]
        table.append(
            {
                "fault": found.fault,
                "size": found.size,
                "caught by": ", ".join(caught) or "nothing",
                "of the limit": max(v.excess for v in verdicts),
            }
        )
    return table


def _with(sample: dict, change) -> dict:
    return {**sample, "states": {b: change(b, rows) for b, rows in sample["states"].items()}}


def _shared_scale(states: list[torch.Tensor]) -> list[torch.Tensor]:
    """speculators' fp8 layout: one scale per token over all boundaries."""
    wide = torch.cat(states, dim=1)  # [T, B*H]
    return list(from_fp8(*to_fp8(wide)).chunk(len(states), dim=1))
