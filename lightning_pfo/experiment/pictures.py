"""The pictures of an experiment: the planner's, and the losses of both trainings."""

from __future__ import annotations

from pathlib import Path

from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.experiment.report import Report
from lightning_pfo.pictures.frontier import draw_frontier
from lightning_pfo.pictures.profile import draw_energy_valleys
from lightning_pfo.pictures.style import CHOSEN, GRID, INK, TOP_CLOCKS, new_figure, save_figure, tidy
from lightning_pfo.pictures.timeline import draw_timelines
from lightning_pfo.planner import Frontier


def draw_pictures(frontier: Frontier, chosen: FrequencyPlan, report: Report, output_dir: Path) -> None:
    """Draw `frontier.png`, `timelines.png`, `energy_valleys.png` and `losses.png`.

    Args:
        frontier: The frontier that was planned.
        chosen: The plan that was trained with.
        report: What was measured.
        output_dir: Folder to write to.
    """
    measured = [(result.iteration_time_s, result.iteration_energy_j) for result in (report.baseline, report.plan)]
    draw_frontier(frontier, output_dir / "frontier.png", chosen=chosen, measured=measured)
    note = ", emulated" if report.is_emulated else ""
    plans = {f"Top clocks{note}": frontier.baseline, f"Plan{note}": chosen}
    timelines = {title: frontier.timeline(plan) for title, plan in plans.items()}
    draw_timelines(timelines, output_dir / "timelines.png", device=report.device)
    draw_energy_valleys(frontier.profile, output_dir / "energy_valleys.png", title=report.device)
    draw_losses(report, output_dir / "losses.png")


def draw_losses(report: Report, path: Path) -> None:
    """Draw the training loss over time and over energy spent: the same steps, sooner or cheaper."""
    figure = new_figure(8.8, 3.8)
    over_step, over_energy = figure.subplots(1, 2, sharey=True)
    for name, colour, style, result in (
        ("top clocks", TOP_CLOCKS, "-", report.baseline),
        ("plan", CHOSEN, "--", report.plan),
    ):
        steps = range(1, len(result.losses) + 1)
        energies_kj = [step * result.iteration_energy_j / 1e3 for step in steps]
        over_step.plot(steps, result.losses, style, color=colour, linewidth=2, label=name)
        over_energy.plot(energies_kj, result.losses, style, color=colour, linewidth=2, label=name)
    over_step.set_ylabel("training loss", color=INK)
    for axes, label in ((over_step, "step"), (over_energy, "energy of all GPUs (kJ)")):
        axes.set_xlabel(label, color=INK)
        axes.grid(color=GRID, linewidth=0.8)
        tidy(axes)
    over_step.legend(frameon=False, labelcolor=INK)
    figure.suptitle(report.device, x=0.01, ha="left", fontsize=12, color=INK)
    save_figure(figure, path)
