"""The learning rate of each step, the samples of each step, and the share of each process."""

import math
from collections.abc import Callable

import torch

from eyas.store.mixture import shuffled


def schedule(step: int, n_steps: int, warmup_steps: int) -> float:
    """Factor of the learning rate for optimiser step `step` (from 0): linear warm-up, then a cosine to nothing."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, n_steps - warmup_steps)))


def plan(
    lengths: dict[str, int], epochs: float, batch_tok: int, seed: int, order: Callable = shuffled
) -> list[tuple[int, list[str]]]:
    """(epoch, ids) of every optimiser step: each epoch in an order of its own, cut into packs of at most `batch_tok` tokens (or one longer sample).

    `order(ids, epoch, seed)` gives one pass over the ids. The last epoch is a part where `epochs` is not whole.
    """
    steps = []
    for epoch in range(math.ceil(epochs)):
        ids = order(lengths, epoch, seed)
        batch, size = [], 0
        for id in ids[: max(1, round(len(ids) * min(1.0, epochs - epoch)))]:
            if batch and size + lengths[id] > batch_tok:
                steps.append((epoch, batch))
                batch, size = [], 0
            batch.append(id)
            size += lengths[id]
        steps.append((epoch, batch))
    return steps


def deal(
    sizes: list[tuple[str, int, int]], n: int, slot_rows: int
) -> list[list[tuple[str, slice]]]:
    """n parts of about the same work: (id, which of its active slots) each. `sizes`: id, active slots and packed rows of each sample; an active slot is `slot_rows` packed rows' work.

    A sample may be cut: its rows are then in both parts, each learning from its own share of the active slots. Whole samples would leave
    a process waiting for the other for a fifth of the time, since a step has but a few.
    """
    parts, total, at = (
        [[] for _ in range(n)],
        sum(active * slot_rows + rows for _, active, rows in sizes),
        0.0,
    )
    for id, active, rows in sizes:
        each = slot_rows + rows / max(1, active)
        cuts = [min(active, max(0, round((total * part / n - at) / each))) for part in range(n)] + [
            active
        ]
        for part, share in zip(parts, map(slice, cuts, cuts[1:])):
            if share.start < share.stop:
                part.append((id, share))
        at += active * each
    return parts


def share(weights: list[torch.Tensor], n: int) -> list[list[torch.Tensor]]:
    """n groups of about the same size, for a process each; empty ones where there are more than weights."""
    groups, sizes = [[] for _ in range(n)], [0] * n
    for weight in sorted(weights, key=torch.numel, reverse=True):
        at = sizes.index(min(sizes))
        groups[at].append(weight)
        sizes[at] += weight.numel()
    return groups
