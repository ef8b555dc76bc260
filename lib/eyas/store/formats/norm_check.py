"""Is a foreign last state taken before or after the final norm?"""

import math
from dataclasses import dataclass

import torch

from eyas.errors import EyasError
from eyas.models.target import Head
from eyas.store.formats.common import POST, PRE, Sample

CHECK_TOK = 64  # and predictions of each
TOLERANCE = 2.0**-6  # of an RMS: two roundings to bfloat16, and the eps of the norm


@dataclass(frozen=True)
class NormCheck:
    """What two witnesses say about last states. `norm` is pre-norm, post-norm, or empty where they contradict each other or say nothing."""

    norm: str
    unit_share: float  # of the tokens: RMS of state / norm weight is 1 within rounding, which the norm gives every token and nothing else does
    nll: dict[
        str, float
    ]  # reading -> mean negative log-likelihood of the samples' own next tokens, nats
    blind_nll: float  # of a head that knows nothing: log V

    def __str__(self) -> str:
        return (
            f"{self.unit_share:.0%} of the tokens have the RMS that the target's final norm gives; next tokens cost {self.nll[PRE]:.2f} nats "
            f"read as {PRE}, {self.nll[POST]:.2f} as {POST} ({self.blind_nll:.2f}: a blind guess)"
        )


def check_norm(head: Head, samples: list[Sample]) -> NormCheck:
    """The final norm divides by the RMS and multiplies by its weight: RMS(state / weight) is 1 for every token after it (to rounding), and not before.

    The second witness is the head itself, which counts where one reading of the states predicts the text at all.
    """
    near = tokens = followed = 0
    nll = {PRE: 0.0, POST: 0.0}
    for sample in samples:
        last = sample.states[-1].float()  # [T, H]
        rms = (last / head.norm_weight).square().mean(-1).sqrt()  # [T]
        near += int(((rms - 1).abs() < TOLERANCE).sum())
        tokens += len(last)
        at = torch.nonzero(sample.loss_mask[1:] != 0).squeeze(1)[
            :CHECK_TOK
        ]  # [n]: token at+1 is the target's own
        next_ids = sample.input_ids[at + 1].long()
        for reading, states in ((PRE, head.normed(last[at])), (POST, last[at])):
            nll[reading] += float(
                torch.nn.functional.cross_entropy(
                    states @ head.lm_head.T, next_ids, reduction="sum"
                )
            )
        followed += len(at)
    share, nll = (
        near / max(tokens, 1),
        {reading: value / max(followed, 1) for reading, value in nll.items()},
    )
    said = set()
    if bool((head.norm_weight != 0).all()) and not 0.5 < share < 0.95:
        said.add(POST if share >= 0.95 else PRE)
    better, blind = min(nll, key=nll.get), math.log(len(head.lm_head))
    if followed and nll[better] < blind - 1 and abs(nll[PRE] - nll[POST]) > 0.1:
        said.add(better)
    return NormCheck(said.pop() if len(said) == 1 else "", share, nll, blind)


def decide_norm(name: str, definition: str, told: str | None, check: NormCheck) -> str:
    if told:
        return f"{told}-norm"
    if check.norm != definition:
        found = f"look {check.norm}" if check.norm else "do not show which they are"
        raise EyasError(
            f"last states of {name} are {definition}, these {found}: {check}",
            "files and target that belong together",
            f"is it the right -p target? If it is, say what the states are: --norm {'post' if check.norm == POST else 'pre'}, or --norm {'pre' if check.norm == POST else 'post'}",
        )
    return definition
