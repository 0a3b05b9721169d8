"""Trials of a plan against the top clocks, one after the other, and what follows from each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lightning_pfo.core.events import InstructionSource
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.listeners.gpu_session import GpuSession
from lightning_pfo.listeners.optimizer.memory import Memory
from lightning_pfo.listeners.optimizer.settings import OptimizerSettings
from lightning_pfo.listeners.optimizer.verifying.checking import Checking
from lightning_pfo.listeners.planned_run import PlannedRun
from lightning_pfo.planner.adaptive.verification import Verified, faster_by, lateness_s
from lightning_pfo.planner.adaptive.windows import Windows
from lightning_pfo.planner.frontier.data import Frontier

_MOST_FALLBACKS = 3
_FEWEST_TICKS = 50
"""Of an energy counter in a window: with fewer, what is missed between ticks is more than what is to be seen."""
_MOST_STEPS = 40


def window_steps(settings: OptimizerSettings, tick_s: float, iteration_s: float) -> int:
    """Iterations of a window: longer where energy counters tick.

    Args:
        settings: How long it is at least.
        tick_s: How often energy counters advance; 0: all the time.
        iteration_s: What an iteration takes.
    """
    wanted = settings.warmup_steps + math.ceil(_FEWEST_TICKS * tick_s / iteration_s)
    return max(settings.window_steps, min(wanted, _MOST_STEPS))


@dataclass(frozen=True)
class Outcome:
    """What a trial has shown.

    Attributes:
        found: What its windows say; None where none was measured.
        changed: Stages that are not as they were when their clocks were measured.
    """

    found: Verified | None
    changed: tuple[int, ...]


class Trial:
    """Some pairs of windows under a plan and at the top clocks, as often as they are begun.

    Args:
        source: The pipeline rank.
        session: Its GPU.
        run: Measures iterations.
        settings: How windows are divided, and how late a plan may be.

    Attributes:
        verified: What the windows of all trials of the plan tried last have shown; None until the first is over.
    """

    def __init__(
        self, source: InstructionSource, session: GpuSession, run: PlannedRun, settings: OptimizerSettings
    ) -> None:
        self._source, self._session, self._run, self._settings = source, session, run, settings
        self._checking: Checking | None = None
        self._plan: FrequencyPlan | None = None
        self._verified_plan: FrequencyPlan | None = None
        self.verified: Verified | None = None
        self._num_fallbacks, self._late_s = 0, 0.0

    @property
    def is_under_way(self) -> bool:
        """Whether there are windows still to come."""
        return self._checking is not None

    def begin(
        self, plan: FrequencyPlan, pairs: int, first: int, memory: Memory, schedule: PipelineSchedule, top_mhz: int
    ) -> None:
        """Begin with windows.

        Args:
            plan: What is tried.
            pairs: How many.
            first: Number of the first iteration.
            memory: What was measured before at the top clock, which is compared.
            schedule: What is executed.
            top_mhz: The top clock.
        """
        tops = {
            (row.stage, row.instruction): row
            for row in memory.rows
            if row.frequency == top_mhz
            and row.stage in self._source.stages
            and (row.dp_rank, row.tp_rank) == self._source.place
        }
        self._plan = plan
        steps = window_steps(self._settings, self._run.tick_s(), plan.iteration_time_s)
        windows = Windows(pairs, steps, self._settings.warmup_steps)
        self._checking = Checking(self._source, self._session, schedule, windows, first, tops)

    def is_under_plan(self, iteration: int) -> bool:
        """Which clocks an iteration has: those of the plan, also where nothing is tried."""
        return self._checking is None or self._checking.is_under_plan(iteration)

    def after(self, iteration: int, measured: int) -> Outcome | None:
        """What was found, when the windows are over; a collective call then.

        Args:
            iteration: The one that has ended.
            measured: Number of the one that was measured last.
        """
        assert self._checking is not None
        self._checking.after(iteration)
        if not self._checking.is_over(measured):
            return None
        outcome = Outcome(self._checking.found(self._run), self._checking.changed_stages())
        self.stop()
        if outcome.found is not None:
            before = self.verified if self._verified_plan is self._plan else None
            self.verified = outcome.found if before is None else before.and_more(outcome.found)
            self._verified_plan = self._plan
        return outcome

    def forget(self) -> None:
        """Begin anew with plans from new measurements: nothing is known to be late."""
        self.stop()
        self._num_fallbacks, self._late_s = 0, 0.0

    def in_time(self, frontier: Frontier, plan: FrequencyPlan) -> FrequencyPlan:
        """The plan to take where another is wanted: faster by as much as plans were late."""
        return faster_by(frontier, plan, self._late_s)

    def instead(self, frontier: Frontier, say: Callable[[str], None]) -> FrequencyPlan | None:
        """The plan to take instead of one that is late, or saves nothing; None where it keeps what it promises.

        Args:
            frontier: The plans.
            say: Is told why.
        """
        plan, found = self._plan, self.verified
        if plan is None or found is None or plan is not self._verified_plan or plan is frontier.baseline:
            return None
        wanted_s, top_s = plan.iteration_time_s + self._late_s, frontier.baseline.iteration_time_s
        late_s = lateness_s(frontier, wanted_s, found, self._settings.tolerance)
        if found.saving_percent <= 0:
            faster = frontier.baseline
            say(f"the plan saves nothing ({found.saving_percent:.2f} %), so the top clocks are taken again.")
        elif late_s:
            self._num_fallbacks += 1
            faster = faster_by(frontier, plan, late_s if self._num_fallbacks <= _MOST_FALLBACKS else math.inf)
            say(
                f"the plan takes {found.slowdown_percent:+.2f} % time, of which {100 * (wanted_s / top_s - 1):+.2f} % "
                f"were wanted, so one that promises {100 * (faster.iteration_time_s / top_s - 1):+.2f} % is taken: "
                f"{faster.iteration_time_s:.4g} s and {faster.iteration_energy_j:.5g} J."
            )
        else:
            return None
        for_good = faster is frontier.baseline
        self._late_s = math.inf if for_good else self._late_s + plan.iteration_time_s - faster.iteration_time_s
        return faster

    def stop(self) -> None:
        """Break off what is under way."""
        if self._checking is not None:
            self._checking.close()
            self._checking = None
