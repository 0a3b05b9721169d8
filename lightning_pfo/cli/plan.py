"""Plan the clocks of a pipeline from a profile.

Writes into output_dir: frontier.csv, frontier.json, freqs_pipeline_%05d.py for each plan, frontier.png, and timelines
of the fastest and of the chosen plan; all_pictures=true adds the profile's energy valleys, and the chosen plan below
the top clocks. Where the profile looks noisy, noise.txt says where. Example:

  lightning-pfo plan profile=profile.csv num_microbatches=12 p2p_blocking_power_w=85 output_dir=plans
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Optional

from rich.status import Status
from rich.table import Table

from lightning_pfo.cli.console import plain_console, show_table
from lightning_pfo.core.files import check_can_write, write_text_atomically
from lightning_pfo.core.frequency_plan import FrequencyPlan, saving_percent
from lightning_pfo.core.wording import counted, pipeline_size
from lightning_pfo.planner.frontier.data import OURS, Frontier
from lightning_pfo.planner.frontier.frontier_files import save_frontier
from lightning_pfo.planner.frontier.select import FORMS, check_selection, select_plan
from lightning_pfo.planner.frontier.thin import thin_frontier
from lightning_pfo.planner.plan import plan_frontier
from lightning_pfo.planner.profile.denoise import regularise
from lightning_pfo.planner.profile.profile_csv import read_profile
from lightning_pfo.planner.settings import PlanSettings

_NOISE_NAME, _NOTES_SHOWN = "noise.txt", 3
_WRITTEN = (
    "frontier.csv", "frontier.json", "frontier.png", "timeline_fastest.png", "timeline_chosen.png", "timelines.png",
    "energy_valleys.png", _NOISE_NAME,
)  # fmt: skip


@dataclass
class Settings(PlanSettings):
    """What `lightning-pfo plan` can be told: besides how to plan, for what, and what to write."""

    profile: str = field(kw_only=True, metadata={"help": "profile CSV to plan from", "is_path": True})
    output_dir: str = field(kw_only=True, metadata={"help": "directory to write to", "is_path": True})
    num_microbatches: Optional[int] = field(  # noqa: UP045 (OmegaConf reads the annotation)
        default=None, metadata={"help": "microbatches per iteration; an order of your own says it itself"}
    )
    schedule: str = field(
        default="1f1b", metadata={"help": "order of instructions: 1f1b, gpipe, zbv, ..., or file:PATH for your own"}
    )
    stages_per_rank: Optional[int] = field(  # noqa: UP045 (OmegaConf reads the annotation)
        default=None, metadata={"help": "stages that share a GPU, where the schedule leaves it open"}
    )
    every: int = field(default=1, metadata={"help": "write each n-th plan only, counted from the fastest"})
    all_pictures: bool = field(
        default=False, metadata={"help": "draw energy_valleys.png and timelines.png (top clocks and chosen plan) too"}
    )
    select: str = field(
        default="",
        metadata={"help": f"plan to show: {FORMS}; none is no_slowdown, or what another policy takes itself (own)"},
    )


def run(settings: Settings) -> None:
    """Plan, write everything, print a short table.

    Raises:
        PfoError: If the profile or a setting cannot be used; nothing is written then.
    """
    settings = replace(settings, select=settings.select or ("no_slowdown" if settings.policy == OURS else "own"))
    check_selection(settings.select)
    check_can_write("output_dir", settings.output_dir, is_folder=True, names=_WRITTEN)
    profile = read_profile(settings.profile)
    findings = regularise(profile)
    with Status("planning", console=plain_console(stderr=True)) as status:
        frontier = plan_frontier(
            profile,
            settings,
            num_microbatches=settings.num_microbatches,
            schedule=settings.schedule,
            stages_per_rank=settings.stages_per_rank,
            on_progress=lambda activity, done, total: status.update(f"planning: {activity}, {done} of {total}"),
        )
    chosen = select_plan(frontier, settings.select)
    wishes = ["no_slowdown", *(f"{deadline_s}s" for deadline_s in settings.deadlines_s)]
    kept = [chosen, *(select_plan(frontier, wish) for wish in wishes)] if settings.every > 1 else []
    frontier = thin_frontier(frontier, every=settings.every, keep=kept)
    folder = Path(settings.output_dir)
    save_frontier(frontier, folder)

    _draw(frontier, chosen, settings, folder)
    _write_noise(findings.notes, settings, folder)
    _report(frontier, chosen, settings)
    _report_noise(findings.notes, settings, folder)


def _write_noise(notes: Sequence[str], settings: Settings, folder: Path) -> None:
    """All findings go into a file."""
    path = folder / _NOISE_NAME
    path.unlink(missing_ok=True)  # of an earlier plan
    if notes:
        heading = f"{settings.profile}: {_noise_heading(notes, settings)}"
        write_text_atomically(path, "\n".join([heading, *notes]) + "\n")


def _report_noise(notes: Sequence[str], settings: Settings, folder: Path) -> None:
    """The first findings go to the terminal."""
    if not notes:
        return
    print_line = plain_console().print
    print_line(f"{_noise_heading(notes, settings)}:")
    for note in notes[:_NOTES_SHOWN]:
        print_line(f"  {note}")
    if len(notes) > _NOTES_SHOWN:
        print_line(f"  all of them are in {folder / _NOISE_NAME}")


def _noise_heading(notes: Sequence[str], settings: Settings) -> str:
    done = "taken out" if settings.regularise else "planned on as it is; regularise=true takes it out"
    return f"{counted(len(notes), 'finding')} of noise in the profile ({done})"


def _draw(frontier: Frontier, chosen: FrequencyPlan, settings: Settings, folder: Path) -> None:
    from lightning_pfo.pictures.frontier import draw_frontier  # matplotlib is slow to import
    from lightning_pfo.pictures.profile import draw_energy_valleys
    from lightning_pfo.pictures.timeline import draw_timelines

    draw_frontier(frontier, folder / "frontier.png", chosen=chosen)
    top, fastest = {"Top clocks": frontier.baseline}, {"Fastest plan": frontier.fastest}
    selected = {f"Chosen plan ({settings.select})": chosen}
    pictures = {"timeline_fastest": fastest, "timeline_chosen": selected}
    for name in ("timelines", "energy_valleys"):
        (folder / f"{name}.png").unlink(missing_ok=True)  # of an earlier plan
    if settings.all_pictures:
        pictures["timelines"] = top | selected
        draw_energy_valleys(frontier.profile, folder / "energy_valleys.png")
    for name, plans in pictures.items():
        timelines = {title: frontier.timeline(plan) for title, plan in plans.items()}
        draw_timelines(timelines, folder / f"{name}.png", device=frontier.profile.device)


def _report(frontier: Frontier, chosen: FrequencyPlan, settings: Settings) -> None:
    schedule = frontier.schedule
    size = pipeline_size(schedule.num_stages, schedule.num_microbatches)
    device = f", {frontier.profile.device}" if frontier.profile.device else ""
    whose = "" if frontier.policy == OURS else f" of {frontier.policy}"
    table = Table(title=f"{counted(len(frontier.plans), 'plan')}{whose} for {schedule.name}, {size}{device}")
    table.add_column("plan")
    for heading in ("number", "time (s)", "change", "energy (J)", "saving", "at most"):
        table.add_column(heading, justify="right", no_wrap=True)
    base = frontier.baseline
    table.add_row("top clocks", "", f"{base.iteration_time_s:.4f}", "", f"{base.iteration_energy_j:.1f}", "", "")
    for name, plan in {
        "fastest": frontier.fastest,
        settings.select: chosen,
        "least_energy": frontier.least_energy,
    }.items():
        table.add_row(
            name,
            str(frontier.number_of(plan)) if plan in frontier.plans else "",
            f"{plan.iteration_time_s:.4f}",
            f"{100 * (plan.iteration_time_s / base.iteration_time_s - 1):+.2f} %",
            f"{plan.iteration_energy_j:.1f}",
            f"{saving_percent(plan.iteration_energy_j, base.iteration_energy_j):.2f} %",
            f"{saving_percent(plan.lower_bound_j, base.iteration_energy_j):.2f} %",
        )
    show_table(table)
    console = plain_console()
    changes = f"The chosen plan changes clocks {counted(chosen.num_clock_changes, 'time')} per iteration"
    if frontier.limits_changes or settings.change_cost_j:
        without_j = chosen.iteration_energy_j - chosen.switching_cost_j
        percent = saving_percent(without_j, chosen.iteration_energy_j)
        changes += f"; few changes cost it {chosen.switching_cost_j:.1f} J ({percent:.2f} %)"
    console.print(f"{changes}.")
    if chosen in frontier.straggler_plans:
        usual_j = frontier.beside_straggler_j(frontier.least_energy, chosen.iteration_time_s)
        percent = saving_percent(chosen.iteration_energy_j, usual_j)
        console.print(
            f"It has no number: it pays beside a straggler only, and needs {percent:.2f} % less than least_energy and "
            "waiting until then."
        )
    console.print(f"written to {settings.output_dir}")
