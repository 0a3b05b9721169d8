"""Mean powers that explain the ticks of a counter, for every lag and every look that may be its own, by least squares.

The powers of a lag and a look are those of a ridge regression: what the ticks leave open stays near the interpolated
powers. How well each explains the ticks is its likelihood, by which whoever asks averages (`attribution`), or learns of
the counter (`calibration`). Lags are refined where they are likely; looks that average power, likewise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_pfo.device.energy.looks import AVERAGES, PARTS, PLAIN, Look, Usage

Array = npt.NDArray[np.float64]

LEAST_LAG_S = -0.02  # the clocks of host and GPU may differ
MOST_LAG_S = 0.2
_LAG_STEP_S = 0.002  # instructions are longer
_LEAST_LAG_STEP_S = 1e-6
_PRIOR = 0.5  # how far a power may be from the interpolated one: standard deviation, as a share of the mean power
_LEAST_FREEDOM = 2
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


class Fits(NamedTuple):
    """What the ticks tell of the powers, were the counter late by certain times; a row for each lag.

    Attributes:
        log_likelihoods: Of the ticks, and of the lags beforehand, shape (lags,).
        powers_w: Mean powers, shape (lags, kinds).
        variances_w2: Their variances, shape (lags, kinds).
        lags_s: The lags.
    """

    log_likelihoods: Array
    powers_w: Array
    variances_w2: Array
    lags_s: Array

    def at(self, rows: npt.NDArray[np.int64]) -> Fits:
        """Those of some lags."""
        return Fits(*(values[rows] for values in self))

    def plus(self, log_weights: float | Array) -> Fits:
        """The same, with logarithms of how much likelier each is."""
        return self._replace(log_likelihoods=self.log_likelihoods + log_weights)


@dataclass(frozen=True)
class Ticks:
    """Energies between consecutive moments, and what happened meanwhile.

    Attributes:
        times_s: The moments.
        energies_j: Energies between them, one fewer.
        resolution_s: How exactly the moments are known.
        usage: The kinds of intervals whose powers are asked for.
        uneven: What first halves of some kinds are more than second ones, where that is allowed for.
    """

    times_s: Array
    energies_j: Array
    resolution_s: float
    usage: Sequence[Usage]
    uneven: Sequence[Usage] = ()

    def fits(self, look: Look, lags_s: Array) -> Fits:
        """What they tell if the counter has a look, and one of some lags."""
        parts = np.array_split(lags_s, math.ceil(len(lags_s) * len(self.energies_j) / _AT_ONCE))
        return joined([_fit(self, look, part) for part in parts])

    def comparable(self, fits: Sequence[Fits]) -> list[Fits]:
        """All fits of these ticks, with likelihoods that compare with those of other numbers of columns.

        That is Schwarz's criterion.
        """
        num_ticks, num_columns = len(self.energies_j), len(self.usage) + 2 + len(self.uneven)
        freedom = num_ticks - num_columns - 1
        log_occam = -num_columns / 2 * math.log(num_ticks)
        if freedom > _LEAST_FREEDOM:
            log_misfit = -2 * max(map(_best, fits)) / freedom
            log_occam -= (num_ticks - freedom) / 2 * log_misfit
        return [each.plus(log_occam) for each in fits]


def joined(fits: Sequence[Fits]) -> Fits:
    """Rows of several fits as one."""
    return Fits(*map(np.concatenate, zip(*fits, strict=True)))


def fits_by_look(ticks: Ticks) -> list[tuple[Look, Fits]]:
    """Fits of all looks that are not hopeless, with the lags that are not.

    Their likelihoods are those of the looks (`looks.PARTS`, `looks.AVERAGES`), of lags evenly spread from LEAST_LAG_S
    to MOST_LAG_S, and of the ticks.
    """
    found: list[tuple[Look, Fits]] = []

    def best() -> float:
        return max((_best(fits) for _, fits in found), default=-math.inf)

    for look, likelihood in PARTS.items():
        step_s = _LAG_STEP_S if look is PLAIN else _COARSE_STEP_S
        fits = _fits_by_lag(partial(ticks.fits, look), best() - _HOPELESS, step_s)
        found += [] if fits is None else [(look, fits.plus(math.log(likelihood)))]
    for name, (likelihood, times_s) in AVERAGES.items():
        by_number: dict[int, tuple[Look, Fits] | None] = {}
        num, numbers = _COARSE_AVERAGES, list(range(_COARSE_AVERAGES))
        while True:
            for number in numbers:
                if number not in by_number and 0 <= number < num:
                    time_s = times_s[0] * (times_s[1] / times_s[0]) ** (number / (num - 1))
                    look = Look(**{name: time_s})
                    fits = _fits_by_lag(partial(ticks.fits, look), best() - _HOPELESS, _AVERAGES_STEP_S)
                    by_number[number] = None if fits is None else (look, fits)
            log_weight = math.log(likelihood / num)
            known = {number: pair for number, pair in by_number.items() if pair is not None}
            highest = max([best(), *(_best(fits) + log_weight for _, fits in known.values())])
            likely = [n for n, (_, fits) in known.items() if _best(fits) + log_weight > highest - _HOPELESS]
            if not likely or len(likely) >= _ENOUGH_AVERAGES or num > _MOST_AVERAGES:
                found += [(look, fits.plus(log_weight)) for look, fits in map(known.__getitem__, likely)]
                break
            by_number = {2 * number: pair for number, pair in by_number.items()}
            numbers = sorted({2 * number + side for number in likely for side in (-1, 1)})
            num = 2 * num - 1
    return found


def _best(fits: Fits) -> float:
    return float(fits.log_likelihoods.max())


def _fits_by_lag(fit: Callable[[Array], Fits], least: float, step_s: float) -> Fits | None:
    """Fits of the lags that are not hopeless: evenly spaced, and several of them; none if all are far below `least`.

    Their likelihoods are those of the spaces between lags, so that those of other grids compare with them.
    """
    grid = np.arange(round(LEAST_LAG_S / step_s), round(MOST_LAG_S / step_s) + 1, dtype=np.float64)
    is_smooth = step_s >= _AVERAGES_STEP_S
    fits = fit((grid if is_smooth else grid[::2]) * step_s)
    if fits.log_likelihoods.max() < least - _HOPELESS_BETWEEN:
        return None
    numbers = grid
    if not is_smooth:
        numbers = np.concatenate([grid[::2], grid[1::2]])
        fits = joined([fits, fit(grid[1::2] * step_s)])
    while True:
        likely = np.flatnonzero(fits.log_likelihoods > fits.log_likelihoods.max() - _HOPELESS)
        if len(likely) >= _ENOUGH_LAGS or step_s <= _LEAST_LAG_STEP_S:
            return fits.at(likely).plus(math.log(step_s / (MOST_LAG_S - LEAST_LAG_S)))
        step_s /= 2
        between = np.union1d(2 * numbers[likely] - 1, 2 * numbers[likely] + 1)
        numbers = np.concatenate([2 * numbers[likely], between])
        fits = joined([fits.at(likely), fit(between * step_s)])


def _fit(ticks: Ticks, look: Look, lags_s: Array) -> Fits:
    """Fit powers to the ticks, were the counter late by each of the lags, with one look at the power."""
    times_s, ticks_j, resolution_s = ticks.times_s, ticks.energies_j, ticks.resolution_s
    ticks_s = np.diff(times_s)
    moments_s = times_s - lags_s[:, None]
    known_s = np.stack([look.seen_s(moments_s, use) for use in ticks.usage], axis=2)
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
    uneven_s = [look.seen_s(moments_s, use)[:, :, None] for use in ticks.uneven]
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
    return Fits(log_likelihoods, powers_w, unit_w**2 * _times(directions**2, left)[:, :num_kinds], lags_s)


def _times(matrices: Array, vectors: Array) -> Array:
    """The product of each matrix with its vector."""
    return np.asarray((matrices @ vectors[:, :, None])[:, :, 0])


def _centred(times_s: Array) -> Array:
    """Middles of the ticks, from -0.5 to 0.5."""
    middles_s = (times_s[1:] + times_s[:-1]) / 2
    return np.asarray((middles_s - middles_s.mean()) / (times_s[-1] - times_s[0]))
