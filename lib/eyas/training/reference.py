"""The training loss through autograd over `Drafter`: slow, and right by definition.

- It is the reference of the fast pass: `tests/test_forward.py` compares both, values and gradients.
- It trains drafters that the fast pass does not know (`eyas.training.ttt.SLOW_PARTS`), so that a
  change of `eyas.models.drafter` can be tried before anyone writes its gradient by hand.

It calls `Drafter.fuse`, `first_step`, `next_step`, `feed_back` and `logits`, sample by sample, and
computes in the dtype of the weights, whatever `train_dtype` says.
"""

import torch

from eyas.models.drafter import Drafter
from eyas.training.batch import Batch
from eyas.training.head_loss import Teacher
from eyas.training.losses import Loss, Losses


def reference_losses(
    drafter: Drafter,
    batch: Batch,
    teacher: Teacher,
    loss: Loss,
    weights: list[float],
    counts: list[int] | None = None,
) -> Losses:
    """Return the loss over K = len(weights) steps of a pack, as `eyas.training.ttt.batch_loss`."""
    n_steps = len(weights)
    slots = [len(batch.supervised(s)[0]) for s in range(n_steps)]
    sums = [0.0] * n_steps
    hits = [0] * n_steps
    # a weight that no slot reads still has a gradient, of zeros
    total = sum(0.0 * p.sum() for p in drafter.parameters() if p.requires_grad)
    targets = teacher(batch.last)  # [A', D]
    for start, end in batch.spans:
        for s, numbers, out in _run_steps(drafter, batch, start, end, n_steps):
            rows = batch.teachers[numbers] + s
            labels = batch.labels[rows]
            supervised = labels >= 0
            rows, labels = rows[supervised], labels[supervised]
            logits = drafter.logits(out[supervised])  # [rows, D]
            losses = _RowLosses.apply(logits, targets[rows].to(logits.dtype), loss)
            total = total + weights[s] / max((counts or slots)[s], 1) * losses.sum()
            sums[s] += float(losses.detach().sum())
            label_logits = logits.gather(1, labels[:, None]).squeeze(1)
            hits[s] += int((label_logits >= logits.amax(-1)).sum())
    return Losses(total, sums, hits, slots)


def _run_steps(drafter: Drafter, batch: Batch, start: int, end: int, n_steps: int):
    """Yield (step, numbers of the active slots, their raw outputs) of one sample of a pack."""
    inside = (batch.active >= start) & (batch.active < end)
    numbers = inside.nonzero().squeeze(1)
    if not len(numbers):
        return
    tokens = batch.tokens[start:end]
    hidden = drafter.fuse(batch.states[start:end].to(drafter.fc.weight.dtype))
    out, steps = drafter.first_step(tokens, hidden, batch.active[numbers] - start)
    yield 0, numbers, out
    for s in range(1, n_steps):
        active = batch.run[numbers] > s
        numbers, out = numbers[active], out[active]
        steps.keep(active)
        if not len(numbers):
            return
        out = drafter.next_step(tokens[steps.slots + s], drafter.feed_back(out), steps)
        yield s, numbers, out


class _RowLosses(torch.autograd.Function):
    """A loss of `eyas.training.losses`, with the gradient that it makes itself."""

    @staticmethod
    def forward(ctx, logits, targets, loss: Loss):
        losses, gradient = loss.rows(logits.clone(), targets)  # it overwrites its logits
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx, grad):
        (gradient,) = ctx.saved_tensors
        return grad[:, None] * gradient, None, None
