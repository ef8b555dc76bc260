"""Training-time test on packed samples: what the drafter computes in training, and the loss and its gradient.

Slot j takes hidden state j and token j+1 and predicts token j+2. Step s (0 .. K-1) at slot j is what serving does s drafts later: token
j+1+s, the output of step s-1 at slot j as hidden state, RoPE position j+s; it attends to the keys of step 0 of the slots up to j and to the
keys of steps 1..s of its own slot (EAGLE-3, arXiv 2503.01840, section 3). Step s of slot j is *active* iff loss_mask[j+1 .. j+1+s] are all
true, so the first drafted token of every turn is trained and no prompt is (the right shift; loss_mask[j], `mask_shift` 0, is off by one).

The teacher of step s at slot j is the target's distribution at position j+1+s: softmax of the stored last state through the copied final norm and
head. An active slot is *supervised* when the token that follows there, the target's own choice, is in the draft vocabulary. A step's loss is the
sum over its supervised slots divided by their number; the steps are weighted by step_decay**s, divided by the sum of these weights.

What makes it quick, all of it exact:
- samples are packed without padding; prompt slots are keys and values of step 0 and nothing else, the drafter having one layer;
- the whole gradient is written out (`Steps`, `TrainingTimeTest`): a weight's gradient is one product over the rows of all steps, nothing is kept that can
  be made again for less, and there is no graph of thousands of small nodes;
- the embedding's half of q, k and v is computed once for all steps, and once for each token that the pack has: half of them stand there again;
- attention never leaves its sample, and its scores are never stored: the keys of step 0 go through the fused kernel, a few samples of about the same
  length at a time, and its log-sum-exp joins them with the slot's own keys (`Attention`);
- all steps share one head product and one teacher: the teacher of step s at a slot is the teacher of step 0 at the slot s further on;
- the loss makes its gradient in place of the logits, a few rows at a time (`head_loss`), so they pass through the cache and not the memory;
- a CPU's bfloat16 products compile a kernel for every shape that they meet, which takes longer than the product: rows are filled up to round numbers.

Matrix products run in `low` (bfloat16, or the weights' own dtype), everything else in the weights' dtype, `wide`. Axes: T tokens of a sample,
S packed slots, A active slots of step 0, A_s of step s, M supervised slots of all steps, B boundaries, H hidden size, D draft vocabulary.
"""

from dataclasses import dataclass

import torch

from eyas.models.drafter import Drafter
from eyas.training.batch import Batch
from eyas.training.head_loss import Teacher, head_loss
from eyas.training.losses import Loss
from eyas.training.steps import Steps


@dataclass(frozen=True)
class Losses:
    """total: the scalar to minimise; the others are sums by draft step [K], over `slots` supervised slots."""

    total: torch.Tensor
    loss: list[float]
    hits: list[int]
    slots: list[int]


def step_weights(n_steps: int, decay: float) -> list[float]:
    """decay**s, divided by their sum."""
    return [decay**s / sum(decay**i for i in range(n_steps)) for s in range(n_steps)]


def batch_loss(
    drafter: Drafter,
    batch: Batch,
    teacher: Teacher,
    loss: Loss,
    weights: list[float],
    counts: list[int] | None = None,
) -> Losses:
    """Loss over K = len(weights) steps of a pack; step s counts weights[s] / counts[s] for each of its supervised slots.

    `counts`: what each step's sum is divided by, where the pack is a part of what an optimiser step sees; its own supervised slots otherwise.
    """
    names, trained = zip(*((name, p) for name, p in drafter.named_parameters() if p.requires_grad))
    total, *sums = TrainingTimeTest.apply(
        drafter, batch, teacher, loss, weights, counts, names, torch.is_grad_enabled(), *trained
    )
    return Losses(total, *(part.tolist() for part in sums))


class TrainingTimeTest(torch.autograd.Function):
    """`batch_loss` as one function of the trained weights: its gradients are made with it, since nothing that comes later could change them but a factor."""

    @staticmethod
    def forward(ctx, drafter, batch, teacher, loss, weights, counts, names, learns, *trained):
        low, n_steps, active, device = (
            teacher.rows.dtype,
            len(weights),
            len(batch.active),
            batch.states.device,
        )
        steps = Steps(drafter, batch, n_steps, low)
        supervised, rows, slots = [], [], []
        for s in range(n_steps):
            kept, at = batch.supervised(s)
            supervised.append(kept + s * active)
            rows.append(at)
            slots.append(len(at))
        supervised, rows = torch.cat(supervised), torch.cat(rows)
        scale = torch.tensor(
            [w / max(n, 1) for w, n in zip(weights, counts or slots)],
            dtype=drafter.norm.weight.dtype,
            device=device,
        ).repeat_interleave(torch.tensor(slots, device=device))
        x = torch.stack(steps.normed).flatten(0, 1).index_select(0, supervised)  # [M, H]
        learns = learns and any(
            ctx.needs_input_grad
        )  # these are told whether the weights could have one, not whether one is wanted
        losses, hits, grad_x, grad_weight = head_loss(
            x,
            drafter.lm_head.weight,
            teacher(batch.last),
            rows,
            batch.labels[rows],
            scale,
            loss,
            low,
            learns,
        )
        if learns:
            by_normed = x.new_zeros(n_steps * active, x.shape[1]).index_copy_(0, supervised, grad_x)
            found = steps.gradients(by_normed.unflatten(0, (n_steps, active))) | {
                "lm_head.weight": grad_weight
            }
            ctx.found = [found[name] for name in names]
        sums = (
            torch.stack([part.sum() for part in losses.split(slots)]),
            torch.stack([part.sum() for part in hits.split(slots)]),
            torch.tensor(slots),
        )
        ctx.mark_non_differentiable(*sums)
        return (losses * scale).sum(), *sums

    @staticmethod
    def backward(ctx, grad, *_):
        found, ctx.found = ctx.found, None
        if float(grad) != 1.0:
            found = [each.mul_(grad) for each in found]
        return None, None, None, None, None, None, None, None, *found
