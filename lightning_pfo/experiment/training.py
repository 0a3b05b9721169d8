"""One training of an experiment: the same weights and batches each time, whatever the clocks are."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning_utilities.core import rank_zero as rank_zero_module

from lightning_pfo.callbacks import EnergyProfilerCallback, FrequencyPlanCallback
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.wording import did_you_mean
from lightning_pfo.experiment.config import ExperimentConfig
from lightning_pfo.experiment.report import TrainingResult
from lightning_pfo.strategy import PfoPipelineStrategy

MakeModule = Callable[[], pl.LightningModule]
MakeData = Callable[[], pl.LightningDataModule]

_SET_ELSEWHERE = {
    "accelerator": "trainer.accelerator",
    "devices": "trainer.devices",
    "num_nodes": "trainer.num_nodes",
    "precision": "trainer.precision",
    "max_steps": "trainer.steps",
    "max_epochs": "trainer.steps",
    "limit_train_batches": "trainer.steps",
    "callbacks": "profiler and plan",
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


def profile(config: ExperimentConfig, make_module: MakeModule, make_data: MakeData, path: Path) -> None:
    """Train while scanning the clocks, until the profile at `path` is complete.

    Raises:
        DeviceError: On every rank, if any may not set clocks or fails to.
    """
    profiler = EnergyProfilerCallback(
        path, gpu=config.gpu, cluster=config.cluster, stop_when_done=True, **vars(config.profiler)
    )
    with progress_messages():
        _fit(config, make_module, make_data, [profiler], max_epochs=-1, limit_val_batches=0, enable_progress_bar=False)
    if profiler.error is not None:
        raise profiler.error


def train(
    config: ExperimentConfig, make_module: MakeModule, make_data: MakeData, plan: FrequencyPlan | str, name: str
) -> TrainingResult:
    """Train `config.trainer.steps` steps under a plan, or under `top_clocks`, and measure.

    Args:
        config: The experiment.
        make_module: Makes the module, with new weights.
        make_data: Makes the data.
        plan: Clocks to train with.
        name: Folder within `output_dir` for the log of metrics.
    """
    settings = config.trainer
    history = LossHistory()
    applied = FrequencyPlanCallback(plan, gpu=config.gpu, cluster=config.cluster)
    trainer = _fit(
        config,
        make_module,
        make_data,
        [history, applied],
        max_steps=settings.steps,
        max_epochs=settings.steps,
        limit_train_batches=settings.steps,  # else the progress bar counts on the whole epoch
        limit_val_batches=settings.val_batches,
        val_check_interval=settings.steps,
        check_val_every_n_epoch=None,
        logger=CSVLogger(config.output_dir, name=name, version=""),
        log_every_n_steps=1,
        enable_progress_bar=settings.progress_bar,
    )
    measured = [one for one in applied.measurements if one.iteration >= settings.warmup_steps]
    val_loss = trainer.callback_metrics.get("val_loss")
    return TrainingResult(
        tuple(one.time_s for one in measured),
        tuple(one.energy_j for one in measured),
        history.losses,
        None if val_loss is None else float(val_loss),
        applied.clock_statistics.as_dict() if applied.clock_statistics is not None else {},
        applied.mean_energy_j(len(measured)),
        {rank: clocks.as_dict() for rank, clocks in applied.clock_statistics_of_ranks().items()},
    )


def accelerator_of(config: ExperimentConfig) -> str:
    """Resolve `auto`: GPUs if each rank of this machine gets one, else the CPU."""
    if config.trainer.accelerator != "auto":
        return config.trainer.accelerator
    return "gpu" if torch.cuda.device_count() >= config.trainer.devices else "cpu"


def few_gpus(config: ExperimentConfig) -> str:
    """What follows, in a line, where the machine has some GPUs, but not one for each rank; empty otherwise."""
    num_gpus, num_ranks = torch.cuda.device_count(), config.trainer.devices
    if config.trainer.accelerator != "auto" or not 0 < num_gpus < num_ranks:
        return ""
    is_modelled = config.gpu.kind in ("auto", "emulated")
    modelled = f", and times, clocks and energies are those of an emulated {config.gpu.model}" if is_modelled else ""
    return (
        f"{num_ranks} stages (trainer.devices) need {num_ranks} GPUs, and this machine has {num_gpus}: the model "
        f"trains on the CPU{modelled}. Use trainer.devices={num_gpus} to train on the GPU."
    )


def is_emulated(config: ExperimentConfig) -> bool:
    """Whether neither the training nor the GPU that is measured needs a driver, whose state forks cannot share."""
    return accelerator_of(config) == "cpu" and config.gpu.kind == "emulated"


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


def _fit(
    config: ExperimentConfig,
    make_module: MakeModule,
    make_data: MakeData,
    callbacks: Sequence[Callback],
    **options: Any,
) -> pl.Trainer:
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
        "devices": settings.devices,
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
    )
    try:
        return pl.Trainer(strategy=strategy, callbacks=list(callbacks), **defaults | options | settings.options)
    except (MisconfigurationException, ImportError, TypeError, ValueError) as error:
        raise ConfigurationError(f"Lightning's Trainer refuses the settings of trainer: {error}") from error
