"""The losses that a drafter can be trained with, each a pure function that makes its gradient by formula. `get_loss("kl").rows(z, p)`

`rows(z, p)` -> (loss [n], gradient [n, D] by z). z [n, D] are the drafter's logits over the draft vocabulary, q their softmax; p [n, D] are the
target's probabilities of the same D tokens, in z's dtype (float32 or float64), each 0 or at least TINY: normalised over the D tokens, or, where
`whole_vocab` says so, over all of the target's vocabulary, so that a row sums to at most 1. p is only read; z's memory becomes the gradient's.

The acceptance alpha = sum of min(p, q) is the probability that a draft sampled from q is accepted (Leviathan et al. 2023, arXiv 2211.17192,
corollary 3.6). The drafter can say D tokens only, so q is 0 elsewhere and the sum over them is the whole sum, for p over the whole vocabulary.

A CPU is slow with denormal numbers, a hundred times in exp: so no q is below LEAST, and what is below TINY is 0 in a gradient, since Adam would square it.

Axes: n rows, D draft vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from eyas.errors import EyasError

TINY = 1.0e-12  # probabilities and gradients below it count as 0
LEAST = 1.0e-30  # no q, and no alpha that is divided by, counts as less: normal in float32, with its inverse, and below all that a float64 check can see
ETA = 3.0  # of lk_lambda: the paper's best and the default of speculators 0.9.0; SpecForge 0.2.0 calls it kl_decay and has 1.0


@dataclass(frozen=True)
class Loss:
    name: str
    whole_vocab: bool  # what p is normalised over: the whole vocabulary, or the D tokens
    rows: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _kl(z, p):
    """Soft cross-entropy -sum p log q: KL(p || q) and the entropy of p, which no drafter can change, so the gradient q - p is that of both."""
    log_q = _log_softmax(z)
    loss = -torch.linalg.vecdot(p, log_q)
    q = _cut(log_q.clamp_(min=math.log(TINY) - 1).exp_())
    return loss, q.sub_(p)


def _tv(z, p):
    """1 - alpha, the probability that a sampled draft is rejected; the total variation distance of p and q where D is the whole vocabulary."""
    q, alpha, below, below_q = _overlap(_log_softmax(z), p)
    return 1 - alpha.squeeze(1), _shrink(q.mul_(below.sub_(_cut(below_q))).mul_(-0.5))


def _lk_alpha(z, p):
    """-log alpha: the gradient of tv divided by alpha, so that it doesn't vanish where nothing is accepted yet; cross-entropy for a one-hot p.

    Samarin et al. 2026, LK losses, arXiv 2602.23881. An alpha below LEAST counts as LEAST; no entry of the gradient is above 1, however small alpha is.
    """
    q, alpha, below, below_q = _overlap(_log_softmax(z), p)
    alpha.clamp_(min=LEAST)
    share = _cut(
        below_q * 0.5 / alpha
    )  # divided by alpha before q multiplies them: both can be near LEAST, and so is their product then
    return -alpha.log().squeeze(1), _shrink(q.mul_(below.mul_(-0.5 / alpha).add_(share)))


def _lk_lambda(z, p):
    """lam KL(p_D || q) + (1 - lam) (1 - alpha), p_D being p normalised over the D tokens, lam = exp(-ETA alpha), a constant to the gradient.

    Samarin et al. 2026, LK losses, arXiv 2602.23881, the hybrid. lam is of each row, as in speculators (`lk_hybrid_loss`); SpecForge (`compute_lk_loss`)
    takes it of the mean alpha of a batch, which a row cannot know, and has cross-entropy for KL, of the same gradient. A row without p is 1, with gradient 0.
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
    """In place, a quarter of the time of `_kl`: the kernels take a row's maximum and sum before they write any of it, and read each number just before
    they write it. That is not documented, so tests/test_losses.py compares at a real size."""
    return torch.log_softmax(z, -1, out=z)


def _overlap(log_q, p, out=None):
    """q [n, D] in log_q's place, alpha [n, 1], and twice the slope w of min(p, q) by q: [n, D] (in `out`), and its sum weighted by q [n, 1].

    w is 1 where q < p, 0 where q > p, and a half where they are equal, as autograd has it for torch.minimum. alpha's gradient by z is q (w - sum w q).
    """
    q = log_q.clamp_(min=math.log(LEAST)).exp_()
    smaller = torch.minimum(p, q, out=out)
    alpha = smaller.sum(-1, keepdim=True)  # 1 - |p - q| / 2 would lose a small alpha in rounding
    below = (
        torch.sub(p, q, out=smaller).sign_().add_(1)
    )  # where() and heaviside() aren't vectorised: 10 times slower
    return q, alpha, below, torch.linalg.vecdot(below, q)[:, None]


def _cut(t):
    """What is below TINY, in place to 0: probabilities, and factors of probabilities, whose products would be denormal and are below TINY anyhow."""
    return torch.nn.functional.threshold_(t, TINY, 0.0)


def _shrink(gradient):
    """Likewise for numbers of both signs."""
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
    """The loss of that name; EyasError with the names there are for another."""
    if name not in LOSSES:
        raise EyasError(
            f"no loss {name!r}", "one of " + ", ".join(LOSSES), "python -m eyas settings"
        )
    return LOSSES[name]
