"""What a plan can be told, for Python, the command line and Hydra alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.ranges import NUM_PLANS, check_whole, is_number, items
from lightning_pfo.core.wording import cut, did_you_mean, shortened
from lightning_pfo.planner.frontier.select import FORMS, check_selection
from lightning_pfo.planner.search.effort import find_effort


@dataclass
class PlanSettings:
    """How to plan; the schedule and the profile apart.

    A plain dataclass of plain types, as the command line and Hydra derive their schemas from it. `check` says whether
    the values can be used.

    Attributes:
        policy: Who chooses the clocks: `ours`, or the name of another system's policy (`policies.registry`), or one of
            your own (`policies.policy`); its plans are then the frontier.
        num_plans: Number of iteration times to plan for, at least 2; dominated plans are dropped.
        effort: How hard to search: `fast`, `default` or `best`; bounds the work, never the time, so that the same
            problem gets the same plans.
        deadlines_s: Further iteration times in seconds. Beyond the least-energy plan's time, that plan is the best, but
            beside a straggler.
        num_straggler_plans: Number of iteration times beyond the least-energy plan's to plan for besides: plans that
            only pay beside a straggler, which is waited for anyway (`Frontier.straggler_plans`).
        p2p_blocking_power_w: Power of a GPU in watts while it waits for a neighbour: one number, one for each clock in
            MHz, a list with one of these per stage, or the path of a file that `lightning-pfo p2p-power` wrote; None
            takes the profile's own measurements. Where it depends on the clock, long waits get a low clock.
        regularise: Take out of the profile what only noise explains (see `profile.denoise`).
        use_unreached: Plan on measurements flagged `clock_not_reached` too, instead of refusing them.
        switch_latency_s: Time from a request until a clock changes, to reckon with; None takes what the profile has
            measured, 0 takes clocks to change at once. With it or the next two, plans change clocks less often, and
            say how much energy that costs (see `limits`).
        least_dwell_s: Time for which a rank keeps every clock at least within an iteration.
        change_cost_j: What it is worth to save a change of clocks, in joules; not part of the energies of the plans.
        select: The plan that will be chosen (`frontier.select`): where it is one of an iteration time (`1.02x`,
            `2.84s`, `T'=2.9s`), that time is planned for; beside a straggler, straggler plans are made too.
    """

    policy: Any = field(
        default="ours",
        metadata={"help": "who chooses the clocks: ours, max_frequency, envpipe, zeus_global, perseus, ..."},
    )
    num_plans: int = field(default=50, metadata={"help": "iteration times to plan for"})
    effort: str = field(default="default", metadata={"help": "how hard to search: fast, default or best"})
    deadlines_s: list[float] = field(
        default_factory=list, metadata={"help": "further iteration times to plan for, e.g. [2.84,2.87]"}
    )
    num_straggler_plans: int = field(
        default=0,
        metadata={"help": "iteration times beyond the least-energy plan's to plan for, which pay beside a straggler"},
    )
    p2p_blocking_power_w: Any = field(
        default=None,
        metadata={
            "help": "power of a GPU while it waits, in watts: 85, or by clock {1410: 85, 705: 66}, or a list of "
            "these by stage, or the file of p2p-power json=true; none takes the profile's own",
            "is_path": True,
        },
    )
    regularise: bool = field(
        default=False, metadata={"help": "take out what only noise explains, instead of planning on the raw points"}
    )
    use_unreached: bool = field(
        default=False, metadata={"help": "plan on measurements whose clock was not reached, instead of refusing them"}
    )
    switch_latency_s: float | None = field(
        default=None,
        metadata={
            "help": "time from a clock request until the clock changes, to plan with; none takes what the profile has "
            "measured, 0 takes clocks to change at once"
        },
    )
    least_dwell_s: float = field(default=0.0, metadata={"help": "time for which every clock is kept at least"})
    change_cost_j: float = field(
        default=0.0, metadata={"help": "joules that one clock change less is worth; not part of the energies"}
    )
    select: str = field(default="no_slowdown", metadata={"help": f"plan that will be chosen: {FORMS}"})

    def check(self) -> None:
        """Check what can be checked before there is a profile.

        Raises:
            ConfigurationError: If a value is out of range.
            PlanError: If the selection is not understood.
        """
        check_selection(self.select)
        if not NUM_PLANS.allows(self.num_plans):
            raise ConfigurationError(
                f"num_plans must be at least {NUM_PLANS.least} (fastest and least energy) and at most "
                f"{NUM_PLANS.most:,}; got {shortened(self.num_plans)}."
            )
        check_whole("num_straggler_plans", self.num_straggler_plans, 0, int(NUM_PLANS.most))
        find_effort(self.effort)
        limits = self.switch_latency_s or 0.0, self.least_dwell_s, self.change_cost_j
        if not all(is_number(limit) and 0 <= limit < math.inf for limit in limits):
            raise ConfigurationError(
                "switch_latency_s, least_dwell_s (seconds) and change_cost_j (joules) must be finite and at least 0; "
                f"got {', '.join(map(shortened, limits[:2]))} and {shortened(limits[2])}. Changing a clock takes some "
                "milliseconds, e.g. switch_latency_s=0.01."
            )
        deadlines_s = items("deadlines_s", self.deadlines_s)
        # Which of them can be kept to is known when there is a fastest plan.
        are_times = all(is_number(time) and not 1e100 < abs(time) < math.inf for time in deadlines_s)
        if len(deadlines_s) > NUM_PLANS.most or not are_times:
            raise ConfigurationError(
                f"deadlines_s are at most {NUM_PLANS.most:,} iteration times in seconds, such as [2.84, 2.87]; got "
                f"{shortened(deadlines_s)}."
            )


def changed(settings: PlanSettings, changes: Mapping[str, Any]) -> PlanSettings:
    """The settings with some of them changed.

    Raises:
        ConfigurationError: If there is no such setting.
    """
    known = [entry.name for entry in fields(PlanSettings)]
    for name in changes:
        if name not in known:
            raise ConfigurationError(
                f"There is no setting {cut(name)!r} of a plan.{did_you_mean(name, known)} Known: {', '.join(known)}."
            )
    return replace(settings, **changes)
