"""The phases of an experiment.

::

    1 profile             every stage's instructions at each clock     profile.csv
    2 plan                on rank 0, given to all ranks                plans/frontier.json, ...
    3 train, top clocks   what the plan is compared with               top_clocks/metrics.csv
    4 train, plan         the same weights and batches                 plan/metrics.csv
    report                on rank 0                                    report.json, pictures

The processes that Lightning starts for the first phase run all of them.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_pfo.callbacks.frequency_plan import TOP_CLOCKS
from lightning_pfo.cli.console import plain_console, show_table
from lightning_pfo.core.errors import PfoError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.wording import pipeline_size
from lightning_pfo.device import GpuConfig, open_gpu
from lightning_pfo.experiment.checks import check_experiment, schedule_of
from lightning_pfo.experiment.config import ExperimentConfig
from lightning_pfo.experiment.pictures import draw_pictures
from lightning_pfo.experiment.processes import is_first_process
from lightning_pfo.experiment.report import Report, TrainingResult
from lightning_pfo.experiment.training import (
    MakeData,
    MakeModule,
    accelerator_of,
    few_gpus,
    is_emulated,
    profile,
    quiet_lightning,
    train,
)
from lightning_pfo.planner import (
    Frontier,
    plan_frontier,
    save_frontier,
    select_plan,
)

T = TypeVar("T")
_log = logging.getLogger(__name__)


def run_experiment(config: ExperimentConfig, make_module: MakeModule, make_data: MakeData) -> None:
    """Profile, plan, train at the top clocks and under the plan, and report what was saved.

    Everything is written into `config.output_dir`.

    Args:
        config: The experiment.
        make_module: Makes the LightningModule; called once for each training, after seeding.
        make_data: Makes the LightningDataModule; called likewise.

    Raises:
        ConfigurationError: If a setting cannot work; before any training.
        PlanError: If no plan meets `config.plan.select`.
    """
    if few_gpus(config):
        _log.warning("%s", few_gpus(config))
    config = dataclasses.replace(config, gpu=gpu_for(config))
    quiet_lightning()
    if is_emulated(config) and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # processes with threads cannot be cloned; each rank gets its share when it begins
    check_experiment(config, make_module, make_data)
    output_dir = Path(config.output_dir)
    say = _Narrator()

    schedule = schedule_of(config)
    say(f"1/4 Profiling {pipeline_size(schedule.num_stages, schedule.num_microbatches)}")
    profile(config, make_module, make_data, output_dir / "profile.csv")

    say("2/4 Planning")
    frontier, chosen = on_rank_zero(lambda: _plan(config, output_dir))

    say(f"3/4 Training {config.trainer.steps} steps at the top clocks")
    baseline = train(config, make_module, make_data, TOP_CLOCKS, name=TOP_CLOCKS)

    say(f"4/4 Training {config.trainer.steps} steps under the plan ({config.plan.select})")
    planned = train(config, make_module, make_data, chosen, name="plan")

    on_rank_zero(lambda: _report(config, frontier, chosen, baseline, planned, say))


def on_rank_zero(action: Callable[[], T]) -> T:
    """Run `action` on rank 0, and return its result or raise its PfoError on every rank. A collective call."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except PfoError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def gpu_for(config: ExperimentConfig) -> GpuConfig:
    """The GPU to measure. Trained on the CPU, `gpu=auto` is emulated: a real one would stand idle."""
    if config.gpu.kind == "auto" and accelerator_of(config) == "cpu":
        return dataclasses.replace(config.gpu, kind="emulated")
    return config.gpu


def _plan(config: ExperimentConfig, output_dir: Path) -> tuple[Frontier, FrequencyPlan]:
    settings = config.plan
    if settings.switch_latency_s is None and config.gpu.lead_clocks:  # clocks are there when they are needed
        settings = dataclasses.replace(settings, switch_latency_s=0.0)
    frontier = plan_frontier(
        output_dir / "profile.csv",
        settings,
        num_microbatches=config.schedule.num_microbatches,
        schedule=config.schedule.name,
    )
    select = config.plan.select
    chosen = frontier.baseline if select == TOP_CLOCKS else select_plan(frontier, select)
    save_frontier(frontier, output_dir / "plans")
    return frontier, chosen


def _report(
    config: ExperimentConfig,
    frontier: Frontier,
    chosen: FrequencyPlan,
    baseline: TrainingResult,
    planned: TrainingResult,
    say: _Narrator,
) -> None:
    gpu = open_gpu(config.gpu, 0)
    try:
        name, is_emulated = gpu.name, gpu.is_emulated
    finally:
        gpu.close()
    report = Report(name, is_emulated, baseline, planned, frontier.baseline, chosen, dataclasses.asdict(config))
    if report.max_loss_difference > 0:
        _log.warning(
            "The losses of both trainings differ by up to %.2g, although clocks change no arithmetic: a step of this "
            "model is not deterministic.",
            report.max_loss_difference,
        )
    for where, failure in report.clock_failures.items():
        _log.warning("The figures are not those of the plan, as clocks were not set (%s): %s", where, failure)
    output_dir = Path(config.output_dir)
    report.write(output_dir / "report.json")
    draw_pictures(frontier, chosen, report, output_dir)
    say.console.print()
    show_table(report.table(), say.console)
    say.console.print(f"Written to {output_dir}: report.json, profile.csv, plans, pictures.")


class _Narrator:
    """Says on rank 0 what happens, with the time since the start."""

    def __init__(self) -> None:
        self.console = plain_console()
        self._start_s = time.monotonic()

    def __call__(self, text: str) -> None:
        if is_first_process():  # of which the others may be clones
            self.console.print(f"[{time.monotonic() - self._start_s:5.1f} s] {text}")
