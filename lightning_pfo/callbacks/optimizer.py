"""`PipelineFrequencyOptimizerCallback`: one run that measures, plans, applies and verifies while it trains."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_pfo.callbacks.glue import RunCallback, instruction_source_of, ranks_per_node
from lightning_pfo.core.errors import PfoError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.listeners.gpu_session import DEFAULT_CLUSTER, ClusterChoice, GpuChoice
from lightning_pfo.listeners.optimizer.choosing.objectives import Objective
from lightning_pfo.listeners.optimizer.ledger import State
from lightning_pfo.listeners.optimizer.run import OptimizedRun
from lightning_pfo.listeners.optimizer.settings import OptimizerSettings
from lightning_pfo.pictures.report_page import write_page

log = logging.getLogger(__name__)


class PipelineFrequencyOptimizerCallback(RunCallback[OptimizedRun]):
    """Finds out during the first useful steps which clock each instruction is best run at, and trains under that plan.

    The losses are those of a run without it. The states are told in docs/callbacks.md: WarmUp and Measure (few clocks,
    in parts of iterations), Plan (beside the training), Verify (windows at the top clocks and under the plan in turn),
    Hold. What was measured is in every checkpoint, and in `output_dir`: `optimizer.json`, `profile.csv` and `plans`.
    Where clocks may not be set, the training goes on without a plan and says why.

    Logged, and in the progress bar: `pfo/iteration_time_s` (s), `pfo/iteration_energy_j` (J, all GPUs), `pfo/power_w`
    (W, all GPUs), and once a plan was verified `pfo/saving_percent`, `pfo/bound_saving_percent` (what no plan of its
    iteration time can save more than, proven) and `pfo/net_saving_j`: the energy that the run has saved so far, less
    what measuring has cost.

    Args:
        objective: Which plan is wanted: `no_slowdown`, `1.02x`, `350W`, `least_energy`, `least_edp`, ... as
            `select_plan` takes it, or an `Objective` such as `JobDeadline` and `EnergyPrice`.
        gpu: `auto` (NVML, else emulated), a name such as `nvml` or `emulated_a40`, a `GpuConfig`, or a `Gpu`.
        cluster: How emulated GPUs are connected.
        output_dir: Where results are kept; None: `pfo` in the Trainer's `default_root_dir`.
        cache_dir: Where to keep what was measured for further runs of the same job, which then start with a plan; None:
            `output_dir` only.
        settings: Further settings; `objective` and the number of steps of the Trainer go before theirs.

    Raises:
        ConfigurationError: Before training, if a number is out of range, the strategy emits no instruction events, or
            something else sets this GPU's clocks.
        PlanError: If the objective is not understood.

    Example::

        Trainer(strategy="pfo_pipeline", devices=4, callbacks=[PipelineFrequencyOptimizerCallback()]).fit(model, loader)
    """

    def __init__(
        self,
        objective: str | Objective | None = None,
        *,
        gpu: GpuChoice = "auto",
        cluster: ClusterChoice = DEFAULT_CLUSTER,
        output_dir: str | os.PathLike[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        settings: OptimizerSettings | None = None,
    ) -> None:
        self._settings = settings or OptimizerSettings()
        if objective is not None:
            self._settings = self._settings.changed(select=objective)
        self._gpu, self._cluster = gpu, cluster
        self._output_dir, self._cache_dir = output_dir, cache_dir
        self._state: Mapping[str, Any] | None = None

    @property
    def run(self) -> OptimizedRun | None:
        """The run, with its state, frontier, plan and measurements; None before training."""
        return self._run

    @property
    def plan(self) -> FrequencyPlan | None:
        """The plan in use; None until there is one."""
        return self._run.plan if self._run is not None else None

    def set_straggler(self, t_prime_s: float | None) -> None:
        """See `OptimizedRun.set_straggler`; nothing before training."""
        if self._run is not None:
            self._run.set_straggler(t_prime_s)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        settings = self._settings
        if settings.num_iterations is None:
            settings = settings.changed(num_iterations=_iterations_left(trainer))
        self._run = OptimizedRun(
            instruction_source_of(trainer, self),
            Path(trainer.default_root_dir) / "pfo" if self._output_dir is None else self._output_dir,
            settings=settings,
            gpu=self._gpu,
            cluster=self._cluster,
            cache_dir=self._cache_dir,
            job=_job(trainer, pl_module),
            state=self._state,
            num_gpus=ranks_per_node(trainer),
            user=self,
            report=_report,
        )

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        run = self._run
        if run is None or run.latest is None or not run.is_open:
            return
        latest = run.latest
        values = {
            "pfo/iteration_time_s": latest.time_s,
            "pfo/iteration_energy_j": latest.energy_j,
            "pfo/power_w": latest.energy_j / latest.time_s,
        }
        if run.verified is not None:
            values |= {"pfo/saving_percent": run.verified.saving_percent, "pfo/net_saving_j": run.net_saving_j}
            bound = run.bound_saving_percent
            values |= {} if bound is None else {"pfo/bound_saving_percent": bound}
        for name, value in values.items():
            pl_module.log(name, value, prog_bar=True, on_step=True, on_epoch=False, batch_size=1)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._run is not None and self._run.is_open:
            self._run.request_top_clock()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        run = self._run
        is_trial = getattr(trainer, "fast_dev_run", False)
        if run is not None and run.is_open and run.state not in (State.HOLD, State.VERIFY) and not is_trial:
            _report(
                f"training ended in state {run.state.value}, before there was a plan; what was measured is kept in "
                f"{run.output_dir}, and the next run goes on with it."
            )
        super().on_train_end(trainer, pl_module)
        if run is not None and trainer.is_global_zero and not is_trial:
            try:
                saved_j = round(run.net_saving_j, 3) + 0.0  # sums of floats come to -4e-12
                _report(f"{saved_j:.4g} J saved so far, all in all; read {write_page(run.output_dir)}")
            except (PfoError, OSError) as error:  # the training is over, and its result is worth more
                log.warning("The page of the run cannot be written: %s", error)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._run.state_dict() if self._run is not None else dict(self._state or {})

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict


def _iterations_left(trainer: pl.Trainer) -> int | None:
    """Steps that are to come; None where that is not known. Those of accumulation count too."""
    steps = trainer.estimated_stepping_batches
    left = steps * trainer.accumulate_grad_batches - trainer.global_step * trainer.accumulate_grad_batches
    return int(left) if 0 < left < float("inf") else None


def _job(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, str]:
    """What measurements depend on, besides the pipeline and its GPUs."""
    shapes = [f"{name}{tuple(parameter.shape)}" for name, parameter in pl_module.named_parameters()]
    held = [name for name, parameter in pl_module.named_parameters() if not parameter.is_meta]
    return {
        "model": f"{type(pl_module).__name__} of {len(shapes)} parameters ({_digest(shapes)})",
        "partition": f"{len(held)} ({_digest(held)})",
        "precision": str(trainer.precision),
    }


def _digest(names: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(names).encode(), digest_size=4).hexdigest()


def _report(message: str) -> None:
    rank_zero_info(f"PipelineFrequencyOptimizer: {message}")
