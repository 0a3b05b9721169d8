"""Who used the energy: mean power of each kind of interval from a counter that ticks more slowly than they last.

::

    instructions   F    B    .   F    B  . F    B    .   F    B        20 ms each, `.` is waiting
    counter        |             |             |             |          100 ms: every tick mixes them differently

The energy of tick k is the sum over kinds of (power of the kind) x (time of the kind within the tick). As the mixture
differs from tick to tick, the powers follow by least squares; interpolating within ticks instead would smear them all
towards the mean. A GPU that warms up draws more and more of everything: a common drift of all powers, linear in time,
is fitted with them.

A counter shows late what it has counted, by a time that no data sheet tells; taking it for granted that it shows it at
once would move energy to the neighbours in time (a lag of 10 ms, neglected, costs 10 % at 20 ms instructions). So the
powers are fitted for many possible lags, and averaged by how well each lag explains the ticks (Bayesian model
averaging: Hoeting et al., Statistical Science 14, 1999).

Nor does it tell how the counter looks at power (`looks`): all the time; at a part of each tick (the power that A100 and
H100 report is that of 25 of every 100 ms: Yang, Adamek and Armour, Accurate and convenient energy measurements for
GPUs, SC24, arXiv:2312.02741); or at a mean over some time. Looks are fitted with the lags, and averaged in the same
way. So is whether kinds draw more in the first half of their intervals than in the second.

Power itself may follow the load with a delay. From a counter that cannot be told from one that averages. A kind's power
is that which it causes in the end: what is drawn a little later belongs to it, not to what follows.

Where the ticks do not tell kinds apart (mixtures all alike), the interpolated powers remain: they are the prior, held
to be right within half the mean power. The standard error says how much was left to it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device.energy.fits import MOST_LAG_S, Ticks, joined
from lightning_pfo.device.energy.known_looks import all_fits
from lightning_pfo.device.energy.looks import Usage, halves
from lightning_pfo.device.energy.trace import EnergyTrace

Key = TypeVar("Key", bound=Hashable)
_LONGEST_TICK_S = 1.0  # counters move more often


@dataclass(frozen=True)
class MeanPower:
    """Mean power of one kind of interval, W, and its standard error: two of them cover the truth 19 times in 20."""

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

    Raises:
        DeviceError: If a trace of a second or more has no energy at all.
    """
    times_s, energies_j = np.asarray(trace.times_s, dtype=float), np.asarray(trace.energies_j, dtype=float)
    usage = {key: Usage(kind) for key, kind in intervals.items() if kind}
    if not usage or len(times_s) < 2:
        return {}
    # energy that a lagging counter shows at first was used before; left out if enough remains to fit by
    is_ours = times_s > min(use.edges_s[0] for use in usage.values()) + MOST_LAG_S
    if np.count_nonzero(is_ours) > len(usage) + 9:
        times_s, energies_j = times_s[is_ours], energies_j[is_ours]
    usage = {key: use for key, use in usage.items() if np.ptp(use.seen_until(times_s[[0, -1]])) > trace.resolution_s}
    if not usage:
        return {}
    energies_j, uses = np.diff(energies_j), list(usage.values())
    if not energies_j.any():
        if (span_s := float(np.ptp(times_s))) < _LONGEST_TICK_S:
            return {}
        raise DeviceError(
            f"A GPU that works uses energy; got 0 J in {span_s:.3g} s. Its counter stands still, or its power reads "
            f"0 W, so nothing can be measured on it."
        )
    unevens = ((), [halves(intervals[key]) for key in usage])
    found = [Ticks(times_s, energies_j, trace.resolution_s, uses, uneven) for uneven in unevens]
    log_likelihoods, powers_w, variances_w2, _ = joined(
        [fits for ticks in found for fits in all_fits(ticks, trace.calibration)]
    )
    weights = np.exp(log_likelihoods - log_likelihoods.max())
    weights /= weights.sum()
    means_w = weights @ powers_w
    stderrs_w = np.sqrt(weights @ (variances_w2 + (powers_w - means_w) ** 2))
    return {key: MeanPower(float(max(means_w[i], 0.0)), float(stderrs_w[i])) for i, key in enumerate(usage)}
