"""The trainings of an experiment: the same weights and batches each time, whatever the clocks are."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning_utilities.core import rank_zero as rank_zero_module

from lightning_pfo.callbacks import EnergyProfilerCallback, FrequencyPlanCallback
from lightning_pfo.callbacks.frequency_plan import TOP_CLOCKS
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.wording import did_you_mean
from lightning_pfo.experiment.accelerator import accelerator_of, devices_of_ranks, is_emulated
from lightning_pfo.experiment.command_line.instances import make_callbacks, make_loggers
from lightning_pfo.experiment.config import ExperimentConfig
from lightning_pfo.experiment.windows import Training
from lightning_pfo.listeners.online_envpipe import OnlineEnvPipe
from lightning_pfo.planner.adaptive.verification import Verified, verified
from lightning_pfo.planner.adaptive.windows import Windows
from lightning_pfo.planner.profile.profile import Profile
from lightning_pfo.planner.settings import PlanSettings
from lightning_pfo.strategy import PfoPipelineStrategy

MakeModule = Callable[[], pl.LightningModule]
MakeData = Callable[[], pl.LightningDataModule]

_MOST_RECONFIGURING_STEPS = 1000
"""Each change raises a clock, and eleven steps without one end it; but noise may keep changing the path."""

_SET_ELSEWHERE = {
    "accelerator": "trainer.accelerator",
    "devices": "trainer.devices",
    "num_nodes": "trainer.num_nodes",
    "precision": "trainer.precision",
    "max_steps": "trainer.steps",
    "max_epochs": "trainer.steps",
    "limit_train_batches": "trainer.steps",
    "callbacks": "callbacks",
    "logger": "logger",
    "strategy": "schedule.name and schedule.partition",
}
"""Arguments of Lightning's Trainer that the experiment depends on, and the settings they follow."""


class LossHistory(Callback):
    """Keeps the training loss of every step, on its device: reading it would wait for the GPU."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []

    @property
    def losses(self) -> tuple[float, ...]:
        """The losses so far."""
        return tuple(float(loss) for loss in self._losses)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss."""
        self._losses.append(outputs["loss"].detach().clone())


class StopWhen(Callback):
    """Ends the training when something is so, on all ranks alike.

    Args:
        is_done: Whether it is.
    """

    def __init__(self, is_done: Callable[[], bool]) -> None:
        self._is_done = is_done

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End it."""
        trainer.should_stop = trainer.should_stop or self._is_done()


def profile(config: ExperimentConfig, make_module: MakeModule, make_data: MakeData, path: Path) -> tuple[float, ...]:
    """Train while scanning the clocks, until the profile at `path` is complete; returns the losses.

    Raises:
        DeviceError: On every rank, if any may not set clocks or fails to.
    """
    profiler = EnergyProfilerCallback(
        path, gpu=config.gpu, cluster=config.cluster, stop_when_done=True, **vars(config.profiler)
    )
    history = LossHistory()
    callbacks = [history, profiler]
    with progress_messages():
        fit(config, make_module, make_data, callbacks, max_epochs=-1, limit_val_batches=0, enable_progress_bar=False)
    if profiler.error is not None:
        raise profiler.error
    return history.losses


def train(
    config: ExperimentConfig,
    make_module: MakeModule,
    make_data: MakeData,
    plan: FrequencyPlan,
    others: Mapping[str, FrequencyPlan] = MappingProxyType({}),
) -> Training:
    """Train in windows at the top clocks and under the plan in turn, and measure.

    Args:
        config: The experiment.
        make_module: Makes the module, with new weights.
        make_data: Makes the data.
        plan: What the top clocks are compared with.
        others: Further plans, which have their windows in the same training.

    Raises:
        ConfigurationError: If a callback has ended the training before any pair of windows was measured.
    """
    windows, plans = windows_of(config), (None, plan, *others.values())
    num_steps, history = windows.num_steps, LossHistory()
    applied = FrequencyPlanCallback(
        lambda step: plans[windows.place_of(step)[1]], gpu=config.gpu, cluster=config.cluster
    )
    further = make_callbacks(config.callbacks)
    trainer = fit(
        config,
        make_module,
        make_data,
        [history, applied, *further],
        max_steps=num_steps,
        max_epochs=num_steps,
        limit_train_batches=num_steps,  # else the progress bar counts on the whole epoch
        limit_val_batches=config.trainer.val_batches,
        val_check_interval=num_steps,
        check_val_every_n_epoch=None,
        enable_checkpointing=any(isinstance(one, Checkpoint) for one in further),
        logger=make_loggers(config.logger) or False,
        log_every_n_steps=1,
        enable_progress_bar=config.trainer.progress_bar,
    )
    val_loss = trainer.callback_metrics.get("val_loss")
    own, *further_plans = _in_windows(windows, applied)
    return Training(
        own.baseline,
        own.plan,
        history.losses,
        None if val_loss is None else float(val_loss),
        {rank: clocks.as_dict() for rank, clocks in applied.clock_statistics_of_ranks().items()},
        dict(zip(others, further_plans, strict=True)),
    )


def reconfigure(
    config: ExperimentConfig, make_module: MakeModule, make_data: MakeData, begin: FrequencyPlan, profile: Profile
) -> OnlineEnvPipe:
    """Train while EnvPipe reconfigures its plan from measured waits, until it stays, or for long enough.

    Args:
        config: The experiment.
        make_module: Makes the module, with new weights.
        make_data: Makes the data.
        begin: The plan to begin with.
        profile: Says which clocks are measured: only these are taken, up to the top one.
    """
    settings = config.plan
    measured_mhz = set.intersection(*(set(one.clocks_mhz) for one in profile.instructions.values()))
    online = OnlineEnvPipe(
        begin,
        top_mhz=max(profile.top_clock_mhz(stage) for stage in range(profile.num_stages)),
        reconfig=settings.reconfig,
        step_mhz=settings.step_mhz,
        threshold_scale=settings.threshold_scale,
        clocks_mhz=measured_mhz,
    )
    applied = FrequencyPlanCallback(online, gpu=config.gpu, cluster=config.cluster)
    callbacks = [applied, StopWhen(lambda: online.finished)]
    options = {"max_steps": _MOST_RECONFIGURING_STEPS, "max_epochs": -1, "limit_val_batches": 0}
    fit(config, make_module, make_data, callbacks, enable_progress_bar=False, **options)
    return online


def planning_of(config: ExperimentConfig) -> PlanSettings:
    """How to plan: where clocks are asked for in time, they are there when they are needed."""
    settings = config.plan
    if settings.select == TOP_CLOCKS:  # which are no plan
        settings = dataclasses.replace(settings, select="no_slowdown")
    if settings.switch_latency_s is None and config.gpu.lead_clocks:
        settings = dataclasses.replace(settings, switch_latency_s=0.0)
    return settings


def windows_of(config: ExperimentConfig) -> Windows:
    """How the training is divided."""
    settings = config.trainer
    num_plans = 1 + len(config.plan.compare)
    return Windows(settings.steps // settings.window_steps, settings.window_steps, settings.warmup_steps, num_plans)


def _in_windows(windows: Windows, applied: FrequencyPlanCallback) -> list[Verified]:
    """What was measured under each plan, and at the top clocks, in the pairs of which both were."""
    means = applied.mean_energies(windows.group_of)
    numbers = range(1, 1 + windows.num_plans)
    found = [verified(windows, 0, applied.measurements, means, number) for number in numbers]
    measured = [one for one in found if one is not None]
    if len(measured) < len(found):
        raise ConfigurationError(
            "Windows at the top clocks and under each plan are compared; the training ended before one of each was "
            f"measured, after {len(applied.measurements)} steps. Leave out the callbacks that end it, or train longer."
        )
    return measured


def quiet_lightning() -> None:
    """Silence what Lightning says to each Trainer, and its advice that does not apply to short trainings in memory."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*directory .* exists and is not empty.*",
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    ):
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def progress_messages() -> Iterator[None]:
    """Show what our strategy and callbacks say on rank 0. They speak through Lightning's logger, as it does itself."""
    logger = rank_zero_module.log
    logger.addFilter(_is_ours)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeFilter(_is_ours)


def _is_ours(record: logging.LogRecord) -> bool:
    return record.levelno > logging.INFO or "lightning_pfo" in Path(record.pathname).parts


def check_trainer_options(options: Mapping[str, Any]) -> None:
    """Check that Lightning's Trainer knows all `options`, and that the experiment leaves them open.

    Raises:
        ConfigurationError: Naming the first that it does not know and the closest that it does, or where it is set.
    """
    known = inspect.signature(pl.Trainer).parameters
    for name in options:
        if name in _SET_ELSEWHERE:
            raise ConfigurationError(f"trainer.options.{name} follows {_SET_ELSEWHERE[name]}. Set that.")
        if name not in known:
            raise ConfigurationError(
                f"trainer.options are keyword arguments of lightning.Trainer; got {name!r}.{did_you_mean(name, known)}"
            )


def fit(
    config: ExperimentConfig,
    make_module: MakeModule,
    make_data: MakeData,
    callbacks: Sequence[Callback],
    **options: Any,
) -> pl.Trainer:
    """Train with new weights, the same each time; returns the Trainer."""
    pl.seed_everything(config.seed, verbose=False)
    trainer = make_trainer(config, callbacks, options)
    trainer.fit(make_module(), make_data())
    return trainer


def make_trainer(config: ExperimentConfig, callbacks: Sequence[Callback], options: dict[str, Any]) -> pl.Trainer:
    """Make the Trainer of one phase.

    Args:
        config: The experiment.
        callbacks: Its callbacks.
        options: What the phase wants different from a Trainer that logs, saves and shows nothing.

    Raises:
        ConfigurationError: If Lightning refuses the settings.
    """
    schedule, settings = config.schedule, config.trainer
    check_trainer_options(settings.options)
    defaults: dict[str, Any] = {
        "accelerator": accelerator_of(config),
        "devices": 1 if settings.share_gpus else settings.devices,
        "num_nodes": settings.num_nodes,
        "precision": settings.precision,
        "logger": False,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    strategy = PfoPipelineStrategy(
        num_microbatches=schedule.num_microbatches,
        partition=schedule.partition,
        schedule=schedule.name,
        start_method="clone" if is_emulated(config) else "popen",
        **devices_of_ranks(config),
    )
    try:
        return pl.Trainer(strategy=strategy, callbacks=list(callbacks), **defaults | options | settings.options)
    except (MisconfigurationException, ImportError, TypeError, ValueError) as error:
        raise ConfigurationError(f"Lightning's Trainer refuses the settings of trainer: {error}") from error
