"""The experiment as one run: a training that measures, plans and verifies by itself (`plan=auto`).

::

    1 train      with the optimizer, until its plan is verified           optimizer.json, profile.csv, plans
    2 compare    the first steps again, without it: the same losses
    report       on rank 0                                                report.json, report.html, pictures
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.callbacks import Checkpoint

from lightning_pfo.callbacks import PipelineFrequencyOptimizerCallback
from lightning_pfo.core.errors import DeviceError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.experiment.command_line.instances import make_callbacks, make_loggers
from lightning_pfo.experiment.config import ExperimentConfig
from lightning_pfo.experiment.training import (
    LossHistory,
    MakeData,
    MakeModule,
    StopWhen,
    fit,
    planning_of,
    progress_messages,
    windows_of,
)
from lightning_pfo.experiment.windows import Training
from lightning_pfo.listeners.optimizer.ledger import State
from lightning_pfo.listeners.optimizer.settings import OptimizerSettings
from lightning_pfo.planner.frontier.data import Frontier

COMPARED_STEPS = 8
"""So many first steps are trained again without the optimizer, to compare losses."""

_MOST_MEASURING_STEPS = 400
_LONG_TRAINING = 100_000
"""Steps: as much is measured as is worth it in a training of this length, of which this is the beginning."""


@dataclass(frozen=True)
class OneRun:
    """What came of it.

    Attributes:
        frontier: The plans.
        plan: The one that was verified.
        training: What its windows have shown.
        compared_losses: Losses of the first steps without the optimizer.
        summary: What the run tells of itself; see `OptimizedRun.summary`.
    """

    frontier: Frontier
    plan: FrequencyPlan
    training: Training
    compared_losses: tuple[float, ...]
    summary: dict[str, Any]


def optimize(
    config: ExperimentConfig,
    make_module: MakeModule,
    make_data: MakeData,
    say: Callable[[str], None],
) -> OneRun:
    """Train until the plan is verified, then compare losses.

    Raises:
        DeviceError: On every rank, if no plan came of it, as where clocks may not be set.
    """
    windows = windows_of(config)
    settings = OptimizerSettings(
        select=config.plan.select,
        min_clock_mhz=config.profiler.min_clock_mhz,
        target_error=config.profiler.target_error,
        pairs=windows.num_pairs,
        window_steps=windows.steps,
        warmup_steps=windows.warmup_steps,
        num_iterations=_LONG_TRAINING,
        planning=planning_of(config),
    )
    optimizer = PipelineFrequencyOptimizerCallback(
        gpu=config.gpu, cluster=config.cluster, output_dir=config.output_dir, settings=settings
    )

    def is_verified() -> bool:
        return optimizer.run is not None and optimizer.run.state is State.HOLD

    history = LossHistory()
    further = make_callbacks(config.callbacks)
    most = _MOST_MEASURING_STEPS + windows.num_steps
    say(f"1/2 Training under {config.plan.select!r} as soon as there is a plan, until it is verified")
    with progress_messages():
        trainer = fit(
            config,
            make_module,
            make_data,
            [history, optimizer, StopWhen(is_verified), *further],
            max_steps=most,
            max_epochs=most,
            limit_val_batches=config.trainer.val_batches,
            enable_checkpointing=any(isinstance(one, Checkpoint) for one in further),
            logger=make_loggers(config.logger) or False,
            log_every_n_steps=1,
            enable_progress_bar=False,
        )
    run = optimizer.run
    assert run is not None
    if run.frontier is None or run.plan is None or run.verified is None:
        raise DeviceError(
            "A run optimises itself where clocks can be measured and set; "
            f"{run.problem or f'the training ended in state {run.state.value}'}"
        )
    val_loss = trainer.callback_metrics.get("val_loss")
    training = Training(
        run.verified.baseline,
        run.verified.plan,
        history.losses,
        None if val_loss is None else float(val_loss),
        {rank: clocks.as_dict() for rank, clocks in run.run.clock_statistics_of_ranks().items()},
    )
    say(f"2/2 Training the first {COMPARED_STEPS} steps again without it, to compare losses")
    alone = LossHistory()
    fit(
        config,
        make_module,
        make_data,
        [alone],
        max_steps=COMPARED_STEPS,
        max_epochs=COMPARED_STEPS,
        limit_val_batches=0,
        enable_progress_bar=False,
    )
    return OneRun(run.frontier, run.plan, training, alone.losses, run.summary())
