"""Training-time test on packed samples: the loss of K draft steps, and its gradient.

`eyas.models.drafter` defines the drafter. Slot j takes hidden state j and token j+1, and predicts
token j+2. Step s (0 .. K-1) at slot j is what serving does s drafts later (EAGLE-3, arXiv
2503.01840, section 3): it takes token j+1+s, and the output of step s-1 as hidden state, at RoPE
position j+s. It attends to the keys of step 0 of the slots up to j, and to the keys of steps 1 .. s
of its own slot.

- Step s of slot j is *active* if loss_mask[j+1 .. j+1+s] are all true. So the first draft token of
  every turn is trained, and no prompt is. With `mask_shift` 0 the mask is read one token too early,
  a common mistake that can be measured here.
- The teacher of step s at slot j is the target's distribution at position j+1+s: softmax of the
  stored last state through the copied final norm and head.
- An active slot is *supervised* if the token that follows there is in the draft vocabulary.
- A step's loss is the sum over its supervised slots divided by their number. The steps are weighted
  by step_decay**s, divided by the sum of these weights.

What makes the pass fast, all of it exact:

- Samples are packed without padding. Prompt slots are only keys and values of step 0.
- The gradient is written by hand (`Steps`, `TrainingTimeTest`). A weight's gradient is one product
  over the rows of all steps, and there is no graph of thousands of small nodes.
- The embedding's half of q, k and v is computed once for all steps and each distinct token.
- Attention never leaves its sample, and its scores are never stored: the keys of step 0 go through
  the fused kernel, whose log-sum-exp joins them with the slot's own keys (`PackedAttention`).
- All steps share one head product and one teacher. The teacher of step s at a slot is the teacher
  of step 0 at the slot s further on.
- The loss writes its gradient over the logits, a few rows at a time, in the CPU's cache
  (`head_loss`).
- A CPU compiles a bfloat16 kernel for every new shape. So rows are filled up to round numbers.

Matrix products run in `low` (bfloat16, or the weights' own dtype), everything else in the weights'
dtype. Drafters with a part in SLOW_PARTS take `eyas.training.reference` instead.

Axes: A active slots of step 0, M supervised slots of all steps, H hidden size, D draft vocabulary.
"""

import torch

from eyas.models.drafter import Drafter, DrafterConfig
from eyas.training.batch import Batch
from eyas.training.head_loss import Teacher, head_loss
from eyas.training.losses import Loss, Losses
from eyas.training.reference import reference_losses
from eyas.training.steps import Steps

# fields of the drafter's shape that `Steps` does not compute
SLOW_PARTS = ("norm_before_fc", "norm_before_residual")


def step_weights(n_steps: int, decay: float) -> list[float]:
    """Return decay**s of each step, divided by their sum."""
    total = sum(decay**i for i in range(n_steps))
    return [decay**s / total for s in range(n_steps)]


def has_fast_pass(config: DrafterConfig) -> bool:
    """Return whether the fast pass computes every part of a drafter of this shape."""
    return not any(getattr(config, part) for part in SLOW_PARTS)


def batch_loss(
    drafter: Drafter,
    batch: Batch,
    teacher: Teacher,
    loss: Loss,
    weights: list[float],
    counts: list[int] | None = None,
) -> Losses:
    """Return the loss over K = len(weights) steps of a pack.

    Step s counts weights[s] / counts[s] for each of its supervised slots. Give `counts` where the
    pack is a part of an optimizer step; the default is the number of the pack's own.
    """
    if not has_fast_pass(drafter.config):
        return reference_losses(drafter, batch, teacher, loss, weights, counts)
    trained = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    total, *sums = TrainingTimeTest.apply(
        drafter,
        batch,
        teacher,
        loss,
        weights,
        counts,
        tuple(trained),
        torch.is_grad_enabled(),
        *trained.values(),
    )
    return Losses(total, *(part.tolist() for part in sums))


class TrainingTimeTest(torch.autograd.Function):
    """`batch_loss` as one function of the trained weights.

    Their gradients are made together with the loss: what comes later can only multiply them.
    """

    @staticmethod
    def forward(ctx, drafter, batch, teacher, loss, weights, counts, names, learns, *trained):
        device, wide, low = batch.states.device, drafter.norm.weight.dtype, teacher.rows.dtype
        n_steps, n_active = len(weights), len(batch.active)
        steps = Steps(drafter, batch, n_steps, low)
        by_step = [batch.supervised(s) for s in range(n_steps)]
        slots = [len(rows) for _, rows in by_step]
        supervised = torch.cat([kept + s * n_active for s, (kept, _) in enumerate(by_step)])  # [M]
        rows = torch.cat([rows for _, rows in by_step])  # [M]
        factors = [w / max(n, 1) for w, n in zip(weights, counts or slots)]
        scale = torch.tensor(factors, dtype=wide, device=device)
        scale = scale.repeat_interleave(torch.tensor(slots, device=device))  # [M]
        x = torch.stack(steps.normed).flatten(0, 1).index_select(0, supervised)  # [M, H]
        # needs_input_grad says whether a weight can have a gradient, not whether one is wanted
        learns = learns and any(ctx.needs_input_grad)
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
            by_normed = x.new_zeros(n_steps * n_active, x.shape[1])
            by_normed.index_copy_(0, supervised, grad_x)
            found = steps.gradients(by_normed.unflatten(0, (n_steps, n_active)))
            found["lm_head.weight"] = grad_weight
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
