"""The time-cost tradeoff on any DAG: from options per node to a frontier of choices, each with a lower bound.

A choice takes one option for every node; its time is the longest path, its cost the sum of its options' costs plus a
rate times its time. `trace_tradeoff` sweeps the time from slow to fast. At each target it solves the relaxation and
rounds it. Where that leaves a gap too large, it works on: at the kinks of the relaxation (there its solution is
nearly one of real options), by splicing the best choices, and by beam search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TypeVar

import numpy as np

from lightning_pfo.core.errors import PlanError
from lightning_pfo.planner.beam_search import search_beam
from lightning_pfo.planner.hull import OptionSet
from lightning_pfo.planner.instruction_dag import InstructionDag
from lightning_pfo.planner.linear_programme import RelaxedSolution, RelaxedTradeoff
from lightning_pfo.planner.rounding import chosen_times, round_to_options, spend_slack, total_cost
from lightning_pfo.planner.splicing import splice

T = TypeVar("T")

_EQUAL_TIMES = 1e-9
"""Relative difference below which two times are the same."""

_LARGEST_GAP, _MEDIAN_GAP = 0.002, 0.001
"""Work goes on while a gap exceeds the first; where the time must be kept to, or while the median exceeds it, the
second."""

_DEEP_KINK = 5e-4
"""A bend of the relaxation between two targets that is worth a closer look, relative to the cost."""

_REACH = 0.002
"""How far a choice may be from a time that need not be kept to, relative to it; never beyond half the spacing."""

_IMPROVED_NODES = 100_000
"""Each improvement is tried at so many targets that it handles about this many nodes in all."""

_TINY = 1e-300
_BEAM_TRIES, _SPLICED_PAIRS = 4, 3


Progress = Callable[[str, int, int], None]

"""Called with what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class TradeoffPoint:
    """A choice of options.

    Attributes:
        time: Longest path in seconds.
        cost: Cost of the options plus the rate times `time`, in joules.
        bound: No choice that takes at most `time` costs less.
        choice: Index into `options[node].times` for each node.
    """

    time: float
    cost: float
    bound: float
    choice: tuple[int, ...]


def trace_tradeoff(
    dag: InstructionDag,
    options: Sequence[OptionSet],
    *,
    rate: float = 0.0,
    num_points: int = 50,
    times: Sequence[float] = (),
    deadlines: Sequence[float] = (),
    on_progress: Progress | None = None,
) -> list[TradeoffPoint]:
    """Find choices from the fastest to the one of least cost, none dominated, fast to slow.

    Args:
        dag: The precedences.
        options: Options of each node; nodes of one kind should share one object.
        rate: Cost of a second of the longest path in J/s, at least 0.
        num_points: Number of times, equally spaced, near which choices are wanted.
        times: Further times in seconds that must be kept to; brought into the range of the frontier.
        deadlines: The same, but one shorter than the fastest choice is an error.
        on_progress: Called with what is being done, how much of it is done, and how much there is.

    Raises:
        PlanError: If a deadline cannot be met.
    """
    fastest = fastest_time(dag, options, deadlines)
    search = _Search(dag, options, rate, on_progress)
    slowest = max(search.least_cost_time(), fastest)
    fixed = {min(max(time, fastest), slowest) for time in (*times, *deadlines, fastest, slowest)}
    search.sweep(fixed, np.linspace(fastest, slowest, num_points).tolist()[1:-1])
    search.improve()
    return search.frontier()


def fastest_time(dag: InstructionDag, options: Sequence[OptionSet], deadlines: Sequence[float] = ()) -> float:
    """Longest path of the fastest options in seconds.

    Raises:
        PlanError: If a deadline is shorter.
    """
    fastest = dag.longest_path([opts.times[0] for opts in options])
    for deadline in deadlines:
        if not deadline >= fastest * (1 - _EQUAL_TIMES):
            raise PlanError(
                f"No plan is as fast as {deadline:g} s: a deadline must not be shorter than {fastest:.6f} s, the "
                "iteration time of the fastest plan."
            )
    return fastest


@dataclass(frozen=True, eq=False)
class _Target:
    """A time to find a good choice for.

    Attributes:
        relaxed: The relaxation at that time.
        floor: Shortest time that will do where the time need not be kept to; 0 where it must.
        limit: Longest time that will do.
    """

    relaxed: RelaxedSolution
    floor: float
    limit: float

    @property
    def is_fixed(self) -> bool:
        """Whether the time must be kept to."""
        return self.floor == 0.0


@dataclass(frozen=True)
class _Found:
    """A choice that was found."""

    time: float
    cost: float
    choice: tuple[int, ...]


class _Search:
    """The relaxations solved and the choices found so far."""

    def __init__(
        self, dag: InstructionDag, options: Sequence[OptionSet], rate: float, on_progress: Progress | None
    ) -> None:
        self._dag, self._options, self._rate, self._on_progress = dag, options, rate, on_progress
        self._relaxed = RelaxedTradeoff(dag, options)
        self._targets: list[_Target] = []
        self._tangents: list[tuple[float, float]] = []  # value at time 0, slope; the rate included
        self._pool: list[_Found] = []

    def least_cost_time(self) -> float:
        """Time of least total cost in the relaxation, in seconds."""
        return self._relaxed.solve_with_rate(self._rate).time

    def sweep(self, fixed: Set[float], free: Sequence[float]) -> None:
        """Relax and round at each target time, from slow to fast.

        Args:
            fixed: Times that must be kept to.
            free: Times that only say where choices are wanted; one near it will do.
        """
        all_fastest = [0] * self._dag.num_nodes
        fastest = self._add(all_fastest)  # so that there is a choice for every time
        self._add(spend_slack(self._dag, self._options, all_fastest, fastest.time))
        spacing = free[1] - free[0] if len(free) > 1 else math.inf
        for time in self._tracked("relaxing", sorted({*fixed, *free}, reverse=True)):
            relaxed = self._relax(time)
            self._add(round_to_options(self._dag, self._options, relaxed))
            reach = min(spacing / 2, _REACH * time)
            floor, limit = (0.0, time) if time in fixed else (time - reach, time + reach)
            self._targets.append(_Target(relaxed, floor, limit * (1 + _EQUAL_TIMES)))

    def improve(self) -> None:
        """Work on the targets with the largest gaps."""
        if not self._unsatisfied():
            return
        for kink in self._tracked("relaxing kinks", self._kinks()):
            self._add(round_to_options(self._dag, self._options, self._relax(kink)))
        most = max(_IMPROVED_NODES // self._dag.num_nodes, 1)
        for activity, improve in (
            ("splicing", self._splice_at),
            ("searching", self._search_at),
            ("splicing", self._splice_at),
        ):
            for target in self._tracked(activity, self._unsatisfied()[:most]):
                improve(target)

    def frontier(self) -> list[TradeoffPoint]:
        """The best choice for each target, without those that another dominates, fast to slow."""
        chosen = sorted({self._best(target) for target in self._targets}, key=lambda found: (found.time, found.cost))
        for found in chosen:
            if self._gap(found) > _LARGEST_GAP:
                self._relax(found.time)  # a tangent right there is the tightest bound
        points: list[TradeoffPoint] = []
        for found in chosen:
            if not points or found.cost < points[-1].cost:
                # Solver tolerance may put the bound of a perfect choice a hair above the choice itself.
                bound = min(self._bound(found.time), found.cost)
                points.append(TradeoffPoint(found.time, found.cost, bound, found.choice))
        return points

    def _tracked(self, activity: str, items: Sequence[T]) -> Iterator[T]:
        """The items one by one, with a progress report after each."""
        for done, item in enumerate(items, 1):
            yield item
            if self._on_progress is not None:
                self._on_progress(activity, done, len(items))

    def _relax(self, time: float) -> RelaxedSolution:
        relaxed = self._relaxed.solve(time)
        self._tangents.append((relaxed.cost - relaxed.slope * relaxed.time, relaxed.slope + self._rate))
        return relaxed

    def _bound(self, time: float) -> float:
        return max([value + slope * time for value, slope in self._tangents])

    def _gap(self, found: _Found) -> float:
        bound = self._bound(found.time)
        return (found.cost - bound) / max(abs(bound), _TINY)

    def _add(self, choice: Sequence[int]) -> _Found:
        time = self._dag.longest_path(chosen_times(self._options, choice))
        found = _Found(time, total_cost(self._options, choice) + self._rate * time, tuple(choice))
        self._pool.append(found)
        return found

    def _best(self, target: _Target) -> _Found:
        """For a time to keep to, the cheapest choice; otherwise the choice of least gap in reach, if there is one."""
        within = [found for found in self._pool if found.time <= target.limit]
        near = [found for found in within if found.time >= target.floor]
        if near and not target.is_fixed:
            return min(near, key=self._gap)
        return min(within, key=lambda found: (found.cost, found.time))

    def _unsatisfied(self) -> list[_Target]:
        """Targets to work on: those of the largest gaps, worst first."""
        gaps = []
        for target in self._targets:
            best = self._best(target)
            bound = self._bound(target.relaxed.time if target.is_fixed else best.time)
            gaps.append((best.cost - bound) / max(abs(bound), _TINY))
        threshold = _LARGEST_GAP if median(gaps) <= _MEDIAN_GAP else _MEDIAN_GAP
        ranked = sorted(zip(gaps, self._targets, strict=True), key=lambda pair: -pair[0])
        return [target for gap, target in ranked if gap > (_MEDIAN_GAP if target.is_fixed else threshold)]

    def _kinks(self) -> list[float]:
        """Times where neighbouring tangents meet far below the line between their points."""
        kinks = []
        for slow, fast in pairwise(target.relaxed for target in self._targets):
            bend = slow.slope - fast.slope
            if bend * (slow.time - fast.time) > _DEEP_KINK * abs(self._bound(slow.time)):
                time = (fast.cost - fast.slope * fast.time - slow.cost + slow.slope * slow.time) / bend
                if fast.time < time < slow.time:
                    kinks.append(time)
        return kinks

    def _splice_at(self, target: _Target) -> None:
        """Join the pairs whose connecting line is lowest at the target."""
        time = target.relaxed.time
        faster = [found for found in self._pool if found.time <= time * (1 + _EQUAL_TIMES)]
        slower = [found for found in self._pool if found.time > time * (1 + _EQUAL_TIMES)]
        if not slower:
            return
        (fast_time, fast_cost), (slow_time, slow_cost) = (
            np.array([(found.time, found.cost) for found in side]).T for side in (faster, slower)
        )
        share = (time - fast_time)[:, None] / np.subtract.outer(-fast_time, -slow_time)
        height = (1 - share) * fast_cost[:, None] + share * slow_cost
        order = np.argsort(target.relaxed.starts, kind="stable").tolist()
        for pair in np.argsort(height, axis=None)[:_SPLICED_PAIRS].tolist():
            fast, slow = faster[pair // len(slower)], slower[pair % len(slower)]
            self._add(splice(self._dag, self._options, slow.choice, fast.choice, time, order))

    def _search_at(self, target: _Target) -> None:
        """Beam search near the target; where it must be kept to, also with a deadline and aiming lower."""
        time, fastest = target.relaxed.time, self._targets[-1].relaxed.time
        found = self._search_beam(target.relaxed, max_time=math.inf, spend_until=time)
        if not target.is_fixed:
            return
        self._search_beam(target.relaxed, max_time=time, spend_until=time)
        aim = time
        for _ in range(_BEAM_TRIES):
            aim -= 1.1 * (found.time - time)
            if found.time <= target.limit or aim <= fastest:
                return
            found = self._search_beam(self._relax(aim), max_time=math.inf, spend_until=time)

    def _search_beam(self, relaxed: RelaxedSolution, *, max_time: float, spend_until: float) -> _Found:
        choice = search_beam(self._dag, self._options, relaxed, max_time)
        time = self._dag.longest_path(chosen_times(self._options, choice))
        return self._add(spend_slack(self._dag, self._options, choice, max(time, spend_until)))
