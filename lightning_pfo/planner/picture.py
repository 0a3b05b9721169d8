"""What the planner's pictures share: a figure without global state, the palette, atomic saving."""

from __future__ import annotations

import os

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lightning_pfo.core.files import atomic_path

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e3e8ee"
PLAN, TOP_CLOCKS, CHOSEN, BOUND = "#2463a6", "#c8452f", "#e8a013", "#8aa4bf"


def new_figure(width_in: float, height_in: float) -> Figure:
    """A figure that draws to pixels only; pyplot and its global state are never involved."""
    figure = Figure(figsize=(width_in, height_in), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes) -> None:
    """Take away what carries no information."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelcolor=INK)


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write the figure, whole or not at all; the suffix of `path` chooses the format."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, facecolor="white")
