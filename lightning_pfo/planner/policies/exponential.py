"""The exponential curve of cost over time, a exp(-k t) + c, that Perseus and lowtime fit to an instruction's options.

For a given decay k the best a and c are those of a straight line through (exp(-k t), cost), so least squares over all
three is a search along k: a coarse one over all scales, then a narrower one where it was best. That finds the best of
all curves, where a general minimiser depends on its first guess. Where the points bend the other way, as noise or a
power cap may have it, the best curve is nearly a line (k near 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_pfo.planner.network.arrays import Floats

_DECAYS = np.logspace(-2, 2, 81)
"""Decays over the span of times that are tried: from nearly a line to nearly a step."""

_NARROWER = 4
"""Rounds of narrowing, each around the best of 21 decays."""


@dataclass(frozen=True)
class ExponentialCurve:
    """The curve `scale exp(-decay (t - start) / span) + offset`.

    Attributes:
        start_s: Time of the fastest option.
        span_s: From there to the slowest; positive.
        decay: How steeply it falls over the span; positive.
        scale_j: What falls, at least 0.
        offset_j: What stays.
    """

    start_s: float
    span_s: float
    decay: float
    scale_j: float
    offset_j: float

    def at(self, times_s: Floats) -> Floats:
        """Cost at some times in joules."""
        shares = (np.asarray(times_s) - self.start_s) / self.span_s
        return np.asarray(self.scale_j * np.exp(-self.decay * shares) + self.offset_j)


def fit_exponential(times_s: Sequence[float], costs_j: Sequence[float]) -> ExponentialCurve:
    """The curve of least squares through some points.

    Args:
        times_s: Ascending times, at least one.
        costs_j: Cost of each.
    """
    times, costs = np.asarray(times_s, dtype=np.float64), np.asarray(costs_j, dtype=np.float64)
    span = float(times[-1] - times[0]) or 1.0
    shares = (times - times[0]) / span
    decays = _DECAYS
    for _ in range(_NARROWER):
        best = int(_squares(shares, costs, decays)[0].argmin())
        decays = np.linspace(decays[max(best - 1, 0)], decays[min(best + 1, len(decays) - 1)], 21)
    errors, scales, offsets = _squares(shares, costs, decays)
    best = int(errors.argmin())
    return ExponentialCurve(float(times[0]), span, float(decays[best]), float(scales[best]), float(offsets[best]))


def _squares(shares: Floats, costs: Floats, decays: Floats) -> tuple[Floats, Floats, Floats]:
    """Sum of squares, scale and offset of the best curve of each decay; no curve rises."""
    falls = np.exp(-np.multiply.outer(decays, shares))
    centred = falls - falls.mean(axis=1, keepdims=True)
    spread = np.maximum((centred**2).sum(axis=1), np.finfo(float).tiny)
    scales = np.maximum(centred @ (costs - costs.mean()) / spread, 0.0)
    offsets = costs.mean() - scales * falls.mean(axis=1)
    errors = ((scales[:, None] * falls + offsets[:, None] - costs) ** 2).sum(axis=1)
    return errors, scales, offsets
