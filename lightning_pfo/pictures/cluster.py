"""The picture of many replicas over a day: how slow the slowest is, and what each policy saves."""

from __future__ import annotations

import os

import numpy as np

from lightning_pfo.core.frequency_plan import saving_percent
from lightning_pfo.pictures.style import GRID, INK, MUTED, drawable, new_figure, save_figure, tidy
from lightning_pfo.planner.cluster.emulation import Emulation

_DAY_H = 24.0


def draw_emulation(emulation: Emulation, path: str | os.PathLike[str]) -> None:
    """Draw the slowest replica and the saving of each policy, moment by moment.

    Args:
        emulation: What to draw.
        path: Picture file to write.
    """
    figure = new_figure(9.0, 5.4)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    num_moments = len(emulation.factors)
    # A step from each moment to the next.
    hours = np.arange(num_moments + 1) * (_DAY_H / num_moments)

    def steps(values: np.ndarray) -> np.ndarray:
        return np.append(values, values[-1])

    above.step(hours, steps(emulation.factors.max(axis=1)), where="post", color=MUTED, linewidth=1.2)
    above.set_ylabel("slowest replica\n(T'/T)", color=INK)
    for name, policy in emulation.policies.items():
        energies_j = zip(policy.energies_j.tolist(), emulation.baseline.energies_j.tolist(), strict=True)
        saved = np.array([saving_percent(energy_j, top_j) for energy_j, top_j in energies_j])
        label = (
            f"{drawable(name, 50)}  {emulation.saving_percent(name):.1f} % at "
            f"{emulation.slowdown_percent(name):+.1f} % time"
        )
        below.step(hours, steps(saved), where="post", linewidth=1.4, label=label)
    below.set_ylabel("energy saved (%)", color=INK)
    below.set_xlabel("hour of the day", color=INK)
    above.set_title(f"{emulation.description}, emulated", loc="left", color=INK, fontsize=11)
    for axes in (above, below):
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        tidy(axes)
    figure.legend(frameon=False, loc="outside lower center", ncols=2, labelcolor=INK, fontsize=8)
    save_figure(figure, path)
