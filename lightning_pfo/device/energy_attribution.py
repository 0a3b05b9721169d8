"""Who used the energy: mean power of each kind of interval from a counter that ticks more slowly than they last.

::

    instructions   F    B    .   F    B  . F    B    .   F    B        20 ms each, `.` is waiting
    counter        |             |             |             |          100 ms: every tick mixes them differently

The energy of tick k is the sum over kinds of (power of the kind) x (time of the kind within the tick). As the mixture
differs from tick to tick, the powers follow by least squares; interpolating within ticks instead would smear them all
towards the mean. A GPU that warms up draws more and more of everything: a common drift of all powers, linear in time,
is fitted with them. Where the ticks do not tell kinds apart (mixtures all alike), the interpolated powers remain: they
are the prior, weighted by the time resolution of the ticks (ridge regression).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Key = TypeVar("Key", bound=Hashable)
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class EnergyTrace:
    """Readings of an energy counter: the moments at which it advanced, and what it showed from then on.

    Attributes:
        times_s: Moments, ascending.
        energies_j: Counter values, as many.
        resolution_s: How exactly the moments are known.
    """

    times_s: Sequence[float]
    energies_j: Sequence[float]
    resolution_s: float


@dataclass(frozen=True)
class MeanPower:
    """Mean power of one kind of interval, W, and its standard error (0 if there are too few ticks to tell)."""

    power_w: float
    stderr_w: float


def mean_powers(trace: EnergyTrace, intervals: Mapping[Key, Sequence[tuple[float, float]]]) -> dict[Key, MeanPower]:
    """Estimate the mean power of each kind of interval.

    Args:
        trace: At least two readings.
        intervals: For each kind its intervals (begin, end) in s, ascending; no two intervals of all kinds overlap.
            Time of the trace in no interval is a kind of its own.

    Returns:
        For each kind with time in the trace its mean power.
    """
    times_s = np.asarray(trace.times_s, dtype=float)
    ticks_j = np.diff(np.asarray(trace.energies_j, dtype=float))
    ticks_s = np.diff(times_s)
    shares = {key: _time_within(times_s, kind) for key, kind in intervals.items()}
    keys = [key for key, share_s in shares.items() if share_s.sum() > trace.resolution_s]
    if not keys or not len(ticks_s):
        return {}
    known_s = np.stack([shares[key] for key in keys], axis=1)  # ticks x kinds
    other_s = np.clip(ticks_s - known_s.sum(axis=1), 0.0, None)
    has_other = bool(other_s.sum() > trace.resolution_s)
    mixture_s = np.column_stack([known_s, other_s]) if has_other else known_s

    interpolated_w = (mixture_s * (ticks_j / ticks_s)[:, None]).sum(axis=0) / mixture_s.sum(axis=0)
    expected_j = mixture_s @ interpolated_w
    columns = np.column_stack([mixture_s, expected_j * _centred(times_s)])  # the last one: all powers drift together
    num_ticks, num_columns = columns.shape
    scale = np.append(np.ones(num_columns - 1), ticks_j.sum() / ticks_s.sum())
    normal = columns.T @ columns + np.diag(num_ticks * (trace.resolution_s * scale) ** 2)
    residual_j = ticks_j - expected_j
    correction = np.linalg.solve(normal, columns.T @ residual_j)
    powers_w = interpolated_w + correction[:-1]

    freedom = num_ticks - num_columns
    variance = float(np.sum((residual_j - columns @ correction) ** 2)) / freedom if freedom > 0 else 0.0
    stderrs_w = np.sqrt(variance * np.diag(np.linalg.inv(normal)))
    return {key: MeanPower(float(powers_w[i]), float(stderrs_w[i])) for i, key in enumerate(keys)}


def _centred(times_s: Array) -> Array:
    """Middles of the ticks, from -0.5 to 0.5."""
    middles_s = (times_s[1:] + times_s[:-1]) / 2
    return np.asarray((middles_s - middles_s.mean()) / (times_s[-1] - times_s[0]))


def _time_within(times_s: Array, intervals: Sequence[tuple[float, float]]) -> Array:
    """Time of the intervals within each pair of consecutive moments."""
    if not intervals:
        return np.zeros(len(times_s) - 1)
    edges_s = np.asarray(intervals, dtype=float).ravel()
    durations_s = edges_s[1::2] - edges_s[::2]
    passed_s = np.zeros(len(edges_s))
    passed_s[1::2] = np.cumsum(durations_s)
    passed_s[2::2] = passed_s[1:-1:2]
    return np.diff(np.interp(times_s, edges_s, passed_s))


def snap_to_period(trace: EnergyTrace) -> EnergyTrace:
    """Where the counter advances periodically, know its moments better than each was seen.

    Fits `first + count x period` to the moments. If all of them fit within the resolution, the fitted ones replace
    them, and their resolution is that of the fit; otherwise the trace stays as it is.
    """
    times_s = np.asarray(trace.times_s, dtype=float)
    if len(times_s) < 4:
        return trace
    steps_s = np.diff(times_s)
    counts = np.concatenate([[0.0], np.cumsum(np.rint(steps_s / np.median(steps_s)))])  # ticks may have been missed
    if np.any(np.diff(counts) < 1):
        return trace
    period_s, first_s = np.polyfit(counts, times_s - times_s[0], 1)
    fitted_s = times_s[0] + first_s + counts * period_s
    if np.max(np.abs(fitted_s - times_s)) > 2 * trace.resolution_s:
        return trace
    return EnergyTrace(fitted_s.tolist(), trace.energies_j, trace.resolution_s / float(np.sqrt(len(times_s))))
