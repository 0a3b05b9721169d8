"""What the optimizer can be told."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.ranges import check_between
from lightning_pfo.listeners.optimizer.choosing.objectives import Objective, objective_of
from lightning_pfo.planner.frontier.data import OURS
from lightning_pfo.planner.settings import PlanSettings


@dataclass(frozen=True)
class OptimizerSettings:
    """How one run optimises itself.

    Attributes:
        select: Which plan of the frontier is wanted: as `select_plan` takes it, or an `Objective`. Its own slowdown,
            such as 2 % for `1.02x`, is expected; `tolerance` is what may come on top of it.
        tolerance: How much slower than planned a plan may be measured, as a share of the top clocks' time, before a
            faster one is taken: 0.005 is 0.5 %.
        measuring_slowdown: How much slower iterations may be on average while clocks are measured: 0.05 is 5 %.
        min_clock_mhz: Do not measure below this clock, MHz; None: `scan_min_mhz` of the GPU's configuration, else as
            far as needed.
        target_error: Where the energy counter ticks, a clock is measured again until two standard errors of each energy
            are below this share of it.
        most_repetitions: So many iterations at a clock at most.
        most_rounds: So often at most it is decided to measure more.
        pairs: Pairs of windows that verify a plan, at least; six give 95 % intervals.
        window_steps: Iterations of each window, at least: where energy counters tick, more.
        warmup_steps: The first of them, which are not measured.
        check_every: After so many iterations under the plan two more pairs of windows are measured; 0: never.
        look_every: Iterations under a plan after which the ranks compare what they have met: stragglers, objectives,
            failures.
        num_iterations: Iterations of the whole training, which say what measuring more is worth; None: not known.
        planning: How to plan.
    """

    select: str | Objective = "no_slowdown"
    tolerance: float = 0.005
    measuring_slowdown: float = 0.05
    min_clock_mhz: int | None = None
    target_error: float = 0.02
    most_repetitions: int = 8
    most_rounds: int = 6
    pairs: int = 6
    window_steps: int = 2
    warmup_steps: int = 1
    check_every: int = 400
    look_every: int = 10
    num_iterations: int | None = None
    planning: PlanSettings = field(default_factory=PlanSettings)

    def __post_init__(self) -> None:
        objective_of(self.select)
        self.planning.check()
        if self.planning.policy != OURS:
            raise ConfigurationError(
                "A run that optimises itself measures where the planner's own plans are most uncertain, so its policy "
                f"is {OURS}; got policy={self.planning.policy!r}. Profile and plan in steps for another one."
            )
        for name, value, least in (
            ("min_clock_mhz", self.min_clock_mhz, 1),
            ("most_repetitions", self.most_repetitions, 1),
            ("most_rounds", self.most_rounds, 1),
            ("pairs", self.pairs, 1),
            ("warmup_steps", self.warmup_steps, 0),
            ("window_steps", self.window_steps, self.warmup_steps + 1),
            ("check_every", self.check_every, 0),
            ("look_every", self.look_every, 1),
            ("num_iterations", self.num_iterations, 1),
        ):
            if value is not None:
                check_between(name, value, least)
        for name, share in (
            ("tolerance", self.tolerance),
            ("measuring_slowdown", self.measuring_slowdown),
            ("target_error", self.target_error),
        ):
            if not 0 < share < math.inf:
                raise ConfigurationError(f"{name} is a share above 0, such as 0.005 for 0.5 %; got {share}.")

    def changed(self, **changes: Any) -> OptimizerSettings:
        """The settings with some of them changed."""
        return replace(self, **changes)
