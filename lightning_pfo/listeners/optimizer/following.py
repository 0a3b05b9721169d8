"""Which plan is followed while one is held: the objective's at the moment, slower beside a straggler."""

from __future__ import annotations

import logging
from dataclasses import replace

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.core.events import InstructionSource
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.listeners.agreement import is_first
from lightning_pfo.listeners.gpu_session import GpuSession
from lightning_pfo.listeners.optimizer.choosing.objectives import Moment, Objective
from lightning_pfo.listeners.optimizer.replicas import Replicas
from lightning_pfo.listeners.optimizer.verifying.trial import Trial
from lightning_pfo.planner.frontier.data import Frontier

log = logging.getLogger(__name__)


class Following:
    """Looks round: at the clock, the prices, the other replicas, and whether clocks can still be set.

    Args:
        source: The pipeline rank.
        session: Its GPU.
        objective: Which plan is wanted.
        trial: Knows by how much plans were late.

    Attributes:
        replicas: How long they are busy.
        plan: What all would follow but for stragglers; None while there is no plan.
        applied: What this replica follows.
    """

    def __init__(self, source: InstructionSource, session: GpuSession, objective: Objective, trial: Trial) -> None:
        self.replicas = Replicas(source)
        self.plan: FrequencyPlan | None = None
        self.applied: FrequencyPlan | None = None
        self._source, self._session, self._objective, self._trial = source, session, objective, trial

    def take(self, plan: FrequencyPlan | None) -> None:
        """Follow a plan from now on, on all replicas."""
        self.plan = self.applied = plan

    def look_round(self, frontier: Frontier, moment: Moment) -> list[str]:
        """Take the plan that is wanted now; says what has changed. A collective call.

        Raises:
            DeviceError: On all ranks, if one cannot set clocks any more.
        """
        assert self.plan is not None
        assert self.applied is not None
        wanted = self._wanted(frontier, moment) if is_first(self._source) else None
        error = self._session.clocks.error
        told = self._source.all_gather((wanted, error and str(error)), everywhere=True)
        failure = next((met for _, met in told if met), None)
        if failure is not None:
            raise DeviceError(failure)
        changes = []
        plans, wanted = (*frontier.plans, frontier.baseline), told[0][0]
        if wanted is not None and plans[wanted].iteration_time_s != self.plan.iteration_time_s:
            self.plan = plans[wanted]
            changes.append(f"the objective asks for a plan of {self.plan.iteration_time_s:.4g} s now.")
        of_replicas = self.replicas.wanted(frontier, self.plan, self.applied)
        if of_replicas is not None:
            self.applied = replace(of_replicas[self._source.place[0]])  # a new object everywhere: checked together
            changes.append(
                f"plans of {', '.join(f'{one.iteration_time_s:.4g} s' for one in of_replicas.values())} now."
            )
        return changes

    def _wanted(self, frontier: Frontier, moment: Moment) -> int | None:
        """Which plan the objective asks for, the baseline being the last; None where it does not say."""
        try:
            plan = self._trial.in_time(frontier, self._objective.plan_of(frontier, moment))
        except Exception as error:  # a price, say, comes from the user's own code
            log.warning("The objective does not say which plan it wants now, so the last one stays: %s", error)
            return None
        return next((n for n, one in enumerate((*frontier.plans, frontier.baseline)) if one is plan), None)
