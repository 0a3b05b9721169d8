"""A pipeline whose GPUs change clocks slowly: what its limits are, and how an iteration is played under them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner.limits.rank_programme import RankProgramme
from lightning_pfo.planner.limits.wait_clocks import play_with_wait_clocks
from lightning_pfo.planner.pipeline.problem import Problem
from lightning_pfo.planner.pipeline.timeline import Simulator, Timeline
from lightning_pfo.planner.profile.switch_latency import SwitchLatency

EQUAL_TIMES = 1e-9
"""Times that differ by less, relatively, are equal."""

_EQUAL_ENERGIES = 1e-6
"""Plans that differ by less, relative to the energy, are equal; the one with fewer changes is better."""

Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class LimitedPipeline:
    """What is planned for.

    Attributes:
        simulator: Plays iterations, clocks landing late.
        programmes: What each rank runs.
        least_dwell_s: Least time between two requests of a rank within the iteration.
        change_cost_j: What it is worth to save a change of clocks.
        paid_w: Power that is drawn until a straggler ends, however soon an iteration does: not a plan's fault.
    """

    simulator: Simulator
    programmes: tuple[RankProgramme, ...]
    least_dwell_s: float
    change_cost_j: float
    paid_w: float = 0.0

    @property
    def schedule(self) -> PipelineSchedule:
        """The order."""
        return self.simulator.schedule

    def play(self, rows: Rows) -> Timeline:
        """Lay out one iteration, with clocks for waits where they keep to the dwell."""
        timeline = play_with_wait_clocks(self.simulator, rows, least_dwell_s=self.least_dwell_s)
        if timeline.wait_clocks and not self.keeps_dwell(timeline):
            return self.simulator.play(rows)
        return timeline

    def keeps_dwell(self, timeline: Timeline) -> bool:
        """Whether every rank keeps each clock for the least dwell.

        What is asked for at the end of a rank's last instruction is for the next iteration. A clock that is left when
        the iteration begins was asked for in the one before, so the clock of a first wait takes its place.
        """
        for rank, requests in enumerate(timeline.requests):
            last_s = timeline.waits_of(rank)[-1][0]
            within = [time_s for time_s, _ in requests if time_s < last_s]
            if len(within) > 1 and within[1] == 0:
                del within[0]
            if any(after - before < self.least_dwell_s * (1 - EQUAL_TIMES) for before, after in pairwise(within)):
                return False
        return True

    def change_cost(self, timeline: Timeline) -> float:
        """What a change of clocks counts for in joules: a little in any case, to prefer few changes among equals."""
        return max(self.change_cost_j, _EQUAL_ENERGIES * timeline.iteration_energy_j)

    def own_energy(self, timeline: Timeline) -> float:
        """Energy in joules, less what is paid for anyway."""
        return timeline.iteration_energy_j - self.paid_w * timeline.iteration_time_s

    def score(self, timeline: Timeline) -> float:
        """That energy and changes of clocks in joules; less is better."""
        changes = sum(len(requests) - 1 for requests in timeline.requests)
        return self.own_energy(timeline) + self.change_cost(timeline) * changes


def make_limited_pipeline(
    problem: Problem,
    *,
    switch_latency: SwitchLatency,
    least_dwell_s: float,
    change_cost_j: float,
    paid_w: float = 0.0,
) -> LimitedPipeline:
    """Put together what is planned for; the options say which clocks of an instruction are worth looking at."""
    profile, schedule, blocking, options = problem.profile, problem.schedule, problem.blocking, problem.options
    programmes = []
    for rank, (order, power) in enumerate(zip(schedule.orders, blocking, strict=True)):
        kinds = list(dict.fromkeys((inst.stage, inst.type) for inst in order))
        measured = [profile.of(*kind) for kind in kinds]
        common = set.intersection(*(set(one.clocks_mhz) for one in measured))
        tops = {max(common)} if common else set()  # a rank that keeps it may always be planned
        tops.add(min(one.clocks_mhz[0] for one in measured))
        clocks = sorted(
            {knob for opts in set(options[schedule.span(rank)]) for knob in opts.knobs} | tops, reverse=True
        )
        costs = np.array([[one.near(clock) for clock in clocks] for one in measured])
        programmes.append(
            RankProgramme(
                clocks_mhz=tuple(clocks),
                kinds=tuple(kinds.index((inst.stage, inst.type)) for inst in order),
                times=costs[:, :, 0],
                energies=costs[:, :, 1],
                allowed=np.array([[clock in one.clocks_mhz for clock in clocks] for one in measured]),
                powers=np.array([power.at(clock) for clock in clocks]),
                least_power=power.least_w,
                latency=np.array([[switch_latency.of(old, new) for new in clocks] for old in clocks]),
                least_dwell=least_dwell_s,
            )
        )
    simulator = Simulator(profile, schedule, blocking, switch_latency)
    return LimitedPipeline(simulator, tuple(programmes), least_dwell_s, change_cost_j, paid_w)
