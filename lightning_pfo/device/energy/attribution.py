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

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lightning_pfo.device.energy.looks import AVERAGES, PARTS, PLAIN, Look, Usage, halves

Key = TypeVar("Key", bound=Hashable)
Array = npt.NDArray[np.float64]

_LEAST_LAG_S = -0.02  # the clocks of host and GPU may differ
_MOST_LAG_S = 0.2
_LAG_STEP_S = 0.002  # instructions are longer
_LEAST_LAG_STEP_S = 1e-6
_PRIOR = 0.5  # how far a power may be from the interpolated one: standard deviation, as a share of the mean power
_LEAST_FREEDOM = 2
_FEWEST_SNAPPED = 4
_COUNTABLE = 0.22  # of a period: of moments known so well it can be told how many periods lie between them
_UNEVEN = 0.2  # by how much more the first half of an interval may draw than its mean power, likewise
_ASSUMED_SCATTER = 0.05  # of the energies of ticks, where there are too few to see it
_COUNTER_STEP_J = 0.001
_SHARP = 0.1  # of the resolution: moments of ticks are not told apart any better
_HOPELESS = 7.0  # lags that explain the ticks exp(7) times worse than the best
_COARSE_STEP_S = 0.004  # for looks at a part of the time: most are hopeless
_AVERAGES_STEP_S = 0.01  # averages are smooth, and so are their likelihoods
_COARSE_AVERAGES, _ENOUGH_AVERAGES, _MOST_AVERAGES = 5, 4, 800
_HOPELESS_BETWEEN = 30.0  # at every second lag: likelihoods between them are higher by at most so much
_ENOUGH_LAGS = 6
_AT_ONCE = 100_000  # lags x ticks that are fitted in one go, for the sake of memory


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
    """Mean power of one kind of interval, W, and its standard error: two of them cover the truth 19 times in 20."""

    power_w: float
    stderr_w: float


class _Fits(NamedTuple):
    """What the ticks tell of the powers, were the counter late by certain times; a row for each lag.

    Attributes:
        log_likelihoods: Shape (lags,).
        powers_w: Mean powers, shape (lags, kinds).
        variances_w2: Their variances, shape (lags, kinds).
    """

    log_likelihoods: Array
    powers_w: Array
    variances_w2: Array

    def at(self, rows: npt.NDArray[np.int64]) -> _Fits:
        """Those of some lags."""
        return _Fits(*(values[rows] for values in self))

    def weighted(self, weight: float) -> _Fits:
        """The same, each likelier by a factor."""
        return self.plus(math.log(weight))

    def plus(self, log_weight: float) -> _Fits:
        """The same, with the logarithm of that factor."""
        return self._replace(log_likelihoods=self.log_likelihoods + log_weight)


def mean_powers(trace: EnergyTrace, intervals: Mapping[Key, Sequence[tuple[float, float]]]) -> dict[Key, MeanPower]:
    """Estimate the mean power of each kind of interval.

    Args:
        trace: At least two readings.
        intervals: For each kind its intervals (begin, end) in s, ascending; no two intervals of all kinds overlap.
            Time of the trace in no interval is a kind of its own.

    Returns:
        For each kind with time in the trace its mean power.
    """
    times_s, energies_j = np.asarray(trace.times_s, dtype=float), np.asarray(trace.energies_j, dtype=float)
    usage = {key: Usage(kind) for key, kind in intervals.items() if kind}
    if not usage or len(times_s) < 2:
        return {}
    # energy that a lagging counter shows at first was used before; left out if enough remains to fit by
    is_ours = times_s > min(use.edges_s[0] for use in usage.values()) + _MOST_LAG_S
    if np.count_nonzero(is_ours) > len(usage) + 9:
        times_s, energies_j = times_s[is_ours], energies_j[is_ours]
    usage = {key: use for key, use in usage.items() if np.ptp(use.seen_until(times_s[[0, -1]])) > trace.resolution_s}
    if not usage:
        return {}
    ticks_j, uses = np.diff(energies_j), list(usage.values())
    found = []
    for uneven in ([], [halves(intervals[key]) for key in usage]):

        def fit(look: Look, lags_s: Array, uneven: Sequence[Usage] = uneven) -> _Fits:
            parts = np.array_split(lags_s, math.ceil(len(lags_s) * len(ticks_j) / _AT_ONCE))
            return _joined([_fit(times_s, ticks_j, uses, uneven, trace.resolution_s, look, part) for part in parts])

        found.append(_comparable(_fits_by_look(fit), len(ticks_j), len(uses) + 2 + len(uneven)))
    likelihoods, powers_w, variances_w2 = _joined(found)
    weights = np.exp(likelihoods - likelihoods.max())
    weights /= weights.sum()
    means_w = weights @ powers_w
    stderrs_w = np.sqrt(weights @ (variances_w2 + (powers_w - means_w) ** 2))
    return {key: MeanPower(float(max(means_w[i], 0.0)), float(stderrs_w[i])) for i, key in enumerate(usage)}


def _comparable(fits: _Fits, num_ticks: int, num_columns: int) -> _Fits:
    """Likelihoods that compare with those of other numbers of columns (Schwarz's criterion)."""
    freedom = num_ticks - num_columns - 1
    occam = -num_columns / 2 * math.log(num_ticks)
    if freedom > _LEAST_FREEDOM:
        log_misfit = -2 * float(fits.log_likelihoods.max()) / freedom
        occam -= (num_ticks - freedom) / 2 * log_misfit
    return fits.plus(occam)


def _joined(fits: Sequence[_Fits]) -> _Fits:
    return _Fits(*map(np.concatenate, zip(*fits, strict=True)))


def _fits_by_look(fit: Callable[[Look, Array], _Fits]) -> _Fits:
    """Fits of all looks that are not hopeless, with the lags that are not."""
    found: list[_Fits] = []

    def best() -> float:
        return max((_best(one) for one in found), default=-math.inf)

    for look, likelihood in PARTS.items():
        fits = _fits_by_lag(partial(fit, look), best() - _HOPELESS, _LAG_STEP_S if look is PLAIN else _COARSE_STEP_S)
        found += [] if fits is None else [fits.weighted(likelihood)]
    for name, (likelihood, times_s) in AVERAGES.items():
        by_number: dict[int, _Fits | None] = {}
        num, numbers = _COARSE_AVERAGES, list(range(_COARSE_AVERAGES))
        while True:
            for number in numbers:
                if number not in by_number and 0 <= number < num:
                    time_s = times_s[0] * (times_s[1] / times_s[0]) ** (number / (num - 1))
                    by_number[number] = _fits_by_lag(
                        partial(fit, Look(**{name: time_s})), best() - _HOPELESS, _AVERAGES_STEP_S
                    )
            known = {number: fits for number, fits in by_number.items() if fits is not None}
            highest = max([best(), *(_best(fits) + math.log(likelihood / num) for fits in known.values())])
            likely = [n for n, fits in known.items() if _best(fits) + math.log(likelihood / num) > highest - _HOPELESS]
            if not likely or len(likely) >= _ENOUGH_AVERAGES or num > _MOST_AVERAGES:
                found += [known[number].weighted(likelihood / num) for number in likely]
                break
            by_number = {2 * number: fits for number, fits in by_number.items()}
            numbers = sorted({2 * number + side for number in likely for side in (-1, 1)})
            num = 2 * num - 1
    return _joined(found)


def _best(fits: _Fits) -> float:
    return float(fits.log_likelihoods.max())


def _fits_by_lag(fit: Callable[[Array], _Fits], least: float, step_s: float) -> _Fits | None:
    """Fits of the lags that are not hopeless: evenly spaced, and several of them; none if all are far below `least`.

    Their likelihoods are those of the spaces between lags, so that those of other grids compare with them.
    """
    grid = np.arange(round(_LEAST_LAG_S / step_s), round(_MOST_LAG_S / step_s) + 1, dtype=np.float64)
    is_smooth = step_s >= _AVERAGES_STEP_S
    fits = fit((grid if is_smooth else grid[::2]) * step_s)
    if fits.log_likelihoods.max() < least - _HOPELESS_BETWEEN:
        return None
    numbers = grid
    if not is_smooth:
        numbers = np.concatenate([grid[::2], grid[1::2]])
        fits = _joined([fits, fit(grid[1::2] * step_s)])
    while True:
        likely = np.flatnonzero(fits.log_likelihoods > fits.log_likelihoods.max() - _HOPELESS)
        if len(likely) >= _ENOUGH_LAGS or step_s <= _LEAST_LAG_STEP_S:
            return fits.at(likely).weighted(step_s)
        step_s /= 2
        between = np.union1d(2 * numbers[likely] - 1, 2 * numbers[likely] + 1)
        numbers = np.concatenate([2 * numbers[likely], between])
        fits = _joined([fits.at(likely), fit(between * step_s)])


def _fit(
    times_s: Array,
    ticks_j: Array,
    usage: Sequence[Usage],
    uneven: Sequence[Usage],
    resolution_s: float,
    look: Look,
    lags_s: Array,
) -> _Fits:
    """Fit powers to the energies between consecutive moments, which are known to a resolution.

    The counter is late by each of the lags, and takes the last part `look` of each period for all of it.
    """
    ticks_s = np.diff(times_s)
    moments_s = times_s - lags_s[:, None]
    known_s = np.stack([look.seen_s(moments_s, use) for use in usage], axis=2)
    others_s = np.clip(ticks_s - known_s.sum(axis=2), 0.0, None)
    mixture_s = np.concatenate([known_s, others_s[:, :, None]], axis=2)  # lags x ticks x kinds
    spent_s = mixture_s.sum(axis=1)
    mean_w = float(ticks_j.sum() / ticks_s.sum())
    interpolated_w = np.full(spent_s.shape, mean_w)
    np.divide((ticks_j / ticks_s) @ mixture_s, spent_s, out=interpolated_w, where=spent_s > 0)
    expected_j = _times(mixture_s, interpolated_w)
    residual_j = ticks_j - expected_j
    # one unit of a column is one standard deviation of the prior; in the last one all powers drift together
    drift_j = expected_j * _centred(times_s)
    uneven_s = [look.seen_s(moments_s, use)[:, :, None] for use in uneven]
    parts = _PRIOR * mean_w * mixture_s, _PRIOR * drift_j[:, :, None], *(_UNEVEN * mean_w * part for part in uneven_s)
    columns = np.concatenate(parts, axis=2)
    num_kinds = mixture_s.shape[2]
    rows = columns.transpose(0, 2, 1)

    strengths, directions = np.linalg.eigh(rows @ columns)
    strengths = np.maximum(strengths, 1e-12 * strengths[:, -1:])
    told = _times(directions.transpose(0, 2, 1), _times(rows, residual_j))
    misfit = np.maximum((residual_j**2).sum(axis=1) - (told**2 / strengths).sum(axis=1), 0.0)
    misfit += len(ticks_j) * (_COUNTER_STEP_J**2 + (_SHARP * resolution_s * mean_w) ** 2)
    freedom = len(ticks_j) - columns.shape[2] - 1  # the lag is fitted, too
    if freedom > _LEAST_FREEDOM:
        variance = misfit / (freedom - 2)  # that of Student's distribution
        variance += (resolution_s * mean_w) ** 2 / 3  # a period a little off does not look like scatter
        log_likelihoods = -freedom / 2 * np.log(misfit)
    else:
        variance = np.full(len(lags_s), float(_ASSUMED_SCATTER * ticks_j.mean()) ** 2 + _COUNTER_STEP_J**2)
        log_likelihoods = -misfit / (2 * variance)
    left = 1 / (strengths / variance[:, None] + 1)  # of the prior's variance, in each direction
    unit_w = _PRIOR * mean_w
    powers_w = interpolated_w + unit_w * _times(directions, left * told / variance[:, None])[:, :num_kinds]
    return _Fits(log_likelihoods, powers_w, unit_w**2 * _times(directions**2, left)[:, :num_kinds])


def _times(matrices: Array, vectors: Array) -> Array:
    """The product of each matrix with its vector."""
    return np.asarray((matrices @ vectors[:, :, None])[:, :, 0])


def _centred(times_s: Array) -> Array:
    """Middles of the ticks, from -0.5 to 0.5."""
    middles_s = (times_s[1:] + times_s[:-1]) / 2
    return np.asarray((middles_s - middles_s.mean()) / (times_s[-1] - times_s[0]))


def snap_to_period(
    times_s: Sequence[float], energies_j: Sequence[float], resolutions_s: Sequence[float]
) -> EnergyTrace:
    """Where the counter advances periodically, know its moments better than each was seen.

    Fits `first + count x period` to the moments. If all of them fit within their resolutions, the fitted ones replace
    them, and their resolution is that of the fit; otherwise those that are known badly are left out.

    Args:
        times_s: When it was seen to advance.
        energies_j: What it showed then.
        resolutions_s: How exactly each moment is known.
    """
    seen_s, known_s, shown_j = (np.asarray(column, dtype=float) for column in (times_s, resolutions_s, energies_j))
    if len(seen_s) < 2:
        return EnergyTrace(times_s, energies_j, max(resolutions_s, default=0.0))
    step_s = float(np.median(np.diff(seen_s)))
    is_usable = known_s < _COUNTABLE * step_s
    snapped = _snapped(seen_s[is_usable], known_s[is_usable], step_s)
    if snapped is not None:
        moments_s, resolution_s = snapped
        return EnergyTrace(moments_s.tolist(), shown_j[is_usable].tolist(), resolution_s)
    is_sharp = known_s <= 2 * float(np.median(known_s))
    resolution_s = float(np.sqrt(np.mean(known_s[is_sharp] ** 2)))
    return EnergyTrace(seen_s[is_sharp].tolist(), shown_j[is_sharp].tolist(), resolution_s)


def _snapped(seen_s: Array, known_s: Array, step_s: float) -> tuple[Array, float] | None:
    """Moments at equal distances, and how exactly they are known; None where they are not at equal distances."""
    if len(seen_s) < _FEWEST_SNAPPED:
        return None
    counts = np.concatenate([[0.0], np.cumsum(np.rint(np.diff(seen_s) / step_s))])  # ticks may have been missed
    if np.any(np.diff(counts) < 1):
        return None
    period_s, first_s = np.polyfit(counts, seen_s - seen_s[0], 1, w=1 / known_s)
    fitted_s = seen_s[0] + first_s + counts * period_s
    if np.any(np.abs(fitted_s - seen_s) > 2 * known_s):
        return None
    return fitted_s, float(1 / np.sqrt(np.sum(known_s**-2.0)))
