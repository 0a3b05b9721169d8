"""The picture of one iteration: every instruction of every rank, coloured by power or by clock."""

from __future__ import annotations

import os
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection, PolyCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.pictures.style import (
    FAINT_INK,
    FAINT_WHITE,
    INK,
    MUTED,
    difference,
    drawable,
    new_figure,
    save_figure,
    tidy,
    write_many,
)
from lightning_pfo.planner.pipeline.timeline import Timeline

_BAR = 0.82
_BLOCKED, _BLOCKED_LOW, _CRITICAL = "#e6eaef", "#cbd5e0", "#c8452f"
_SMALLEST_TEXT = 3.5
_POINTS_PER_CHARACTER = 0.62
"""Width of a character relative to the font size."""

_CROWDED = 60
"""Instructions per rank from which edges are thin, and forwards and transfers unmarked."""

_TRANSFER = "#3d4b5c"


def draw_timelines(
    timelines: dict[str, Timeline],
    path: str | os.PathLike[str],
    *,
    colour: Literal["power", "clock"] = "power",
    device: str = "",
) -> None:
    """Draw one iteration, or several one above the other, with one time axis and one colour scale: before and after.

    Forwards have a pale top edge; waiting is light grey, and a darker grey at a clock of its own; a red line runs along
    the critical path; arrows are transfers between ranks, where they take time and there are not too many. Clocks in
    MHz and instructions are written where they fit. The headings of all but the first iteration say how it differs
    from that.

    Args:
        timelines: What to draw, by heading, see `Frontier.timeline`; iteration time and energy are added.
        path: Picture file to write.
        colour: What colours tell: power in watts or clock in MHz.
        device: Name of the GPU, written below.
    """
    num_ranks = max(len(timeline.schedule.orders) for timeline in timelines.values())
    longest = max(len(order) for timeline in timelines.values() for order in timeline.schedule.orders)
    width = min(max(8.0, 0.6 * longest), 18.0)
    bar_height = min(0.42, 9.0 / num_ranks)
    height = 0.3 + len(timelines) * (1.15 + bar_height * num_ranks)
    figure = new_figure(width, height)
    rows = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    norm = _norm(timelines, colour)
    first = next(iter(timelines.values()))
    for axes, (title, timeline) in zip(rows, timelines.items(), strict=True):
        _draw(axes, timeline, colour, norm, width, 72 * _BAR * bar_height)
        heading = f"{drawable(title, 40)}: " if title else ""
        energy = f"{timeline.iteration_energy_j:,.{0 if timeline.iteration_energy_j >= 1e4 else 1}f} J"
        ahead = f" ({', '.join(difference(first, timeline))})" if timeline is not first else ""
        axes.set_title(
            f"{heading}{timeline.iteration_time_s:.4g} s, {energy}{ahead}", loc="left", fontsize=11, color=INK
        )
    rows[-1].set_xlabel(f"time (s) on {drawable(device, 60)}" if device else "time (s)", color=INK)
    _add_scale(figure, rows.tolist(), norm, colour)
    _add_key(figure, list(timelines.values()))
    save_figure(figure, path)


def _is_crowded(schedule: PipelineSchedule) -> bool:
    return len(schedule.instructions) / schedule.num_ranks > _CROWDED


def _add_key(figure: Figure, timelines: list[Timeline]) -> None:
    """What the greys, the red line and the pale edge mean, below everything."""
    key = [Patch(color=_BLOCKED, label="waiting for a neighbour")]
    if any(timeline.wait_clocks for timeline in timelines):
        key.append(Patch(color=_BLOCKED_LOW, label="waiting at a clock of its own"))
    entries: list[Patch | Line2D] = [*key, Line2D([], [], color=_CRITICAL, linewidth=1.6, label="critical path")]
    if not any(_is_crowded(timeline.schedule) for timeline in timelines):
        forward = Line2D(
            [], [], linestyle="none", marker="s", markersize=9, fillstyle="bottom", markerfacecolor="#3b528b",
            markerfacecoloralt="#c4cbdc", markeredgewidth=0, label="forward (pale top edge)",
        )  # fmt: skip
        entries.append(forward)
        if any(timeline.dag.delays.any() for timeline in timelines):
            entries.append(Line2D([], [], color=_TRANSFER, linewidth=0.8, label="transfer"))
    figure.legend(
        handles=entries, loc="outside lower right", ncols=len(entries), frameon=False, fontsize=8, labelcolor=INK
    )


def _values(timeline: Timeline, colour: str) -> list[float]:
    if colour == "clock":
        return [float(clock) for clock in timeline.clocks_mhz]
    return [energy / time for energy, time in zip(timeline.energies_j, timeline.durations_s, strict=True)]


def _norm(timelines: dict[str, Timeline], colour: str) -> Normalize:
    values = [value for timeline in timelines.values() for value in _values(timeline, colour)]
    low, high = min(values), max(values)
    return Normalize(low, high) if high > low else Normalize(low - 1, high + 1)


def _draw(axes: Axes, timeline: Timeline, colour: str, norm: Normalize, width_in: float, bar_pt: float) -> None:
    schedule, end = timeline.schedule, timeline.iteration_time_s
    for rank in range(len(schedule.orders)):
        axes.add_patch(Rectangle((0, rank - _BAR / 2), end, _BAR, color=_BLOCKED, linewidth=0, zorder=1))
    rank_of = [rank for rank, _ in schedule.places]
    starts, ends = np.array(timeline.starts_s), np.array(timeline.starts_s) + timeline.durations_s
    top = np.array(rank_of) - _BAR / 2
    corners = [(starts, top), (ends, top), (ends, top + _BAR), (starts, top + _BAR)]
    boxes = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
    values = _values(timeline, colour)
    crowded = _is_crowded(schedule)
    edge = 0.15 if crowded else 0.5
    filled = PolyCollection(list(boxes), cmap="viridis", norm=norm, edgecolor="white", linewidth=edge, zorder=2)
    filled.set_array(values)
    axes.add_collection(filled)
    _mark_forwards(axes, timeline, rank_of, crowded)
    _trace_critical_path(axes, timeline, rank_of, crowded)
    _draw_wait_clocks(axes, timeline, width_in)
    if not crowded:
        _draw_transfers(axes, timeline, rank_of)
    _write_clocks(axes, timeline, rank_of, [norm(value) < 0.6 for value in values], width_in, bar_pt)

    axes.set_xlim(0, end)
    axes.set_ylim(len(schedule.orders) - 0.5, -0.5)
    axes.set_yticks(range(len(schedule.orders)))
    axes.set_yticklabels([f"rank {rank}" for rank in range(len(schedule.orders))], fontsize=8)
    tidy(axes)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _mark_forwards(axes: Axes, timeline: Timeline, rank_of: list[int], crowded: bool) -> None:
    """A pale top edge tells forwards from backwards without another colour."""
    if crowded:
        return
    edges = [
        Rectangle((start, rank - _BAR / 2), duration, 0.10)
        for inst, start, duration, rank in zip(
            timeline.schedule.instructions, timeline.starts_s, timeline.durations_s, rank_of, strict=True
        )
        if inst.type is InstructionType.FORWARD
    ]
    axes.add_collection(PatchCollection(edges, facecolor="white", alpha=0.75, linewidth=0, zorder=3))


def _trace_critical_path(axes: Axes, timeline: Timeline, rank_of: list[int], crowded: bool) -> None:
    x: list[float] = []
    y: list[float] = []
    for node in timeline.critical_path:
        start = timeline.starts_s[node]
        x += [start, start + timeline.durations_s[node]]
        y += [rank_of[node] + _BAR / 2 - 0.07] * 2
    axes.plot(x, y, color=_CRITICAL, linewidth=1.2 if crowded else 1.6, solid_joinstyle="round", zorder=4)


def _draw_wait_clocks(axes: Axes, timeline: Timeline, width_in: float) -> None:
    points_per_second = _points_per_second(timeline, width_in)
    size = 6.5
    labels = []
    for wait in timeline.wait_clocks:
        begin, end = timeline.waits_of(wait.rank)[wait.position]
        is_last = wait.position == len(timeline.schedule.orders[wait.rank])
        length = end - begin if is_last else min(wait.hold_s, end - begin)
        low = Rectangle((begin, wait.rank - _BAR / 2), length, _BAR, color=_BLOCKED_LOW, linewidth=0, zorder=1.5)
        axes.add_patch(low)
        if length * points_per_second >= 4 * _POINTS_PER_CHARACTER * size:
            labels.append((begin + length / 2, float(wait.rank), str(wait.clock_mhz), MUTED))
    write_many(axes, labels, size, zorder=5)


def _draw_transfers(axes: Axes, timeline: Timeline, rank_of: list[int]) -> None:
    """An arrow from the end of each producer to the moment from which its consumer could start."""
    dag = timeline.dag
    delayed = dag.delays > 0
    (before, after), delays_s = dag.edges[delayed].T, dag.delays[delayed]
    if not len(delays_s):
        return
    ends_s, ranks = np.array(timeline.starts_s) + timeline.durations_s, np.array(rank_of)
    down = np.sign(ranks[after] - ranks[before])  # from the edge of one bar to that of the other
    from_y, to_y = ranks[before] + down * _BAR / 2, ranks[after] - down * _BAR / 2
    axes.quiver(
        ends_s[before], from_y, delays_s, to_y - from_y, color=_TRANSFER, angles="xy", scale_units="xy", scale=1,
        units="inches", width=0.009, headwidth=6, headlength=7, headaxislength=6, zorder=1.9,
    )  # fmt: skip


def _points_per_second(timeline: Timeline, width_in: float) -> float:
    return 72 * 0.84 * width_in / timeline.iteration_time_s


def _write_clocks(
    axes: Axes, timeline: Timeline, rank_of: list[int], is_dark: list[bool], width_in: float, bar_pt: float
) -> None:
    """Write clocks at the largest size that fits short instructions; not at all where that is unreadable.

    The instructions are written below them, smaller, where bars are high enough.
    """
    schedule, points_per_second = timeline.schedule, _points_per_second(timeline, width_in)
    short = sorted(timeline.durations_s)[len(timeline.durations_s) // 50]
    size = min(8.0, 0.85 * short * points_per_second / (4 * _POINTS_PER_CHARACTER))
    if size < _SMALLEST_TEXT:
        return
    small = max(0.75 * size, _SMALLEST_TEXT)
    has_names = bar_pt >= 2.6 * size
    several = schedule.num_stages > schedule.num_ranks
    clocks, names = [], []
    for inst, clock, start, duration, rank, dark in zip(
        schedule.instructions, timeline.clocks_mhz, timeline.starts_s, timeline.durations_s, rank_of, is_dark,
        strict=True,
    ):  # fmt: skip
        x, room = start + duration / 2, duration * points_per_second / _POINTS_PER_CHARACTER
        if room >= len(str(clock)) * size:
            clocks.append((x, rank - (0.09 if has_names else 0.0), str(clock), "white" if dark else INK))
        name = str(inst) if several else f"{inst.type.value}{inst.microbatch}"
        if has_names and room >= len(name) * small:
            names.append((x, rank + 0.19, name, FAINT_WHITE if dark else FAINT_INK))
    write_many(axes, clocks, size, zorder=5)
    write_many(axes, names, small, zorder=5)


def _add_scale(figure: Figure, rows: list[Axes], norm: Normalize, colour: str) -> None:
    scale = figure.colorbar(ScalarMappable(norm, cmap="viridis"), ax=rows, pad=0.01, aspect=30, fraction=0.03)
    scale.set_label("power (W)" if colour == "power" else "clock (MHz)", color=INK, fontsize=9)
    scale.ax.tick_params(colors=MUTED, labelsize=8)
    scale.outline.set_visible(False)
