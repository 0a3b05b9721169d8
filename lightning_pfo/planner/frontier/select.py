"""Choosing a plan of a frontier by a short expression.

===============  =========================================================================
`3`              plan number 3 (as in frontier.csv: 0 is the slowest, larger is faster)
`fastest`        the plan of least iteration time
`no_slowdown`    the least energy at the top clocks' iteration time; the same as `1.0x`
`1.02x`          the least energy at up to 1.02 times the top clocks' iteration time
`2.84s`          the least energy at an iteration time of up to 2.84 s
`least_energy`   the plan of least iteration energy
`own`            what the policy that made the plans takes itself; the planner's own: `no_slowdown`
`least_edp`      the plan of least energy-delay product (iteration energy x iteration time), the fastest of equals
`350W`           the fastest plan whose GPUs take at most 350 W each on average
`T'=2.9s`        the least energy beside a straggler: a replica whose iteration takes 2.9 s
===============  =========================================================================

All replicas of a data-parallel job wait for the slowest. Beside a straggler with iteration time T' the cheapest plan is
therefore the slowest that is not slower than T', up to the one of least energy; and beyond, as waiting until T' is paid
for anyway, the slowest of `Frontier.straggler_plans`, if such were planned. `T'=1.1x` is meant relative to the top
clocks, and `straggler=2.9s` is the same as `T'=2.9s` where a quote is awkward to type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from lightning_pfo.core.errors import PlanError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.ranges import Quantity
from lightning_pfo.core.wording import rounded_up, shortened
from lightning_pfo.planner.frontier.data import Frontier

_INDEX = re.compile(r"[0-9]+")
_MEASURE = re.compile(r"([0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([xsW])")
_STRAGGLER = re.compile(r"^(?:T['\u2019\u2032]|straggler)\s*=\s*(?=.*[xs]$)")
_NUMBER = Quantity("a plan number", "", 0, 10**9, is_whole=True)
_LONGEST = 64  # characters; what is longer is no selection, and would take its time
_NAMES = ("fastest", "no_slowdown", "least_energy", "own", "least_edp")
_EQUAL_TIMES = 1e-9
_FASTEST_TIMES = 1e-8
"""The planner takes times 1e-9 apart for equal, in several steps: its fastest plan may be later by a few such."""

FORMS = f"3, 1.02x, 2.84s, 350W, T'=2.9s, {', '.join(_NAMES[:-1])} or {_NAMES[-1]}"
"""The forms of a selection, for help texts."""


def check_selection(expression: str | int) -> None:
    """Check that `select_plan` understands an expression, before there is a frontier.

    Raises:
        PlanError: If it does not.
    """
    text = _without_straggler(expression)
    if text not in _NAMES and not _INDEX.fullmatch(text) and not _MEASURE.fullmatch(text):
        raise PlanError(
            f"Cannot select a plan by {shortened(text or expression)}. Use a plan number (3), a slowdown (1.02x), an "
            f"iteration time (2.84s), an average power per GPU (350W), a straggler's iteration time (T'=2.9s), "
            f"{', '.join(_NAMES[:-1])} or {_NAMES[-1]}."
        )


def select_plan(frontier: Frontier, expression: str | int) -> FrequencyPlan:
    """Choose a plan.

    Args:
        frontier: Where to choose from.
        expression: One of the forms in the module docstring.

    Raises:
        PlanError: If the expression is not understood, or no plan of the frontier meets it.
    """
    check_selection(expression)
    text = _without_straggler(expression)
    plans = (*frontier.plans, *frontier.straggler_plans) if asks_for_straggler(expression) else frontier.plans
    if text == "fastest":
        return frontier.fastest
    if text == "least_energy":
        return frontier.least_energy
    if text == "least_edp":
        return min(frontier.plans, key=lambda plan: plan.iteration_energy_j * plan.iteration_time_s)  # first of equals
    if text == "own" and frontier.own_choice is not None:
        return frontier.own_choice
    if text in ("no_slowdown", "own"):
        text = "1.0x"
    if _INDEX.fullmatch(text):
        return _by_number(frontier, int(text))
    deadline_s = selected_time(text, frontier.baseline.iteration_time_s)
    if deadline_s is None:
        return _within_power(frontier, float(text.removesuffix("W")))
    return _within(frontier, plans, deadline_s, text)


def selected_time(expression: str | int, top_s: float) -> float | None:
    """The iteration time in seconds that a selection asks for; None where it asks for something else.

    Args:
        expression: A selection.
        top_s: Iteration time of the top clocks.
    """
    match = _MEASURE.fullmatch(_without_straggler(expression))
    if match is None or match[2] == "W":
        return None
    return float(match[1]) * (top_s if match[2] == "x" else 1.0)


def asks_for_straggler(expression: str | int) -> bool:
    """Whether a selection is `T'=...` or `straggler=...`, so that straggler plans are of use."""
    return isinstance(expression, str) and _STRAGGLER.match(expression.strip()) is not None


def _without_straggler(expression: str | int) -> str:
    """What a straggler asks for is a deadline: whoever waits for it anyway may be as slow. Empty for no selection."""
    if _NUMBER.allows(expression):
        return str(int(expression))
    if not isinstance(expression, str) or len(expression) > _LONGEST:
        return ""
    return _STRAGGLER.sub("", expression.strip(), count=1)


def _by_number(frontier: Frontier, number: int) -> FrequencyPlan:
    if number >= len(frontier.plans):
        raise PlanError(f"There is no plan {number}; plans are numbered 0 (slowest) to {len(frontier.plans) - 1}.")
    return frontier.plans[len(frontier.plans) - 1 - number]


def _within(frontier: Frontier, plans: Sequence[FrequencyPlan], deadline_s: float, text: str) -> FrequencyPlan:
    """The cheapest of these plans of at most `deadline_s`: the slowest, as none is dominated."""
    fitting = [plan for plan in plans if plan.iteration_time_s <= deadline_s * (1 + _EQUAL_TIMES)]
    if not fitting and frontier.fastest.iteration_time_s <= deadline_s * (1 + _FASTEST_TIMES):
        return frontier.fastest
    if not fitting:
        top_s = frontier.baseline.iteration_time_s
        ends_s = frontier.fastest.iteration_time_s, frontier.least_energy.iteration_time_s
        (fastest, slowest), (fastest_x, slowest_x) = _range(*ends_s), _range(*(time_s / top_s for time_s in ends_s))
        raise PlanError(
            f"No plan meets {text}: iteration times range from {fastest} s ({fastest_x}x) to {slowest} s ({slowest_x}x "
            f"of the top clocks' {top_s:.7g} s)."
        )
    return fitting[-1]


def _range(least: float, most: float) -> tuple[str, str]:
    """Both ends as text, the least not rounded down: whoever asks for what is printed gets it."""
    digits = max(6, 5 - math.floor(math.log10(least)))
    first = rounded_up(least, digits)
    return first, max(first, f"{most:.{digits}f}", key=float)


def _within_power(frontier: Frontier, power_w: float) -> FrequencyPlan:
    """The fastest plan of at most `power_w` per GPU; power falls along the frontier, as energy falls and time rises."""
    num_gpus = frontier.schedule.num_ranks * frontier.profile.gpus_per_stage
    powers_w = [plan.iteration_energy_j / plan.iteration_time_s / num_gpus for plan in frontier.plans]
    for plan, plan_power_w in zip(frontier.plans, powers_w, strict=True):
        if plan_power_w <= power_w * (1 + _EQUAL_TIMES):
            return plan
    least = rounded_up(powers_w[-1], 2)
    raise PlanError(
        f"No plan takes at most {power_w:g} W per GPU: average powers range from {least} W to {powers_w[0]:.2f} W. Ask "
        f"for {least} W or more."
    )
