"""The picture of a frontier: energy over iteration time, with what is possible and what is not."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.wording import counted, pipeline_size
from lightning_pfo.pictures.style import (
    BOUND,
    CHOSEN,
    GRID,
    INK,
    MUTED,
    PLAN,
    TOP_CLOCKS,
    difference,
    drawable,
    new_figure,
    save_figure,
    tidy,
)
from lightning_pfo.planner.frontier.data import OURS, Frontier

_LEAST_SPAN = 2e-3
"""Of an axis, relative to its values."""


def draw_frontier(
    frontier: Frontier,
    path: str | os.PathLike[str],
    *,
    chosen: FrequencyPlan | None = None,
    measured: Sequence[tuple[float, float]] = (),
) -> None:
    """Draw the frontier, the proven bound, the top clocks' point and the chosen plan.

    Args:
        frontier: What to draw.
        path: Picture file to write.
        chosen: Plan to mark; the cheapest without slowdown is the usual choice.
        measured: Iteration times (s) and energies (J) measured in training, to compare with the predictions.
    """
    figure = new_figure(8.0, 5.0)
    axes = figure.add_subplot()
    times = [plan.iteration_time_s for plan in frontier.plans]
    energies = [plan.iteration_energy_j for plan in frontier.plans]
    top = frontier.baseline
    # The top clocks' time is among those of the planner's own plans; another policy may have a single plan.
    proven = frontier.plans if frontier.policy == OURS else sorted({top, *frontier.plans}, key=_time_of)
    bounds, bound_times = [plan.lower_bound_j for plan in proven], [plan.iteration_time_s for plan in proven]

    if frontier.policy == OURS:
        label = "proven lower bound: no plan is below"
        axes.plot(bound_times, bounds, color=BOUND, linewidth=1.2, zorder=2, label=label)
    else:  # a line from one to the next of few would cut what lies below it
        label = "proven: no plan as fast needs less"
        axes.plot(bound_times, bounds, color=BOUND, marker="_", markersize=14, linestyle="none", zorder=2, label=label)
    highest = max(top.iteration_energy_j, *energies, *(energy_j for _, energy_j in measured))
    lowest, highest = _widened(min(bounds), highest)
    floor = lowest - 0.06 * (highest - lowest)
    # What the chosen plan saves is written above it.
    is_high = chosen is not None and chosen.iteration_energy_j > highest - 0.12 * (highest - floor)
    ceiling = highest + (0.2 if is_high else 0.05) * (highest - floor)
    if frontier.policy == OURS:
        axes.fill_between(bound_times, bounds, floor, color=BOUND, alpha=0.15, linewidth=0, zorder=1)
    number = counted(len(times), "plan") + ("" if frontier.policy == OURS else f" of {drawable(frontier.policy, 40)}")
    axes.plot(times, energies, color=PLAN, marker="o", markersize=3.5, linewidth=1, zorder=3, label=number)
    if chosen in frontier.straggler_plans:
        beside = [frontier.least_energy, *frontier.straggler_plans]
        axes.plot(
            [plan.iteration_time_s for plan in beside], [plan.iteration_energy_j for plan in beside],
            color=PLAN, linewidth=1, linestyle=":", zorder=2, label="plans beside a straggler",
        )  # fmt: skip
    axes.plot(
        [top.iteration_time_s], [top.iteration_energy_j],
        color=TOP_CLOCKS, marker="X", markersize=10, linestyle="none", zorder=4, label="top clocks",
    )  # fmt: skip
    if chosen is not None:
        axes.plot(
            [chosen.iteration_time_s], [chosen.iteration_energy_j],
            color=CHOSEN, marker="*", markersize=16, markeredgecolor=INK, markeredgewidth=0.6, linestyle="none",
            zorder=5, label="chosen plan",
        )  # fmt: skip
        _annotate_saving(
            axes, top, chosen, to_the_left=chosen.iteration_time_s > (bound_times[0] + bound_times[-1]) / 2
        )

    if measured:
        axes.plot(
            *zip(*measured, strict=True),
            color=INK, marker="o", markersize=9, markerfacecolor="none", markeredgewidth=1.5, linestyle="none",
            zorder=6, label="measured",
        )  # fmt: skip
    axes.set_ylim(floor, ceiling)
    axes.set_xlim(*_widened(*axes.get_xlim()))
    axes.set_xlabel("iteration time (s)", color=INK)
    axes.set_ylabel("iteration energy (J)", color=INK)
    schedule, device = frontier.schedule, drawable(frontier.profile.device, 60)
    size = pipeline_size(schedule.num_stages, schedule.num_microbatches)
    title = f"{device}{', ' if device else ''}{drawable(schedule.name, 20)}, {size}"
    axes.set_title(title, loc="left", color=INK, fontsize=11 * min(1.0, 64 / len(title)))
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    tidy(axes)
    slowdown = axes.secondary_xaxis(
        "top",
        functions=(
            lambda time_s: 100 * (np.asarray(time_s) / top.iteration_time_s - 1),
            lambda percent: top.iteration_time_s * (1 + np.asarray(percent) / 100),
        ),
    )
    slowdown.set_xlabel("against the top clocks", color=MUTED, fontsize=9)
    slowdown.xaxis.set_major_formatter(FuncFormatter(lambda percent, _: f"{percent:+g} %" if percent else "0 %"))
    slowdown.tick_params(colors=MUTED, labelsize=8)
    slowdown.spines["top"].set_visible(False)
    axes.legend(frameon=False, loc="upper right", labelcolor=INK)
    save_figure(figure, path)


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range so wide, about its middle, that its ticks are told apart by few digits: plans may be equal."""
    missing = (_LEAST_SPAN * high or 1.0) - (high - low)
    return (low, high) if missing <= 0 else (low - missing / 2, high + missing / 2)


def _time_of(plan: FrequencyPlan) -> float:
    return plan.iteration_time_s


def _annotate_saving(axes: Axes, top: FrequencyPlan, chosen: FrequencyPlan, to_the_left: bool) -> None:
    axes.annotate(
        "\n".join(difference(top, chosen)),
        xy=(chosen.iteration_time_s, chosen.iteration_energy_j), xytext=(8 if to_the_left else 16, 24),
        textcoords="offset points", ha="right" if to_the_left else "left", fontsize=9, color=INK, zorder=6,
    )  # fmt: skip
