"""What the planner's pictures share: a figure without global state, the palette, atomic saving."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

from lightning_pfo.core.files import atomic_path
from lightning_pfo.core.frequency_plan import FrequencyPlan, saving_percent
from lightning_pfo.core.wording import cut
from lightning_pfo.planner.pipeline.timeline import Timeline

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e3e8ee"
FAINT_INK, FAINT_WHITE = "#1f2933b4", "#ffffffb4"
PLAN, TOP_CLOCKS, CHOSEN, BOUND = "#2463a6", "#c8452f", "#e8a013", "#8aa4bf"


def new_figure(width_in: float, height_in: float) -> Figure:
    """A figure that draws to pixels only; pyplot and its global state are never involved."""
    figure = Figure(figsize=(width_in, height_in), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def drawable(name: str, most: int) -> str:
    """A name in one line of at most `most` characters, without those that no font draws."""
    printable = "".join(character if character.isprintable() else " " for character in name)
    return cut(" ".join(printable.split()), most)


def tidy(axes: Axes) -> None:
    """Take away what carries no information."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelcolor=INK)


def write_many(axes: Axes, labels: Sequence[tuple[float, float, str, str]], size_pt: float, zorder: float) -> None:
    """Write (x, y, text, colour), each text centred at its place, as one artist: hundreds of `Text` take a second."""
    if not labels:
        return
    x, y, texts, colours = zip(*labels, strict=True)
    shape_of = {text: _centred(TextPath((0, 0), text, size=size_pt)) for text in set(texts)}
    written = PathCollection(
        [shape_of[text] for text in texts],
        offsets=np.column_stack([x, y]), offset_transform=axes.transData,
        facecolors=colours, linewidths=0, zorder=zorder,
    )  # fmt: skip
    written.set_transform(Affine2D().scale(1 / 72) + axes.figure.dpi_scale_trans)
    written.set_in_layout(False)
    axes.add_collection(written, autolim=False)


def _centred(path: Path) -> Path:
    vertices, codes = np.asarray(path.vertices), path.codes
    inked = vertices if codes is None else vertices[codes != Path.CLOSEPOLY]
    return Path(vertices - (inked.min(axis=0) + inked.max(axis=0)) / 2, codes)


def difference(before: FrequencyPlan | Timeline, after: FrequencyPlan | Timeline) -> tuple[str, str]:
    """How energy and time of an iteration have changed, in words."""
    slowdown = 100 * (after.iteration_time_s / before.iteration_time_s - 1)
    saving = saving_percent(after.iteration_energy_j, before.iteration_energy_j)
    energy = "same energy" if abs(saving) < 0.05 else f"{abs(saving):.1f} % {'less' if saving > 0 else 'more'} energy"
    return energy, "same time" if abs(slowdown) < 0.05 else f"{slowdown:+.1f} % time"


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write the figure, whole or not at all; the suffix of `path` chooses the format."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names of GPUs and models stand as they are, dollars too
    with atomic_path(path) as temporary:
        figure.savefig(temporary, facecolor="white")
