"""Find out whether foreign last states were taken before or after the final norm."""

import math
from dataclasses import dataclass

import torch

from eyas.errors import EyasError
from eyas.models.target import Head
from eyas.store.formats.common import POST, PRE, Sample

CHECK_TOK = 64  # predictions of each sample that are checked
TOLERANCE = 2.0**-6  # of an RMS: two roundings to bfloat16, and the eps of the norm


@dataclass(frozen=True)
class NormCheck:
    """Hold what two independent checks find about last states.

    norm: pre-norm, post-norm, or empty if the checks contradict each other or find nothing.
    unit_share: fraction of the tokens whose RMS(state / norm weight) is 1 within rounding. The norm
        gives that to every token, and nothing else does.
    nll: {norm: mean negative log-likelihood in nats of the samples' next tokens, if the states are
        read that way}.
    blind_nll: that of a head that knows nothing, log V.
    """

    norm: str
    unit_share: float
    nll: dict[str, float]
    blind_nll: float

    def __str__(self) -> str:
        return (
            f"{self.unit_share:.0%} of the tokens have the RMS that the target's final norm gives;"
            f" next tokens cost {self.nll[PRE]:.2f} nats read as {PRE},"
            f" {self.nll[POST]:.2f} as {POST} ({self.blind_nll:.2f}: a blind guess)"
        )


def check_norm(head: Head, samples: list[Sample]) -> NormCheck:
    """Check last states in two ways.

    The final norm divides by the RMS and multiplies by its weight. So RMS(state / weight) is 1 (to
    rounding) for every token after the norm, and not before it.
    The second way is the head itself. It counts if one reading of the states predicts the text.
    """
    near = 0
    tokens = 0
    predictions = 0
    nll_sum = {PRE: 0.0, POST: 0.0}
    for sample in samples:
        last = sample.states[-1].float()  # [T, H]
        rms = (last / head.norm_weight).square().mean(-1).sqrt()  # [T]
        near += int(((rms - 1).abs() < TOLERANCE).sum())
        tokens += len(last)
        # positions [n] whose next token is the target's own
        supervised = torch.nonzero(sample.loss_mask[1:] != 0).squeeze(1)[:CHECK_TOK]
        next_ids = sample.input_ids[supervised + 1].long()  # [n]
        rows = last[supervised]  # [n, H]
        for reading, states in ((PRE, head.normed(rows)), (POST, rows)):
            logits = states @ head.lm_head.T  # [n, V]
            loss = torch.nn.functional.cross_entropy(logits, next_ids, reduction="sum")
            nll_sum[reading] += float(loss)
        predictions += len(supervised)
    share = near / max(tokens, 1)
    nll = {reading: value / max(predictions, 1) for reading, value in nll_sum.items()}
    blind = math.log(len(head.lm_head))
    results = set()
    if bool((head.norm_weight != 0).all()) and not 0.5 < share < 0.95:
        results.add(POST if share >= 0.95 else PRE)
    better = min(nll, key=nll.get)
    if predictions and nll[better] < blind - 1 and abs(nll[PRE] - nll[POST]) > 0.1:
        results.add(better)
    norm = results.pop() if len(results) == 1 else ""
    return NormCheck(norm, share, nll, blind)


def decide_norm(name: str, definition: str, told: str | None, check: NormCheck) -> str:
    """Return the norm convention of an import's last states: "pre-norm" or "post-norm".

    definition: that of the format `name`. told: "pre" or "post" if the user gave it.
    Raise EyasError if the check does not confirm the definition.
    """
    if told:
        return f"{told}-norm"
    if check.norm != definition:
        look = f"look {check.norm}" if check.norm else "do not show which they are"
        likely = "post" if check.norm == POST else "pre"
        other = "pre" if check.norm == POST else "post"
        raise EyasError(
            f"last states of {name} are {definition}, these {look}: {check}",
            "files and target that belong together",
            "is it the right -p target? If it is, say what the states are:"
            f" --norm {likely}, or --norm {other}",
        )
    return definition
