"""Compare the planner's plans with those of other systems, on one or more profiles.

Every policy's own choice: time, energy, saving and slowdown against the top clocks, beside what the planner's own plans
need at that time, and the proven bound. output_dir gets comparison.json and, for each profile, a picture. Example:

  lightning-pfo compare profile=profile.csv num_microbatches=12 p2p_blocking_power_w=85 json=true
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from rich.status import Status
from rich.table import Table

from lightning_pfo.cli.console import plain_console, show_table
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.files import check_can_write, write_text_atomically
from lightning_pfo.core.frequency_plan import saving_percent
from lightning_pfo.core.wording import pipeline_size, shortened
from lightning_pfo.planner.comparison import ComparedPolicy, Comparison, compare
from lightning_pfo.planner.frontier.data import OURS
from lightning_pfo.planner.settings import PlanSettings

_RESULT_NAME, _PICTURE_NAME = "comparison.json", "comparison.png"
_HELP = {name: entry.metadata for name, entry in PlanSettings.__dataclass_fields__.items()}


@dataclass
class Settings:
    """What `lightning-pfo compare` can be told."""

    profile: Any = field(metadata={"help": "profile CSV to plan from, or several: [a.csv, b.csv]", "is_path": True})
    num_microbatches: Optional[int] = field(  # noqa: UP045 (OmegaConf reads the annotation)
        default=None, metadata={"help": "microbatches per iteration; an order of your own says it itself"}
    )
    p2p_blocking_power_w: Any = field(default=None, metadata=_HELP["p2p_blocking_power_w"])
    schedule: str = field(default="1f1b", metadata={"help": "order of instructions, as for plan"})
    policies: list[str] = field(
        default_factory=list, metadata={"help": "other systems' policies, such as [perseus, envpipe]; none takes all"}
    )
    max_in_flight: Optional[int] = field(  # noqa: UP045 (OmegaConf reads the annotation)
        default=None, metadata={"help": "most activations that fit into memory, for EnvPipe's early forwards"}
    )
    num_plans: int = field(default=20, metadata=_HELP["num_plans"])
    effort: str = field(default="default", metadata=_HELP["effort"])
    regularise: bool = field(default=False, metadata=_HELP["regularise"])
    use_unreached: bool = field(default=False, metadata=_HELP["use_unreached"])
    switch_latency_s: Optional[float] = field(  # noqa: UP045 (OmegaConf reads the annotation)
        default=None, metadata=_HELP["switch_latency_s"]
    )
    output_dir: str = field(default="", metadata={"help": "directory to write to", "is_path": True})
    json: bool = field(default=False, metadata={"help": "print the figures as one JSON object, and nothing else"})


def run(settings: Settings) -> None:
    """Plan by every policy, write and print what came out.

    Raises:
        PfoError: If a profile or a setting cannot be used; nothing is written then.
    """
    names = _pictures_of(settings.profile)
    if settings.output_dir:
        check_can_write("output_dir", settings.output_dir, is_folder=True, names=[_RESULT_NAME, *names.values()])
    plan = PlanSettings(
        num_plans=settings.num_plans,
        effort=settings.effort,
        p2p_blocking_power_w=settings.p2p_blocking_power_w,
        regularise=settings.regularise,
        use_unreached=settings.use_unreached,
        switch_latency_s=settings.switch_latency_s,
    )
    compared: dict[str, Comparison] = {}
    with Status("comparing", console=plain_console(stderr=True)) as status:
        for profile in names:
            compared[profile] = compare(
                profile,
                plan,
                policies=settings.policies or None,
                num_microbatches=settings.num_microbatches,
                schedule=settings.schedule,
                max_in_flight=settings.max_in_flight,
                on_progress=lambda activity, done, total: status.update(f"comparing: {activity}, {done} of {total}"),
            )
    figures: Mapping[str, Any] = {profile: one.as_dict() for profile, one in compared.items()}
    if len(figures) == 1:
        (figures,) = figures.values()
    text = json.dumps(figures, indent=1, allow_nan=False)
    if settings.output_dir:
        from lightning_pfo.pictures.comparison import draw_comparison  # matplotlib is slow to import

        folder = Path(settings.output_dir)
        for profile, picture in names.items():
            draw_comparison(compared[profile], folder / picture)
        write_text_atomically(folder / _RESULT_NAME, text + "\n")
    console = plain_console()
    if settings.json:
        console.print(text)
        return
    for profile, one in compared.items():
        _report(profile, one)
    if settings.output_dir:
        console.print(f"written to {settings.output_dir}")


def _pictures_of(given: Any) -> dict[str, str]:
    """The profiles, and the name of each one's picture."""
    profiles = given if isinstance(given, list) else [given]
    if not profiles or not all(isinstance(profile, str) and profile for profile in profiles):
        raise ConfigurationError(
            f"profile is the path of a profile, or a list of such, each once; got {shortened(given)}. "
            "Give profile=a.csv, or profile=[a.csv,b.csv]."
        )
    profiles = [os.path.expanduser(profile) for profile in dict.fromkeys(profiles)]  # noqa: PTH111 (keeps ./)
    if len(profiles) == 1:
        return {profiles[0]: _PICTURE_NAME}
    return {profile: f"comparison_{number}_{Path(profile).stem}.png" for number, profile in enumerate(profiles)}


def _report(profile: str, comparison: Comparison) -> None:
    frontier = comparison.frontier
    schedule, device = frontier.schedule, frontier.profile.device
    size = pipeline_size(schedule.num_stages, schedule.num_microbatches)
    table = Table(title=f"{profile}{device and f' ({device})'}: predicted for {schedule.name}, {size}")
    table.add_column("policy")
    for heading in ("time (s)", "slowdown", "energy (J)", "saving", "ours then", "at most", "in flight", "changes"):
        table.add_column(heading, justify="right", no_wrap=True)
    beaten: list[ComparedPolicy] = []
    for name, policy in comparison.policies.items():
        row = policy.as_dict()
        mark = ""
        if comparison.beats_ours(policy):
            mark, beaten = " *", [*beaten, policy]
        table.add_row(
            f"{name}{mark}",
            f"{policy.plan.iteration_time_s:.4f}",
            f"{round(policy.slowdown_percent, 2) + 0.0:+.2f} %",
            f"{policy.plan.iteration_energy_j:.1f}",
            f"{policy.saving_percent:.2f} %",
            f"{row['ours_saving_percent_at_this_time']:.2f} %",
            f"{row['bound_saving_percent_at_this_time']:.2f} %",
            str(policy.most_in_flight),
            str(row["clock_changes"]),
        )
    show_table(table)
    console = plain_console()
    console.print(
        "Each policy's own choice, against the top locked clocks. Ours then: what ours saves under the same order, no "
        "slower; at most: no plan saves more."
    )
    for policy in beaten:
        console.print(f"* {_in_words(policy, comparison)}")


def _in_words(policy: ComparedPolicy, comparison: Comparison) -> str:
    if policy.beats_ours_percent:
        return f"{policy.name} needs {policy.beats_ours_percent:.3f} % less energy than ours of its time and order."
    ours = comparison.policies[OURS]
    percent = saving_percent(policy.plan.iteration_energy_j, ours.plan.iteration_energy_j)
    return (
        f"{policy.name} needs {percent:.2f} % less energy than ours and is no slower: its order "
        f"({policy.plan.schedule.name}) keeps up to {policy.most_in_flight} activations on a rank, "
        f"{ours.plan.schedule.name} {ours.most_in_flight}. In that order ours saves "
        f"{policy.as_dict()['ours_saving_percent_at_this_time']:.2f} %."
    )
