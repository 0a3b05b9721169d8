"""Perseus: plans of least energy on fitted curves, in whole units of time (Chung et al., SOSP 2024; lowtime 0.3.0).

::

    options of an instruction   Pareto-optimal times and effective energies
    curve                       a exp(-k t) + c through them
    durations                   whole units of time, 1 ms; a time is rounded down to them
    plan                        the durations of least total cost at a given iteration time
    clocks                      the slowest that is no longer than the duration, rounded down likewise

Lowtime goes from the slowest durations to the fastest by minimum cuts, a unit at a time (Phillips and Dessouky, 1977),
and has a plan for every unit. Each of these has the least cost of all on the curves, as the cuts may lengthen what was
shortened before; so a linear programme at the same time gives a plan of the same cost on the curves, without those in
between. Where several have it, clocks may differ. Between whole units the curves are replaced by lines, so that the
programme's corners are whole units too.

What the plans take and cost is then computed from the profile, not from the curves. Rounding times down is optimistic:
plans take up to a unit per instruction longer than was planned, and are not quite on a frontier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.ranges import TIME
from lightning_pfo.core.wording import shortened
from lightning_pfo.planner.network.arrays import Integers
from lightning_pfo.planner.network.options import OptionSet, make_option_set, pareto_front
from lightning_pfo.planner.pipeline.problem import Problem, Rows
from lightning_pfo.planner.policies.exponential import fit_exponential
from lightning_pfo.planner.policies.policy import ListedPolicy
from lightning_pfo.planner.relaxation.linear_programme import RelaxedTradeoff

UNIT_S = 0.001
_FEWEST_UNITS = 50
"""The unit is finer where the shortest instruction would have fewer: a millisecond suits those of large models."""

_FINE = 6
"""Whole units on either side of a duration that the programme sees one by one; farther off it sees few."""

_MOST_ROUNDS = 8


@dataclass(frozen=True)
class Perseus(ListedPolicy):
    """Lowtime's plans; its own choice is the fastest, which removes intrinsic bloat.

    Attributes:
        unit_s: Unit of time in seconds; None takes a millisecond, or less where instructions are short.
        keeps_raw: Which options are taken for Pareto-optimal: those of least energy, as in the artifact of the paper,
            instead of those of least effective energy, as in Zeus.
    """

    reacts: ClassVar[bool] = True
    unit_s: float | None = None
    keeps_raw: bool = False

    def __post_init__(self) -> None:
        if self.unit_s is not None and not TIME.allows(self.unit_s):
            raise ConfigurationError(f"unit_s is {TIME}, such as 0.001, or None; got {shortened(self.unit_s)}.")

    @property
    def name(self) -> str:
        """`perseus`."""
        return "perseus"

    def rows(self, problem: Problem, num_plans: int) -> Sequence[Rows]:
        """Plans at about equal distances of iteration time, from the fastest to the slowest that saves energy."""
        curves = self._curves(problem)
        around, slowest_s = _least_energy(problem, curves)
        fastest_s = problem.network.longest_path([curve.fastest * curve.unit_s for curve in curves])
        return _trace(problem, curves, around, (fastest_s, slowest_s), num_plans)

    def slower_rows(self, problem: Problem, num_plans: int) -> Sequence[Rows]:
        """The same from there to the slowest durations, where lowtime begins."""
        curves = self._curves(problem)
        _, begin_s = _least_energy(problem, curves)
        around = np.array([curve.slowest for curve in curves])
        slowest_s = problem.network.longest_path((around * curves[0].unit_s).tolist())
        return _trace(problem, curves, around, (begin_s, slowest_s), num_plans)

    def _curves(self, problem: Problem) -> list[_UnitCurve]:
        """The curve of each instruction; equal kinds share one."""
        kinds = list(zip(problem.schedule.instructions, problem.options, strict=True))
        chosen = {options: self._options(problem, inst.stage, inst.type, options) for inst, options in kinds}
        shortest_s = min(options.times[0] for options in chosen.values())
        unit_s = self.unit_s or min(UNIT_S, shortest_s / _FEWEST_UNITS)
        of_kind = {options: _UnitCurve(some, unit_s) for options, some in chosen.items()}
        return [of_kind[options] for options in problem.options]

    def _options(self, problem: Problem, stage: int, kind: InstructionType, options: OptionSet) -> OptionSet:
        if not self.keeps_raw:
            return options
        measured = problem.profile.of(stage, kind)
        kept = {measured.clocks_mhz[row] for row in pareto_front(measured.times_s, measured.energies_j).tolist()}
        some = [k for k, clock in enumerate(options.knobs) if clock in kept]
        times, costs = ([values[k] for k in some] for values in (options.times, options.costs))
        return make_option_set(times, costs, [options.knobs[k] for k in some])


class _UnitCurve:
    """One kind of instruction in whole units of time.

    Args:
        options: Its Pareto-optimal options.
        unit_s: The unit.
    """

    def __init__(self, options: OptionSet, unit_s: float) -> None:
        self.unit_s = unit_s
        # Of options of as many units the fastest is kept.
        self._units, kept = np.unique(np.floor(np.array(options.times) / unit_s).astype(np.int64), return_index=True)
        self._knobs = [options.knobs[k] for k in kept.tolist()]
        self._curve = fit_exponential([options.times[k] for k in kept], [options.costs[k] for k in kept])
        self.fastest, self.slowest = int(self._units[0]), int(self._units[-1])
        self._around: dict[int, OptionSet] = {}

    def clock_of(self, units: int) -> int:
        """The slowest clock whose time, rounded down, is no longer."""
        knob: int = self._knobs[int(np.searchsorted(self._units, units, side="right")) - 1]
        return knob

    def options_around(self, duration: int) -> OptionSet:
        """Durations and costs for the programme: every unit near a duration, and some of the others."""
        if duration not in self._around:
            spread = np.linspace(self.fastest, self.slowest, _FINE).round().astype(np.int64)
            near = np.arange(duration - _FINE, duration + _FINE + 1)
            units = np.unique(np.concatenate([spread, near.clip(self.fastest, self.slowest)]))
            times = units * self.unit_s
            self._around[duration] = make_option_set(times.tolist(), self._curve.at(times).tolist(), units.tolist())
        return self._around[duration]

    def sees(self, duration: int, around: int) -> bool:
        """Whether a duration that the programme found would be the same if it saw every unit."""
        return abs(duration - around) < _FINE or duration in (self.fastest, self.slowest)


def _least_energy(problem: Problem, curves: Sequence[_UnitCurve]) -> tuple[Integers, float]:
    """The durations of least energy, where every second costs the blocking power, and their iteration time (s)."""
    around = np.array([(curve.fastest + curve.slowest) // 2 for curve in curves])
    return _optimum(problem, curves, around, None)


def _trace(
    problem: Problem, curves: Sequence[_UnitCurve], around: Integers, ends_s: tuple[float, float], num_plans: int
) -> list[Rows]:
    """The clocks at about so many iteration times, from the slowest, near which the durations `around` are."""
    (fastest_s, slowest_s), unit_s = ends_s, curves[0].unit_s
    most_units = max(int((slowest_s - fastest_s) / unit_s), 0)
    found = []
    for extra in np.unique(np.linspace(0, most_units, num_plans).round().astype(np.int64))[::-1].tolist():
        around, _ = _optimum(problem, curves, around, fastest_s + extra * unit_s)
        pairs = zip(curves, around.tolist(), strict=True)
        found.append(problem.schedule.by_rank([curve.clock_of(units) for curve, units in pairs]))
    return found


def _optimum(
    problem: Problem, curves: Sequence[_UnitCurve], around: Integers, time_s: float | None
) -> tuple[Integers, float]:
    """The durations of least cost at an iteration time, or at the one of least energy, and that time in seconds."""
    for _ in range(_MOST_ROUNDS):
        options = [curve.options_around(duration) for curve, duration in zip(curves, around.tolist(), strict=True)]
        programme = RelaxedTradeoff(problem.network, options)
        solution = programme.solve_with_rate(problem.power_w) if time_s is None else programme.solve(time_s)
        # Corners are whole units but for rounding, or for transfers that take parts of one.
        durations = np.floor(solution.durations / curves[0].unit_s + 1e-3).astype(np.int64)
        pairs = zip(curves, durations.tolist(), around.tolist(), strict=True)
        around, is_seen = durations, all(curve.sees(found, guess) for curve, found, guess in pairs)
        if is_seen:
            break
    return around, solution.time
