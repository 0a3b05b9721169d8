"""The pictures of an experiment: the planner's, the losses, and the windows that were compared."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.experiment.report import Report
from lightning_pfo.pictures.frontier import draw_frontier
from lightning_pfo.pictures.profile import draw_energy_valleys
from lightning_pfo.pictures.style import CHOSEN, GRID, INK, TOP_CLOCKS, new_figure, save_figure, tidy
from lightning_pfo.pictures.timeline import draw_timelines
from lightning_pfo.planner import Frontier
from lightning_pfo.planner.adaptive.windows import Windowed


def draw_pictures(frontier: Frontier, chosen: FrequencyPlan, report: Report, output_dir: Path) -> None:
    """Draw `frontier.png`, `timelines.png`, `energy_valleys.png`, `losses.png` and `windows.png`.

    Args:
        frontier: The frontier that was planned.
        chosen: The plan that was trained with.
        report: What was measured.
        output_dir: Folder to write to.
    """
    measured = [(result.iteration_time_s, result.iteration_energy_j) for result in _of(report).values()]
    draw_frontier(frontier, output_dir / "frontier.png", chosen=chosen, measured=measured)
    note = ", emulated" if report.is_emulated else ""
    plans = {f"Top clocks{note}": frontier.baseline, f"Plan{note}": chosen}
    timelines = {title: frontier.timeline(plan) for title, plan in plans.items()}
    draw_timelines(timelines, output_dir / "timelines.png", device=report.device)
    draw_energy_valleys(frontier.profile, output_dir / "energy_valleys.png", title=report.device)
    draw_losses(report, output_dir / "losses.png")
    draw_windows(report, output_dir / "windows.png")


def _of(report: Report) -> dict[str, Windowed]:
    return {"top clocks": report.training.baseline, "plan": report.training.plan}


_STYLES = {"top clocks": (TOP_CLOCKS, "-", "o"), "plan": (CHOSEN, "--", "s")}


_LEAST_SPAN = 0.01
"""Share of the largest value that an axis shows at least: rounding errors are no differences."""


def draw_losses(report: Report, path: Path) -> None:
    """Draw the training loss over time and over energy, as if all steps were at the top clocks, or under the plan."""
    figure = new_figure(8.8, 3.8)
    over_time, over_energy = figure.subplots(1, 2, sharey=True)
    losses = report.training.losses
    for name, result in _of(report).items():
        colour, style, _ = _STYLES[name]
        for axes, per_step in (
            (over_time, result.iteration_time_s),
            (over_energy, result.iteration_energy_j / 1e3),
        ):
            amounts = [step * per_step for step in range(1, len(losses) + 1)]
            axes.plot(amounts, losses, style, color=colour, linewidth=2, label=name)
    over_time.set_ylabel("training loss", color=INK)
    _finish(figure, {over_time: "time of all steps (s)", over_energy: "energy of all GPUs (kJ)"}, report.device, path)


def draw_windows(report: Report, path: Path) -> None:
    """Draw what an iteration takes in each window, in the order in which they were trained."""
    figure = new_figure(8.8, 3.8)
    times, energies = figure.subplots(1, 2)
    for is_plan, (name, result) in enumerate(_of(report).items()):
        colour, style, marker = _STYLES[name]
        # every other pair begins with the plan
        places = [2 * pair + 1 + (is_plan != pair % 2) for pair in range(len(result.windows))]
        for axes, values in (
            (times, [window.time_s for window in result.windows]),
            (energies, [window.energy_j for window in result.windows]),
        ):
            axes.plot(places, values, style, marker=marker, color=colour, linewidth=1, markersize=5, label=name)
    for axes in (times, energies):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        low, high = axes.get_ylim()
        half = max(high - low, _LEAST_SPAN * high) / 2
        axes.set_ylim((low + high) / 2 - half, (low + high) / 2 + half)
    times.set_ylabel("time of an iteration (s)", color=INK)
    energies.set_ylabel("energy of an iteration (J)", color=INK)
    _finish(figure, dict.fromkeys((times, energies), "window"), report.device, path)


def _finish(figure: Figure, labels: dict[Axes, str], title: str, path: Path) -> None:
    for axes, label in labels.items():
        axes.set_xlabel(label, color=INK)
        axes.grid(color=GRID, linewidth=0.8)
        tidy(axes)
    next(iter(labels)).legend(frameon=False, labelcolor=INK)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK)
    save_figure(figure, path)
