"""The cheapest clocks of one rank within given time windows, where changing a clock takes time: a dynamic programme.

The instructions of a rank are scheduled in their order. A partial schedule (a *label*) is known by its end, the present
clock, and when that was asked for; going on at the same clock is always allowed, another one only after the least
dwell. Of labels that agree in clock, end and age, on a grid finer than most clock steps, only the cheapest is kept, and
of those the best: half of them for the energy used so far, half for that energy plus the time used so far, at the
rate that the whole pipeline gives for a second. So the result is a good solution, not always the best.

The method is that of resource-constrained shortest paths by label setting (Desrochers and Soumis, INFOR 26(3), 1988).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_pfo.planner.limits.wait_clocks import SPARE_S
from lightning_pfo.planner.network.arrays import Floats, Integers

_MOST_LABELS = 80
_COMPARED = 4 * _MOST_LABELS
"""So many labels, by either measure, are compared with those of their cell of the grid."""
_GRID = 0.01
"""Ends nearer than this part of a typical instruction are not told apart."""
_AGES = 4
"""Parts of the least dwell that are told apart."""


@dataclass(frozen=True, eq=False)
class RankProgramme:
    """What one rank runs.

    Attributes:
        clocks_mhz: The clocks that may be chosen, K of them.
        kinds: Kind of each instruction of the rank, shape (n,).
        times: Time of each kind at each clock in seconds, shape (kinds, K).
        energies: Energy of each kind at each clock in joules, shape (kinds, K).
        allowed: Which of them a plan may use, shape (kinds, K).
        powers: Blocking power at each clock in watts, shape (K,).
        least_power: Blocking power at the clock of long waits in watts.
        latency: Time from a request until the clock changes in seconds, by the clock before and the one asked for,
            shape (K, K).
        least_dwell: Least time between two requests in seconds.
    """

    clocks_mhz: tuple[int, ...]
    kinds: tuple[int, ...]
    times: Floats
    energies: Floats
    allowed: npt.NDArray[np.bool_]
    powers: Floats
    least_power: float
    latency: Floats
    least_dwell: float

    def cheapest(
        self, release: Sequence[float], due: Sequence[float], end: float, *, change_cost: float, rate_w: float
    ) -> tuple[int, ...] | None:
        """Choose the clocks.

        Args:
            release: Earliest start of each instruction in seconds.
            due: Latest end of each instruction in seconds.
            end: End of the iteration in seconds, until when the rank waits.
            change_cost: Cost of a change of clocks in joules; a tiny one prefers few changes among equals.
            rate_w: Worth of a second in J/s, to rank labels by.

        Returns:
            A clock in MHz for each instruction; None if none was found.
        """
        num_clocks = len(self.clocks_mhz)
        labels = _Labels(
            np.zeros(num_clocks), np.zeros(num_clocks), np.arange(num_clocks), np.zeros(num_clocks), np.arange(0)
        )
        grid = _GRID * float(np.median(self.times))
        trail: list[_Labels] = []
        for position, kind in enumerate(self.kinds):
            wait = np.maximum(release[position] - labels.end, 0.0)
            extended = self._going_on(labels, kind, wait)
            if position:
                extended = extended.and_also(self._changing(labels, kind, wait, change_cost))
            extended = extended.at(np.flatnonzero(extended.end <= due[position]))
            if not len(extended.end):
                return None
            labels = self._prune(extended, grid, rate_w)
            trail.append(labels)
        total = labels.cost + self.powers[labels.clock] * (end - labels.end)
        best, chosen = int(np.argmin(total)), []
        for labels in reversed(trail):
            chosen.append(self.clocks_mhz[labels.clock[best]])
            best = int(labels.parent[best])
        return tuple(chosen[::-1])

    def _going_on(self, labels: _Labels, kind: int, wait: Floats) -> _Labels:
        """Each label with one more instruction at the clock that it has."""
        before = np.flatnonzero(self.allowed[kind, labels.clock])
        clock, wait = labels.clock[before], wait[before]
        return _Labels(
            labels.end[before] + wait + self.times[kind, clock],
            labels.cost[before] + self.energies[kind, clock] + self._waiting(wait, clock, clock),
            clock,
            labels.asked_for[before],
            before,
        )

    def _changing(self, labels: _Labels, kind: int, wait: Floats, change_cost: float) -> _Labels:
        """Each label whose clock has been kept long enough, with one more instruction at every other clock."""
        if self.least_dwell > 0:
            rows = np.flatnonzero(labels.end - labels.asked_for >= self.least_dwell)
        else:
            rows = np.arange(len(labels.end))
        row, clock = np.nonzero(self.allowed[kind] & (labels.clock[rows, None] != np.arange(len(self.clocks_mhz))))
        before = rows[row]
        old, wait = labels.clock[before], wait[before]
        times, energies = self.times[kind, clock], self.energies[kind, clock]
        if self.latency.any():
            old_times, old_energies = self.times[kind, old], self.energies[kind, old]
            late = np.maximum(self.latency[old, clock] - wait, 0.0)
            share = np.minimum(late / old_times, 1.0)  # of the work, at the old clock
            times = times + share * (old_times - times)
            energies = energies + share * (old_energies - energies)
        waiting = self._waiting(wait, old, clock)
        ends = labels.end[before]
        return _Labels(ends + wait + times, labels.cost[before] + energies + waiting + change_cost, clock, ends, before)

    def _waiting(self, wait: Floats, old: Integers, new: Integers) -> Floats:
        """Energy of waiting between two clocks."""
        old_power, power, latency = self.powers[old], self.powers[new], self.latency[old, new]
        late = np.minimum(wait, latency)
        rest = wait - late
        energy: Floats = late * old_power + rest * power
        if self.powers.max() == self.least_power:
            return energy
        hold = wait - latency - SPARE_S
        own_clock = hold >= np.maximum(self.least_dwell, latency + 2 * SPARE_S)
        low = late * old_power + (rest - SPARE_S) * self.least_power + SPARE_S * power
        return np.where(own_clock, np.minimum(energy, low), energy)

    def _prune(self, labels: _Labels, grid: float, rate_w: float) -> _Labels:
        # Who ends earlier has waited less: compare as if all had waited until the same time.
        reduced = labels.cost - self.least_power * labels.end
        rated = reduced + rate_w * labels.end
        order = _least(reduced, rated)
        order = order[np.argsort(reduced[order], kind="stable")]
        key = (labels.end[order] / grid).astype(np.int64) * len(self.clocks_mhz) + labels.clock[order]
        if self.least_dwell > 0:
            age = np.minimum((labels.end - labels.asked_for)[order] / self.least_dwell, 1.0)
            key = key * (_AGES + 1) + (age * _AGES).astype(np.int64)
        by_key = np.argsort(key, kind="stable")  # of those with a key the first, and np.unique is slower
        kept = order[np.sort(by_key[np.flatnonzero(np.diff(key[by_key], prepend=-1))])]
        if len(kept) > _MOST_LABELS:
            by_rated = kept[np.argsort(rated[kept], kind="stable")]
            kept = np.unique(np.concatenate([kept[: _MOST_LABELS // 2], by_rated[: _MOST_LABELS // 2]]))
        return labels.at(kept)


def _least(*measures: Floats) -> Integers:
    """Numbers of those that are among the least by any measure: many times those that are kept."""
    if len(measures[0]) <= 2 * _COMPARED:
        return np.arange(len(measures[0]))
    is_least = np.zeros(len(measures[0]), dtype=bool)
    for one in measures:
        is_least[np.argpartition(one, _COMPARED)[:_COMPARED]] = True
    return np.flatnonzero(is_least)


@dataclass(frozen=True, eq=False)
class _Labels:
    """Partial schedules: when they end, their cost, the clock, when it was asked for, and which label they extend."""

    end: Floats
    cost: Floats
    clock: Integers
    asked_for: Floats
    parent: Integers

    def at(self, numbers: Integers) -> _Labels:
        return _Labels(
            self.end[numbers], self.cost[numbers], self.clock[numbers], self.asked_for[numbers], self.parent[numbers]
        )

    def and_also(self, others: _Labels) -> _Labels:
        return _Labels(
            np.concatenate([self.end, others.end]),
            np.concatenate([self.cost, others.cost]),
            np.concatenate([self.clock, others.clock]),
            np.concatenate([self.asked_for, others.asked_for]),
            np.concatenate([self.parent, others.parent]),
        )
