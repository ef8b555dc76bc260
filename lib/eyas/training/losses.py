"""The losses that a drafter can be trained with.

Each is a pure function of logits and probabilities, and makes its gradient by formula:
`get_loss("kl").rows(z, p)` returns (loss [n], gradient [n, D] by z).

- z [n, D]: the drafter's logits over the draft vocabulary; q is their softmax. The gradient is
  written over z.
- p [n, D]: the target's probabilities of the same D tokens, in z's dtype (float32 or float64), each
  0 or at least TINY. They are normalised over the D tokens, or, where `whole_vocab` says so, over
  all of the target's vocabulary; then a row sums to at most 1. p is only read.

The acceptance alpha = sum of min(p, q) is the probability that a draft token sampled from q is
accepted (Leviathan et al. 2023, arXiv 2211.17192, corollary 3.6). The drafter can say only D
tokens, so q is 0 elsewhere, and the sum over them is the whole sum, for p over the whole
vocabulary.

A CPU is slow with denormal numbers, by a factor of a hundred in exp. So no q is below LEAST, and
what is below TINY is 0 in a gradient, since Adam would square it.

Axes: n rows, D draft vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from eyas.errors import EyasError

TINY = 1.0e-12  # probabilities and gradients below it count as 0
# No q, and no alpha that is divided by, counts as less. It is normal in float32, as its inverse is,
# and below all that a float64 check can see.
LEAST = 1.0e-30
# of lk_lambda: the paper's best and the default of speculators 0.9.0. SpecForge 0.2.0 calls it
# kl_decay and has 1.0.
ETA = 3.0


@dataclass(frozen=True)
class Losses:
    """The loss of a pack.

    total: the scalar to minimise. The others are sums over each draft step [K]: of the loss, of
    hits (the largest logit is the label's) and of supervised slots.
    """

    total: torch.Tensor
    loss: list[float]
    hits: list[int]
    slots: list[int]


@dataclass(frozen=True)
class Loss:
    """A loss that a drafter can be trained with."""

    name: str
    whole_vocab: bool  # what p is normalised over: the whole vocabulary, or the D tokens
    rows: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _kl(z, p):
    """Soft cross-entropy -sum p log q: KL(p || q) plus the entropy of p.

    No drafter can change the entropy, so the gradient q - p is that of both.
    """
    log_q = _log_softmax(z)
    loss = -torch.linalg.vecdot(p, log_q)
    q = _cut(log_q.clamp_(min=math.log(TINY) - 1).exp_())
    return loss, q.sub_(p)


def _tv(z, p):
    """1 - alpha, the probability that a sampled draft token is rejected.

    It is the total variation distance of p and q where D is the whole vocabulary.
    """
    q, alpha, below, below_q = _overlap(_log_softmax(z), p)
    return 1 - alpha.squeeze(1), _shrink(q.mul_(below.sub_(_cut(below_q))).mul_(-0.5))


def _lk_alpha(z, p):
    """-log alpha (Samarin et al. 2026, LK losses, arXiv 2602.23881).

    Its gradient is that of tv divided by alpha, so it does not vanish where nothing is accepted
    yet. For a one-hot p it is cross-entropy. An alpha below LEAST counts as LEAST; no entry of the
    gradient is above 1, however small alpha is.
    """
    q, alpha, below, below_q = _overlap(_log_softmax(z), p)
    alpha.clamp_(min=LEAST)
    # divided by alpha before q multiplies it: both can be near LEAST, and then their product is
    share = _cut(below_q * 0.5 / alpha)
    return -alpha.log().squeeze(1), _shrink(q.mul_(below.mul_(-0.5 / alpha).add_(share)))


def _lk_lambda(z, p):
    """lam KL(p_D || q) + (1 - lam) (1 - alpha), the hybrid of the LK losses (arXiv 2602.23881).

    p_D is p normalised over the D tokens. lam = exp(-ETA alpha) is constant to the gradient. It is
    computed for each row, as in speculators (`lk_hybrid_loss`). SpecForge (`compute_lk_loss`) takes
    the mean alpha of a batch, which a row cannot know, and cross-entropy instead of KL, which has
    the same gradient. A row without p has the loss 1 and the gradient 0.
    """
    log_q = _log_softmax(z)
    mass = p.sum(-1, keepdim=True)
    cross = torch.linalg.vecdot(p, log_q)
    log_p = p.clamp(min=LEAST).log_()  # times faster than torch.special.entr
    entropy = -torch.linalg.vecdot(p, log_p)
    q, alpha, below, below_q = _overlap(log_q, p, out=log_p)
    lam = torch.exp(alpha * -ETA) * (mass > 0)
    mass.clamp_(min=LEAST)
    kl = -(entropy + cross)[:, None] / mass - mass.log()
    loss = lam * kl + (1 - lam) * (1 - alpha)
    half = (1 - lam) / 2
    q.mul_(below.mul_(-half).add_(half * below_q + lam)).addcmul_(p, lam / mass, value=-1)
    return loss.squeeze(1), _shrink(q)


def _log_softmax(z):
    """Return log_softmax of z, written over z; a quarter of the time of `_kl`.

    The kernels take a row's maximum and sum before they write any of it, and read each number just
    before they write it. That is not documented, so tests/test_losses.py compares at a real size.
    """
    return torch.log_softmax(z, -1, out=z)


def _overlap(log_q, p, out=None):
    """Return q, alpha [n, 1], 2w [n, D] and 2 sum(w q) [n, 1], w being the slope of min(p, q) by q.

    q [n, D] is written over log_q, 2w into `out`. w is 1 where q < p, 0 where q > p, and a half
    where they are equal, as autograd has it for torch.minimum. The gradient of alpha by z is
    q (w - sum(w q)).
    """
    q = log_q.clamp_(min=math.log(LEAST)).exp_()
    smaller = torch.minimum(p, q, out=out)
    alpha = smaller.sum(-1, keepdim=True)  # 1 - |p - q| / 2 would lose a small alpha in rounding
    # where() and heaviside() are not vectorised: 10 times slower
    below = torch.sub(p, q, out=smaller).sign_().add_(1)
    return q, alpha, below, torch.linalg.vecdot(below, q)[:, None]


def _cut(t):
    """Set what is below TINY to 0, in place: probabilities, and factors of probabilities."""
    return torch.nn.functional.threshold_(t, TINY, 0.0)


def _shrink(gradient):
    """Do the same for numbers of both signs."""
    return torch.hardshrink(gradient, TINY, out=gradient)


LOSSES = {
    loss.name: loss
    for loss in (
        Loss("kl", False, _kl),
        Loss("tv", True, _tv),
        Loss("lk_alpha", True, _lk_alpha),
        Loss("lk_lambda", True, _lk_lambda),
    )
}


def get_loss(name: str) -> Loss:
    """Return the loss of that name. Raise EyasError, with the names that exist, for another."""
    if name not in LOSSES:
        raise EyasError(
            f"no loss {name!r}", "one of " + ", ".join(LOSSES), "python -m eyas settings"
        )
    return LOSSES[name]
