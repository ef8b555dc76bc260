"""Compute intervals for ratios of counts with the percentile bootstrap over prompts.

This is the one place where counts become ratios. The tokens of one prompt are not independent. So
whole prompts (or stored samples) are drawn again: the ratio is one of sums, and its numerators and
denominators are drawn together. The profile fixes the seed, so a report can be repeated.
"""

from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """Hold value = sum(numerator) / sum(denominator) and its percentile interval.

    They are None if there is nothing to divide, or nothing to draw from.
    """

    value: float | None
    low: float | None
    high: float | None

    def as_dict(self) -> dict:
        """Return the interval as JSON has it."""
        return {"value": self.value, "low": self.low, "high": self.high, "level": LEVEL}


def ratio_interval(numerator, denominator, seed: int) -> Interval:
    """Return a ratio of sums with its interval.

    Both arguments hold one number a prompt. With fewer than two prompts there is no interval. Draws
    whose denominator is 0 (no prompt reached this draft position) are left out.
    """
    top = np.asarray(numerator, dtype=np.float64)  # [prompts]
    bottom = np.asarray(denominator, dtype=np.float64)  # [prompts]
    if bottom.sum() == 0:
        return Interval(None, None, None)
    value = float(top.sum() / bottom.sum())
    if len(top) < 2:
        return Interval(value, None, None)
    weights = _draws(len(top), seed)  # [draws, prompts]
    tops = weights @ top  # [draws]
    bottoms = weights @ bottom  # [draws]
    return Interval(value, *_quantiles(tops[bottoms > 0] / bottoms[bottoms > 0]))


def difference_interval(first, second, seed: int) -> Interval:
    """Return the ratio of the first minus the ratio of the second, with its interval.

    Each argument is a pair (numerator, denominator) as `ratio_interval` takes them, of the same
    prompts in the same order. The prompts are drawn together for both, so what makes a prompt easy
    or hard for both cancels out.
    """
    top_a, bottom_a = [np.asarray(column, dtype=np.float64) for column in first]  # [prompts]
    top_b, bottom_b = [np.asarray(column, dtype=np.float64) for column in second]  # [prompts]
    if bottom_a.sum() == 0 or bottom_b.sum() == 0:
        return Interval(None, None, None)
    value = float(top_a.sum() / bottom_a.sum() - top_b.sum() / bottom_b.sum())
    if len(top_a) < 2:
        return Interval(value, None, None)
    weights = _draws(len(top_a), seed)  # [draws, prompts]
    both = (weights @ bottom_a > 0) & (weights @ bottom_b > 0)
    weights = weights[both]
    ratios_a = (weights @ top_a) / (weights @ bottom_a)  # [draws]
    ratios_b = (weights @ top_b) / (weights @ bottom_b)  # [draws]
    low, high = _quantiles(ratios_a - ratios_b)
    return Interval(value, low, high)


def _draws(n: int, seed: int) -> np.ndarray:
    """Return how often each of n prompts was drawn, [RESAMPLES, n]."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)


def _quantiles(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def interval_text(record: dict) -> str:
    """Return the result of `Interval.as_dict` as text, for example "1.724 [1.601, 1.853]"."""
    if record["value"] is None:
        return "n/a"
    text = f"{record['value']:.3f}"
    if record["low"] is not None:
        text += f" [{record['low']:.3f}, {record['high']:.3f}]"
    return text
