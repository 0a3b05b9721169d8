"""`PlanSweepCallback`: measures several plans of a frontier in one training."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_pfo.callbacks.glue import RunCallback, instruction_source_of, ranks_per_node
from lightning_pfo.listeners.gpu_session import DEFAULT_CLUSTER, ClusterChoice, GpuChoice
from lightning_pfo.listeners.optimizer.sweep import FrontierChoice, PlanSweep


class PlanSweepCallback(RunCallback[PlanSweep]):
    """Trains under every plan of a frontier, or some of them, and writes what each takes against what it promises.

    In random order, a line of CSV per plan; what is in the file already is not measured again.

    Args:
        frontier: A frontier file (`frontier.json` or its folder), or a `Frontier`.
        output: The CSV file to write, or to go on with.
        iterations: Iterations measured under each plan.
        num_plans: Measure so many of them, drawn at random; None: all.
        seed: Of the order.
        gpu: `auto`, a name such as `nvml` or `emulated_a40`, a `GpuConfig`, or a `Gpu`.
        cluster: How emulated GPUs are connected.
        stop_when_done: Stop training when all are measured.

    Example::

        sweep = PlanSweepCallback("plans", "measured.csv", iterations=10, num_plans=20, stop_when_done=True)
        Trainer(strategy="pfo_pipeline", devices=4, max_epochs=-1, callbacks=[sweep]).fit(model, train_loader)
    """

    def __init__(
        self,
        frontier: FrontierChoice,
        output: str | os.PathLike[str] = "measured_plans.csv",
        *,
        iterations: int = 5,
        num_plans: int | None = None,
        seed: int = 0,
        gpu: GpuChoice = "auto",
        cluster: ClusterChoice = DEFAULT_CLUSTER,
        stop_when_done: bool = False,
    ) -> None:
        self._frontier, self._output = frontier, output
        self._iterations, self._num_plans, self._seed = iterations, num_plans, seed
        self._gpu, self._cluster, self._stop_when_done = gpu, cluster, stop_when_done

    @property
    def rows(self) -> dict[int, dict[str, float]]:
        """What was measured so far, by plan number."""
        return self._run.rows if self._run is not None else {}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._run = PlanSweep(
            instruction_source_of(trainer, self),
            self._frontier,
            self._output,
            iterations=self._iterations,
            num_plans=self._num_plans,
            seed=self._seed,
            gpu=self._gpu,
            cluster=self._cluster,
            num_gpus=ranks_per_node(trainer),
            user=self,
            report=_report,
        )

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._run is not None and self._run.done:
            self._run.close()
            trainer.should_stop = trainer.should_stop or self._stop_when_done


def _report(message: str) -> None:
    rank_zero_info(f"PlanSweepCallback: {message}")
