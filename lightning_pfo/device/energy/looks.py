r"""How a counter may look at the power that it sums up.

::

    power        ____|~~~~~~|____________     of an instruction
    as it is     ____|~~~~~~|____________
    a part       ..__|..~~~~|.._____..___     the last quarter of each tick, taken for all of it
    a window     ____/~~~~~~~\___________    the mean of the last so many milliseconds
    smoothed     ____/~~~~~~~\_..________    a low-pass filter: an exponentially weighted mean

For each kind of interval a counter sees, up to a moment, as much time within them as its look makes of them. All looks
conserve energy: the time seen is that passed, but later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Look:
    """One way to look.

    Attributes:
        part: Part of each tick that is looked at, the last one.
        window_s: Time over which power is averaged, s; 0: none.
        smoothing_s: Time constant of a filter, s; 0: none.
    """

    part: float = 1.0
    window_s: float = 0.0
    smoothing_s: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether the counter sums up power as it is."""
        return self.part == 1 and not self.window_s and not self.smoothing_s

    def seen_s(self, times_s: Array, use: Usage) -> Array:
        """How long each tick was spent in a kind of interval, as the counter sees it.

        Args:
            times_s: When ticks would show what was used until then, a row for each lag.
            use: The kind.
        """
        if self.part == 1:
            return np.diff(use.seen_until(times_s, self))
        ticks_s = np.diff(times_s[0])
        counts = np.maximum(np.rint(ticks_s / np.median(ticks_s)), 1)  # ticks may have been missed
        periods_s = ticks_s / counts
        seen_s = np.zeros((len(times_s), len(ticks_s)))
        for back in range(int(counts.max())):
            ends_s = times_s[:, 1:] - back * periods_s
            within_s = use.seen_until(ends_s, self) - use.seen_until(ends_s - self.part * periods_s, self)
            seen_s += np.where(back < counts, within_s, 0.0)
        return seen_s / self.part


PLAIN = Look()
PARTS = {PLAIN: 0.4, Look(part=0.5): 0.1, Look(part=0.25): 0.15}
"""How likely it is beforehand that a part of each tick is looked at; 25 ms of 100 is what A100 and H100 do."""

AVERAGES = {"window_s": (0.2, (0.02, 0.3)), "smoothing_s": (0.15, (0.005, 0.18))}
"""How likely averages are, and over which times (s), shortest and longest."""


class Usage:
    """Time spent in intervals of one kind, up to any moment.

    Args:
        intervals: Begin and end of each in s, ascending, not overlapping.
        signs: What a second counts for in each; None: 1.
    """

    def __init__(self, intervals: Sequence[tuple[float, float]], signs: Sequence[float] | None = None) -> None:
        self.edges_s = np.asarray(intervals, dtype=float).ravel()
        rates = np.ones(len(intervals)) if signs is None else np.asarray(signs, dtype=float)
        lengths_s = self.edges_s[1::2] - self.edges_s[::2]
        self.within_s = np.zeros(len(self.edges_s))
        self.within_s[1::2] = np.cumsum(rates * lengths_s)
        self.within_s[2::2] = self.within_s[1:-1:2]
        self._rates = np.zeros(len(self.edges_s) + 1)  # before the first edge, and after each
        self._rates[1::2] = rates
        self._ends_s: dict[float, Array] = {}

    def seen_until(self, times_s: Array, look: Look = PLAIN) -> Array:
        """Time within the intervals until some moments, as it is or averaged."""
        if look.window_s:
            return (self._integral(times_s) - self._integral(times_s - look.window_s)) / look.window_s
        if look.smoothing_s:
            return self._smoothed(times_s, look.smoothing_s)
        return np.interp(times_s, self.edges_s, self.within_s)

    @cached_property
    def _integrals(self) -> Array:
        """Integral of `within_s` until each edge."""
        means_s = (self.within_s[1:] + self.within_s[:-1]) / 2
        return np.concatenate([[0.0], np.cumsum(means_s * np.diff(self.edges_s))])

    def _integral(self, times_s: Array) -> Array:
        places = np.searchsorted(self.edges_s, times_s, side="right")
        before = np.maximum(places - 1, 0)
        since_s = np.where(places > 0, times_s - self.edges_s[before], 0.0)
        return np.asarray(
            self._integrals[before] + since_s * (self.within_s[before] + self._rates[places] * since_s / 2)
        )

    def _smoothed(self, times_s: Array, smoothing_s: float) -> Array:
        """The solution of `smoothing y' = within - y`: it lags behind by `smoothing x rate`, but for what decays."""
        if smoothing_s not in self._ends_s:
            behind = [0.0]  # by how much more it lags behind than in the end, at each edge
            decays = np.exp(-np.diff(self.edges_s) / smoothing_s).tolist()
            jumps = (smoothing_s * np.diff(self._rates)).tolist()
            behind[0] = -jumps[0]
            for decay, jump in zip(decays, jumps[1:], strict=True):
                behind.append(behind[-1] * decay - jump)
            self._ends_s[smoothing_s] = np.array(behind)
        places = np.searchsorted(self.edges_s, times_s, side="right")
        before = np.maximum(places - 1, 0)
        since_s = np.where(places > 0, times_s - self.edges_s[before], 0.0)
        decayed = np.where(places > 0, self._ends_s[smoothing_s][before] * np.exp(-since_s / smoothing_s), 0.0)
        straight = self.within_s[before] + self._rates[places] * (since_s - smoothing_s)
        return np.asarray(np.where(places > 0, straight - decayed, 0.0))


def halves(intervals: Sequence[tuple[float, float]]) -> Usage:
    """What the first halves of intervals are more than the second ones."""
    parts, signs = [], []
    for begin_s, end_s in intervals:
        middle_s = (begin_s + end_s) / 2
        parts += [(begin_s, middle_s), (middle_s, end_s)]
        signs += [1.0, -1.0]
    return Usage(parts, signs)
