"""The picture of a comparison: saving over slowdown of every policy, the planner's own plans, and the bound."""

from __future__ import annotations

import os
from collections.abc import Iterator

from lightning_pfo.core.frequency_plan import FrequencyPlan, saving_percent
from lightning_pfo.core.wording import pipeline_size
from lightning_pfo.pictures.style import BOUND, GRID, INK, PLAN, TOP_CLOCKS, drawable, new_figure, save_figure, tidy
from lightning_pfo.planner.comparison import Comparison
from lightning_pfo.planner.frontier.data import OURS
from lightning_pfo.planner.policies.envpipe import EARLY

_COLOURS = {"max": TOP_CLOCKS, "envpipe": "#3f8f5b", "zeus": "#8457a8", "perseus": "#d9822b", OURS: PLAN}
_MARKERS = "osD^vP<>hpd"
_FEWEST_OF_A_LINE = 3
_ROOM = 1.15
"""The axes go so much farther than the slowest choice."""


def draw_comparison(comparison: Comparison, path: str | os.PathLike[str]) -> None:
    """Draw all policies on one set of axes.

    Args:
        comparison: What to draw.
        path: Picture file to write.
    """
    figure = new_figure(10.0, 5.6)
    axes = figure.add_subplot()
    baseline = comparison.policies[OURS].baseline

    def place(plan: FrequencyPlan, energy_j: float | None = None) -> tuple[float, float]:
        energy_j = plan.iteration_energy_j if energy_j is None else energy_j
        slowdown = 100 * (plan.iteration_time_s / baseline.iteration_time_s - 1)
        return slowdown, saving_percent(energy_j, baseline.iteration_energy_j)

    policies, asked_for = list(comparison.policies.values()), comparison.frontier.schedule
    bounds = sorted(
        [
            *(place(plan, plan.lower_bound_j) for plan in comparison.frontier.plans if plan.lower_bound_j),
            *(place(one.plan, one.lower_bound_j) for one in policies if one.plan.schedule == asked_for),
        ]
    )
    chosen = [place(policy.plan) for policy in policies]
    left = min(slowdown for slowdown, _ in (*chosen, *bounds))
    right = max(_ROOM * max(slowdown for slowdown, _ in chosen), 1.0)
    label = "proven: nobody saves more in this order"
    axes.plot(*zip(*bounds, strict=True), color=BOUND, linewidth=1.2, zorder=1, label=label)
    for (name, policy), (marker, colour) in zip(comparison.policies.items(), _styles(comparison), strict=True):
        if len(policy.plans) >= _FEWEST_OF_A_LINE:
            line = zip(*(place(plan) for plan in policy.plans), strict=True)
            style = "--" if name.endswith(EARLY) else "-"
            axes.plot(*line, color=colour, linewidth=1, linestyle=style, zorder=2, alpha=0.7)
        slowdown, saving = place(policy.plan)
        is_ours = name.startswith(OURS)
        axes.plot(
            [slowdown], [saving], color=colour, marker="*" if is_ours else marker, markersize=16 if is_ours else 8,
            markeredgecolor=INK, markeredgewidth=0.6, linestyle="none", zorder=5 if is_ours else 4,
            label=f"{drawable(name, 50)}  {saving:.1f} % at {round(slowdown, 1) + 0.0:+.1f} %",
        )  # fmt: skip
    drawn = (place(plan) for policy in policies for plan in policy.plans)
    highest = max(saving for slowdown, saving in (*chosen, *bounds, *drawn) if slowdown <= right)
    lowest = min(0.0, *(saving for _, saving in chosen))
    axes.set_xlim(left - 0.04 * (right - left), right)
    axes.set_ylim(lowest - 0.05 * (highest - lowest) - 0.1, highest + 0.06 * (highest - lowest) + 0.1)
    axes.set_xlabel("slowdown against the top clocks (%)", color=INK)
    axes.set_ylabel("energy saved (%)", color=INK)
    schedule, device = comparison.frontier.schedule, drawable(comparison.frontier.profile.device, 60)
    size = pipeline_size(schedule.num_stages, schedule.num_microbatches)
    title = f"{device}{device and ', '}{drawable(schedule.name, 20)}, {size}, predicted"
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    tidy(axes)
    figure.legend(frameon=False, loc="outside right upper", labelcolor=INK, fontsize=8)
    save_figure(figure, path)


def _styles(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Marker and colour of each policy: a colour for each system, a marker for each of its policies."""
    seen: dict[str, int] = {}
    for name in comparison.policies:
        family = next((family for family in _COLOURS if name.startswith(family)), "")
        seen[family] = seen.get(family, -1) + 1
        yield _MARKERS[seen[family] % len(_MARKERS)], _COLOURS.get(family, INK)
