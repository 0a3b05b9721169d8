"""The phases of an experiment.

::

    1 profile    every stage's instructions at each clock          profile.csv
    2 plan       on rank 0, given to all ranks                     plans/frontier.json, ...
    3 train      at the top clocks and under the plan in turn      training/metrics.csv
    report       on rank 0                                         report.json, pictures

With `plan=auto` all of it is one training; see `one_run`.

The processes that Lightning starts for the first training run what follows.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_pfo.callbacks.frequency_plan import TOP_CLOCKS
from lightning_pfo.cli.console import plain_console, show_table
from lightning_pfo.core.errors import ConfigurationError, PfoError
from lightning_pfo.core.files import write_text_atomically
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.wording import pipeline_size
from lightning_pfo.device import open_gpu
from lightning_pfo.experiment.accelerator import few_gpus, gpu_for, is_emulated
from lightning_pfo.experiment.checks import check_experiment, schedule_of
from lightning_pfo.experiment.compared import comparison_table
from lightning_pfo.experiment.config import ExperimentConfig
from lightning_pfo.experiment.earlier import begun, set_aside
from lightning_pfo.experiment.one_run.training import optimize
from lightning_pfo.experiment.pictures import draw_pictures
from lightning_pfo.experiment.planning import plan_experiment, plan_others, reconfigured
from lightning_pfo.experiment.processes import is_first_process
from lightning_pfo.experiment.report import Report
from lightning_pfo.experiment.training import (
    MakeData,
    MakeModule,
    profile,
    quiet_lightning,
    reconfigure,
    train,
    windows_of,
)
from lightning_pfo.experiment.windows import Training
from lightning_pfo.pictures.report_page import write_page
from lightning_pfo.planner import Frontier, save_frontier

T = TypeVar("T")
_log = logging.getLogger(__name__)


def run_experiment(config: ExperimentConfig, make_module: MakeModule, make_data: MakeData) -> None:
    """Profile, plan, train at the top clocks and under the plan in turn, and report what was saved.

    Everything is written into `config.output_dir`; what an earlier run has left there is moved into `earlier`.

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

    schedule, size = schedule_of(config), config.trainer
    if is_first_process():
        _prepare(output_dir, config.profile)
    if config.plan.auto:
        result = optimize(config, make_module, make_data, say)
        on_rank_zero(
            lambda: _report(
                config, result.frontier, result.plan, result.training, result.compared_losses, say, result.summary
            )
        )
        return
    scanned: tuple[float, ...] = ()
    if config.profile:
        say(f"1/3 Reusing the profile {config.profile}")
    else:
        say(f"1/3 Profiling {pipeline_size(schedule.num_stages, schedule.num_microbatches)}")
        scanned = profile(config, make_module, make_data, output_dir / "profile.csv")

    say("2/3 Planning")
    frontier, chosen = on_rank_zero(lambda: plan_experiment(config, output_dir))
    # A policy may have an order of its own, as EnvPipe's early forwards.
    ordered = dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, name=frontier.schedule.name))
    if config.plan.online:
        say("2/3 Training while the plan is reconfigured from measured waits")
        frontier, chosen = _reconfigure(ordered, make_module, make_data, frontier, chosen, say)
    others = on_rank_zero(lambda: plan_others(config, output_dir, frontier))

    windows = windows_of(config)
    say(
        f"3/3 Training {windows.num_steps} steps, at the top clocks and under the plan ({config.plan.select}) in turn, "
        f"{size.window_steps} each{'; beside ' if others else ''}{', '.join(others)}"
    )
    training = train(ordered, make_module, make_data, chosen, others)

    on_rank_zero(lambda: _report(config, frontier, chosen, training, scanned, say, others=others))


def _reconfigure(
    config: ExperimentConfig,
    make_module: MakeModule,
    make_data: MakeData,
    frontier: Frontier,
    begin: FrequencyPlan,
    say: _Narrator,
) -> tuple[Frontier, FrequencyPlan]:
    """The plan that EnvPipe's reconfiguration in a training ends with, in place of the one it began with."""
    online = reconfigure(config, make_module, make_data, begin, frontier.profile)
    how = "stays" if online.finished else "was still changing and is taken as it is"
    say(f"    after {online.num_changes} changes of clocks the plan {how}")
    name = f"envpipe_{config.plan.type}_{config.plan.reconfig}_online"
    frontier, plan = reconfigured(frontier, online.plan, name)
    if is_first_process():
        save_frontier(frontier, Path(config.output_dir) / "plans")
    return frontier, plan


def _prepare(output_dir: Path, profile: str) -> None:
    """Keep what an earlier run has left, and put the profile that is used again where others would be."""
    set_aside(output_dir, keep=profile)
    begun()
    target = output_dir / "profile.csv"
    if profile and not (target.exists() and target.samefile(profile)):
        write_text_atomically(target, Path(profile).read_text(encoding="utf-8-sig"))


def on_rank_zero(action: Callable[[], T]) -> T:
    """Run `action` on rank 0, and return its result or raise its PfoError on every rank. A collective call.

    Before the processes have met, as where no profile is measured, each runs it; they have the same files.
    """
    if not dist.is_initialized():
        return action()
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


def _report(
    config: ExperimentConfig,
    frontier: Frontier,
    chosen: FrequencyPlan,
    training: Training,
    scanned: tuple[float, ...],
    say: _Narrator,
    one_run: dict[str, Any] | None = None,
    others: Mapping[str, FrequencyPlan] = MappingProxyType({}),
) -> None:
    gpu = open_gpu(config.gpu, 0)
    try:
        name, is_emulated = gpu.name, gpu.is_emulated
    finally:
        gpu.close()
    settings = dataclasses.asdict(config)
    report = Report(
        name,
        is_emulated,
        training,
        frontier.baseline,
        chosen,
        settings,
        scanned,
        one_run,
        "max_frequency" if config.plan.select == TOP_CLOCKS else frontier.policy,
        dict(others),
    )
    if report.max_loss_difference:
        _log.warning(
            "The losses of this training and of that of the profile differ by up to %.2g, although clocks change no "
            "arithmetic: a step of this model is not deterministic.",
            report.max_loss_difference,
        )
    for where, failure in training.clock_failures.items():
        _log.warning("The figures are not those of the plan, as clocks were not set (%s): %s", where, failure)
    output_dir = Path(config.output_dir)
    say.console.print()
    show_table(report.table(), say.console)
    if report.policies:
        say.console.print()
        show_table(comparison_table(report.policies, f"One iteration on {name}"), say.console)
    try:  # after the table, which is not lost where the disk is full
        report.write(output_dir / "report.json")
        draw_pictures(frontier, chosen, report, output_dir)
        if one_run is not None:
            write_page(output_dir)
    except OSError as error:
        raise ConfigurationError(
            f"Results are written where there is room for them; {output_dir} has not all of them ({error}). Give "
            "another output_dir, or make room and run again."
        ) from error
    page = "" if one_run is None else "report.html, "
    say.console.print(f"Written to {output_dir}: {page}report.json, profile.csv, plans, pictures.")
    saved, slower = report.saving_percent, report.slowdown_percent
    _log.info("%s: the plan saved %.2f %% of energy and took %.2f %% longer", name, saved, slower)


class _Narrator:
    """Says on rank 0 what happens, with the time since the start."""

    def __init__(self) -> None:
        self.console = plain_console()
        self._start_s = time.monotonic()

    def __call__(self, text: str) -> None:
        if is_first_process():  # of which the others may be clones
            self.console.print(f"[{time.monotonic() - self._start_s:5.1f} s] {text}")
            _log.info("%s", text)
