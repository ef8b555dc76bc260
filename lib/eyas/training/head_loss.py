"""The teacher's distribution, and the loss with its gradient, a few rows at a time."""

import dataclasses

import torch
import torch.nn.functional as F

from eyas.models.target import Head
from eyas.models.vocab import DraftVocab
from eyas.training.losses import TINY, Loss
from eyas.training.operators import filled

LOGIT_ROWS = 1024  # rows of one head product
PIECE_ROWS = 64  # rows whose logits stay in the CPU's cache


class Teacher:
    """The target's distribution over the draft vocabulary, from its last state.

    It uses the copied final norm, and rows of the copied head.
    """

    def __init__(
        self, head: Head, vocab: DraftVocab, dtype: torch.dtype, whole_vocab: bool = False
    ):
        self.rows = head.lm_head[vocab.ids].to(dtype)  # [D, H]
        self.others = None
        if whole_vocab:  # for the normaliser
            self.others = head.lm_head[~vocab.t2d].to(dtype)  # [V - D, H]
        # without the rest of the head, which is large
        self.normed = dataclasses.replace(head, lm_head=head.lm_head[:0]).normed

    @torch.no_grad()
    def __call__(self, last: torch.Tensor) -> torch.Tensor:
        """Return probabilities [A', D] of the draft vocabulary, from last states [A', H] as stored.

        They sum to 1, or, over the whole vocabulary, to at most 1. They are in float32 (float64 for
        float64 weights), whatever the dtype of the products.
        """
        normed = self.normed(last).to(self.rows.dtype)
        logits = (filled(normed) @ self.rows.T)[: len(last)]
        probabilities = torch.empty_like(
            logits, dtype=torch.promote_types(logits.dtype, torch.float32)
        )
        for start in range(0, len(logits), PIECE_ROWS):
            piece, out = slice(start, start + PIECE_ROWS), probabilities[start : start + PIECE_ROWS]
            out.copy_(logits[piece])
            if self.others is None:
                # a row's maximum and sum are known before any of it is written
                torch.softmax(out, -1, out=out)
            else:
                others = (filled(normed[piece]) @ self.others.T)[: len(out)]
                rest = others.to(out.dtype).logsumexp(-1)
                out.sub_(torch.logaddexp(out.logsumexp(-1), rest)[:, None]).exp_()
            F.threshold_(out, TINY, 0.0)
        return probabilities


@torch.no_grad()
def head_loss(
    x: torch.Tensor,  # [M, H]
    weight: torch.Tensor,  # [D, H]
    teacher: torch.Tensor,  # [A', D], probabilities
    rows: torch.Tensor,  # int64 [M], the row of `teacher` that each row of x takes
    labels: torch.Tensor,  # int64 [M], draft ids
    scale: torch.Tensor,  # [M], the weight of each row
    loss: Loss,
    low: torch.dtype,  # of the products
    learns: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Compute the loss between teacher and softmax(x W^T), and its gradient together with it.

    Return the loss of each row [M]; whether each row's largest logit is its label's [M] (a tie
    counts); and, where it `learns`, the gradients of the weighted sum by x and weight, else None.
    """
    losses = torch.empty(len(x), dtype=weight.dtype, device=x.device)
    hits = torch.empty(len(x), dtype=torch.bool, device=x.device)
    weight_low, x_low = weight.to(low), filled(x.to(low))
    grad_x = torch.empty_like(x) if learns else None
    grad_weight = None
    for start in range(0, len(x), LOGIT_ROWS):
        chunk = slice(start, start + LOGIT_ROWS)
        n = min(LOGIT_ROWS, len(x) - start)
        logits = x_low[chunk] @ weight_low.T  # [rows, D]
        logits[n:] = 0  # rows that only fill up
        for at in range(0, n, PIECE_ROWS):
            end = min(at + PIECE_ROWS, n)
            piece = slice(start + at, start + end)
            z, p = logits[at:end].to(weight.dtype), teacher[rows[piece]]
            hits[piece] = z.gather(1, labels[piece, None]).squeeze(1) >= z.amax(-1)
            losses[piece], gradient = loss.rows(z, p)
            if learns:
                torch.mul(gradient, scale[piece, None], out=gradient)
                logits[at:end] = gradient  # the gradient takes the logits' place
        if learns:
            grad_x[chunk] = (logits @ weight_low)[:n]
            part = logits.T @ x_low[chunk]
            grad_weight = part.to(weight.dtype) if grad_weight is None else grad_weight.add_(part)
    if learns and grad_weight is None:
        grad_weight = torch.zeros_like(weight)
    return losses, hits, grad_x, grad_weight
