"""The cheapest clocks of one rank within given time windows, where changing a clock takes time: a dynamic programme.

The instructions of a rank are scheduled in their order. A partial schedule (a *label*) is known by its end, the present
clock, and when that was asked for; going on at the same clock is always allowed, another one only after the least
dwell. Of labels that agree in clock, end and age, on a grid finer than most clock steps, only the cheapest is kept, and
of those the best: half of them for the energy used so far, half for that energy plus the time used so far, at the
price that the whole pipeline gives for a second. So the result is a good solution, not always the best.

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
        latency: Time from a request until the clock changes, in seconds.
        least_dwell: Least time between two requests in seconds.
    """

    clocks_mhz: tuple[int, ...]
    kinds: tuple[int, ...]
    times: Floats
    energies: Floats
    allowed: npt.NDArray[np.bool_]
    powers: Floats
    least_power: float
    latency: float
    least_dwell: float

    def time_s(self, position: int, clock_mhz: int) -> float:
        """Time of an instruction at one of the clocks."""
        return float(self.times[self.kinds[position], self.clocks_mhz.index(clock_mhz)])

    def cheapest(
        self, release: Sequence[float], due: Sequence[float], end: float, *, change_cost: float, price: float
    ) -> list[int] | None:
        """Choose the clocks.

        Args:
            release: Earliest start of each instruction in seconds.
            due: Latest end of each instruction in seconds.
            end: End of the iteration in seconds, until when the rank waits.
            change_cost: Cost of a change of clocks in joules; a tiny one prefers few changes among equals.
            price: What a second is worth in J/s, to rank labels by.

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
            labels = self._extend(labels, kind, release[position], due[position], change_cost, first=position == 0)
            if not len(labels.end):
                return None
            labels = self._prune(labels, grid, price)
            trail.append(labels)
        total = labels.cost + self.powers[labels.clock] * (end - labels.end)
        best, chosen = int(np.argmin(total)), []
        for labels in reversed(trail):
            chosen.append(self.clocks_mhz[labels.clock[best]])
            best = int(labels.parent[best])
        return chosen[::-1]

    def _extend(
        self, labels: _Labels, kind: int, release: float, due: float, change_cost: float, *, first: bool
    ) -> _Labels:
        """All labels that follow by one more instruction."""
        old, new_times, new_energies = labels.clock, self.times[kind], self.energies[kind]
        wait = np.maximum(release - labels.end, 0.0)
        changes = old[:, None] != np.arange(len(self.clocks_mhz))
        late = np.minimum(np.maximum(self.latency - wait, 0.0) / new_times[old], 1.0)
        share = np.where(changes, late[:, None], 0.0)  # of the work that is done at the old clock
        durations = new_times + share * (new_times[old][:, None] - new_times)
        energies = new_energies + share * (new_energies[old][:, None] - new_energies)
        ends = (labels.end + wait)[:, None] + durations
        allowed = self.allowed[kind] & (ends <= due)
        if first:
            allowed &= ~changes
        elif self.least_dwell > 0:
            allowed &= ~changes | (labels.end - labels.asked_for >= self.least_dwell)[:, None]
        before, clock = np.nonzero(allowed)
        cost = labels.cost[:, None] + energies + self._waiting(wait, old) + change_cost * changes
        asked_for = np.where(changes[before, clock], labels.end[before], labels.asked_for[before])
        return _Labels(ends[before, clock], cost[before, clock], clock, asked_for, before)

    def _waiting(self, wait: Floats, old: Integers) -> Floats:
        """Energy of waiting, by label and next clock."""
        late = np.minimum(wait, self.latency)[:, None]
        rest = wait[:, None] - late
        energy: Floats = late * self.powers[old][:, None] + rest * self.powers
        hold = wait - self.latency - SPARE_S
        own_clock = hold >= max(self.least_dwell, self.latency + 2 * SPARE_S)
        low = late * self.powers[old][:, None] + (rest - SPARE_S) * self.least_power + SPARE_S * self.powers
        return np.where(own_clock[:, None], np.minimum(energy, low), energy)

    def _prune(self, labels: _Labels, grid: float, price: float) -> _Labels:
        # Who ends earlier has waited less: compare as if all had waited until the same time.
        reduced = labels.cost - self.least_power * labels.end
        order = np.argsort(reduced, kind="stable")
        key = (labels.end[order] / grid).astype(np.int64) * len(self.clocks_mhz) + labels.clock[order]
        if self.least_dwell > 0:
            age = np.minimum((labels.end - labels.asked_for)[order] / self.least_dwell, 1.0)
            key = key * (_AGES + 1) + (age * _AGES).astype(np.int64)
        kept = order[np.sort(np.unique(key, return_index=True)[1])]
        if len(kept) > _MOST_LABELS:
            by_price = kept[np.argsort((reduced + price * labels.end)[kept], kind="stable")]
            kept = np.unique(np.concatenate([kept[: _MOST_LABELS // 2], by_price[: _MOST_LABELS // 2]]))
        return _Labels(*(values[kept] for values in labels.arrays()))


@dataclass(frozen=True, eq=False)
class _Labels:
    """Partial schedules: when they end, their cost, the clock, when it was asked for, and which label they extend."""

    end: Floats
    cost: Floats
    clock: Integers
    asked_for: Floats
    parent: Integers

    def arrays(self) -> tuple[npt.NDArray[np.generic], ...]:
        return self.end, self.cost, self.clock, self.asked_for, self.parent
