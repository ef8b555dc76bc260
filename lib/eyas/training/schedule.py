"""The learning rate of each step, the samples of each step, and the work of each process."""

import math
from collections.abc import Callable

import torch

from eyas.store.mixture import shuffled


def schedule(step: int, n_steps: int, warmup_steps: int) -> float:
    """Return the factor of the learning rate for an optimizer step, counted from 0.

    It warms up linearly, then follows a cosine to zero.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, n_steps - warmup_steps)))


def plan(
    lengths: dict[str, int], epochs: float, batch_tok: int, seed: int, order: Callable = shuffled
) -> list[tuple[int, list[str]]]:
    """Return (epoch, ids) of every optimizer step.

    Each epoch has its own order and is cut into packs of at most `batch_tok` tokens, or one longer
    sample. `order(ids, epoch, seed)` gives one pass over the ids. Where `epochs` is not whole, the
    last epoch is a part of one.
    """
    steps = []
    for epoch in range(math.ceil(epochs)):
        ids = order(lengths, epoch, seed)
        n_samples = max(1, round(len(ids) * min(1.0, epochs - epoch)))
        batch, size = [], 0
        for id in ids[:n_samples]:
            if batch and size + lengths[id] > batch_tok:
                steps.append((epoch, batch))
                batch, size = [], 0
            batch.append(id)
            size += lengths[id]
        steps.append((epoch, batch))
    return steps


def split_work(
    sizes: list[tuple[str, int, int]],  # id, active slots and packed rows of each sample
    n: int,
    slot_rows: int,  # the work of an active slot, in packed rows
) -> list[list[tuple[str, slice]]]:
    """Return n parts of about the same work: (id, which of its active slots) each.

    A sample may be cut. Its rows are then in both parts, and each part learns from its own active
    slots. With whole samples a process would wait for the other for a fifth of the time, since a
    step has only a few.
    """
    parts: list[list[tuple[str, slice]]] = [[] for _ in range(n)]
    total = sum(active * slot_rows + rows for _, active, rows in sizes)
    done = 0.0  # work of the samples before this one
    for id, active, rows in sizes:
        slot_work = slot_rows + rows / max(1, active)
        starts = [round((total * part / n - done) / slot_work) for part in range(n)]
        cuts = [min(active, max(0, start)) for start in starts] + [active]
        for part, start, stop in zip(parts, cuts, cuts[1:]):
            if start < stop:
                part.append((id, slice(start, stop)))
        done += active * slot_work
    return parts


def partition_weights(weights: list[torch.Tensor], n: int) -> list[list[torch.Tensor]]:
    """Return n groups of about the same size, some empty where n is more than the weights."""
    groups: list[list[torch.Tensor]] = [[] for _ in range(n)]
    sizes = [0] * n
    for weight in sorted(weights, key=torch.numel, reverse=True):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(weight)
        sizes[smallest] += weight.numel()
    return groups
