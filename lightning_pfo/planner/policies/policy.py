"""What a policy is, and the kind of policy whose plans can be listed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.planner.pipeline.problem import Problem, Rows
from lightning_pfo.planner.pipeline.timeline import Simulator
from lightning_pfo.planner.profile.switch_latency import SwitchLatency

_EQUAL_TIMES = 1e-9


class Policy(Protocol):
    """A rule that gives every instruction of an iteration a clock."""

    def __call__(self, problem: Problem, deadline_s: float | None = None) -> Rows:
        """Choose the clocks.

        Args:
            problem: The pipeline.
            deadline_s: Iteration time in seconds to keep to where the policy can; None leaves it to the policy.

        Returns:
            Clock of each instruction in MHz, one row per rank in execution order.
        """
        ...


class ListedPolicy(ABC):
    """A policy that has some plans and chooses one of them.

    With a deadline it is the plan of least energy that keeps to it, or else the fastest.
    """

    reacts: ClassVar[bool] = False
    """Whether the system takes another of its plans beside a straggler."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is called in files, tables and pictures."""

    @abstractmethod
    def rows(self, problem: Problem, num_plans: int) -> Sequence[Rows]:
        """The clocks of its plans, at least one, in any order.

        Args:
            problem: The pipeline.
            num_plans: About so many, where it could make any number.
        """

    def slower_rows(self, problem: Problem, num_plans: int) -> Sequence[Rows]:
        """The clocks of plans that only pay beside a straggler, if it has some: slower than that of least energy.

        Args:
            problem: The pipeline.
            num_plans: About so many.
        """
        return ()

    def check_schedule(self, name: str) -> None:  # noqa: B027 (most policies suit all)
        """Check that the policy can be had under a schedule of this name.

        Raises:
            ConfigurationError: If it cannot.
        """

    def problem_for(self, problem: Problem) -> Problem:
        """The pipeline under the order of instructions that the policy takes: the one it was given."""
        return problem

    def choose(self, problem: Problem, plans: Sequence[FrequencyPlan]) -> FrequencyPlan:
        """The one it takes when nobody says anything: the fastest, of equals the one of least energy."""
        return min(plans, key=lambda plan: (plan.iteration_time_s, plan.iteration_energy_j))

    def plans(self, problem: Problem, num_plans: int = 50, latency: float | SwitchLatency = 0.0) -> list[FrequencyPlan]:
        """Its plans with their iteration times and energies, in the order of `rows`.

        Args:
            problem: The pipeline.
            num_plans: About so many, where it could make any number.
            latency: What clock changes take: the policy does not reckon with it, but suffers it.
        """
        return played(problem, self.rows(problem, num_plans), latency)

    def __call__(self, problem: Problem, deadline_s: float | None = None) -> Rows:
        """Choose the clocks; see `Policy`."""
        plans = self.plans(problem)
        if deadline_s is None:
            return self.choose(problem, plans).clocks_mhz
        within = [plan for plan in plans if plan.iteration_time_s <= deadline_s * (1 + _EQUAL_TIMES)]
        if not within:
            return min(plans, key=lambda plan: plan.iteration_time_s).clocks_mhz
        return min(within, key=lambda plan: plan.iteration_energy_j).clocks_mhz


def played(problem: Problem, every: Sequence[Rows], latency: float | SwitchLatency = 0.0) -> list[FrequencyPlan]:
    """Plans of these clocks, each once, with the times and energies that the profile predicts.

    Args:
        problem: The pipeline.
        every: The clocks of each plan.
        latency: What clock changes take.
    """
    simulator = Simulator(problem.profile, problem.schedule, problem.blocking, latency)
    timelines = {rows: simulator.play(rows) for rows in dict.fromkeys(every)}
    return [
        FrequencyPlan(problem.schedule, rows, timeline.iteration_time_s, timeline.iteration_energy_j)
        for rows, timeline in timelines.items()
    ]
