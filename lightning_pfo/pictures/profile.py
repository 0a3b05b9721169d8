"""The picture of a profile: the energy valley of each stage."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.lines import Line2D

from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.pictures.style import GRID, INK, MUTED, drawable, new_figure, save_figure, tidy
from lightning_pfo.planner.profile.profile import InstructionProfile, Profile

_LEAST: dict[str, Any] = {"marker": "o", "markersize": 9, "markeredgecolor": "white", "linestyle": "none"}
_LINE_WIDTH = 0.01
"""Of a line, as a share of its panel's height."""


def draw_energy_valleys(profile: Profile, path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw energy over clock for every stage, one panel per kind of instruction; a dot marks the least energy.

    Stages whose lines would cover each other share a colour and a label.

    Args:
        profile: Measurements.
        path: Picture file to write.
        title: Heading; the names of the GPUs if empty.
    """
    title = title or profile.device
    kinds = [kind for kind in InstructionType if any(k is kind for _, k in profile.instructions)]
    groups = _indistinct_stages(profile, kinds)
    columns = min(len(groups) + 1, 3 * len(kinds))
    figure = new_figure(4.4 * len(kinds), 3.8 + 0.2 * math.ceil((len(groups) + 1) / columns))
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    colours = colormaps["viridis"]
    for axes, kind in zip(panels, kinds, strict=True):
        for number, stages in enumerate(groups):
            colour = colours(0.9 * number / max(len(groups) - 1, 1))
            measured = [profile.instructions[stage, kind] for stage in stages if (stage, kind) in profile.instructions]
            for curve in measured:
                axes.plot(
                    curve.clocks_mhz, curve.energies_j, color=colour, linewidth=1.4, marker=".", markersize=4,
                    label=_label(stages) if curve is measured[0] else None,
                )  # fmt: skip
                lowest = min(range(len(curve.clocks_mhz)), key=curve.energies_j.__getitem__)
                axes.plot(
                    [curve.clocks_mhz[lowest]], [curve.energies_j[lowest]], color=colour, **_LEAST, zorder=3
                )  # fmt: skip
        axes.set_title(kind.profile_name.replace("_", " "), loc="left", fontsize=11, color=INK)
        axes.set_xlabel("locked graphics clock (MHz)", color=INK)
        axes.grid(color=GRID, linewidth=0.8)
        tidy(axes)
    panels[0].set_ylabel("energy of a microbatch (J)", color=INK)
    lines, _ = panels[0].get_legend_handles_labels()
    least = Line2D([], [], color=MUTED, label="least energy", **_LEAST)
    figure.legend(
        handles=[*lines, least], loc="outside lower center", ncols=columns, frameon=False, fontsize=8, labelcolor=INK
    )
    if title:
        figure.suptitle(drawable(title, 38 * len(kinds)), x=0.01, ha="left", fontsize=12, color=INK)
    save_figure(figure, path)


def _indistinct_stages(profile: Profile, kinds: Sequence[InstructionType]) -> list[list[int]]:
    """Groups of stages whose lines, in every panel, are nowhere further apart than a line is wide."""
    widths_j = []
    for kind in kinds:
        energies_j = [e for (_, k), curve in profile.instructions.items() if k is kind for e in curve.energies_j]
        widths_j.append(_LINE_WIDTH * (max(energies_j) - min(energies_j)))
    groups: list[list[int]] = []
    for stage in range(profile.num_stages):
        for group in groups:
            pairs = [(profile.instructions.get((group[0], k)), profile.instructions.get((stage, k))) for k in kinds]
            if all(_are_close(one, other, width_j) for (one, other), width_j in zip(pairs, widths_j, strict=True)):
                group.append(stage)
                break
        else:
            groups.append([stage])
    return groups


def _are_close(one: InstructionProfile | None, other: InstructionProfile | None, width_j: float) -> bool:
    if one is None or other is None:
        return one is other
    shared = set(one.clocks_mhz) & set(other.clocks_mhz)
    return bool(shared) and all(abs(one.at(clock)[1] - other.at(clock)[1]) <= width_j for clock in shared)


def _label(stages: Sequence[int]) -> str:
    """Such as `stage 7` or `stages 0-2, 5`."""
    parts: list[list[int]] = []
    for stage in stages:
        if parts and parts[-1][-1] == stage - 1:
            parts[-1].append(stage)
        else:
            parts.append([stage])
    text = ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
    return f"stage{'s' if len(stages) > 1 else ''} {text}"
