"""`FrequencyPlanCallback`: trains under a frequency plan and measures what it costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_pfo.callbacks.glue import RunCallback, instruction_source_of, ranks_per_node
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.device.clocks.transition import ClockStatistics
from lightning_pfo.listeners.gpu_session import DEFAULT_CLUSTER, ClusterChoice, GpuChoice
from lightning_pfo.listeners.meters.iterations import IterationMeasurement
from lightning_pfo.listeners.planned_run import TOP_CLOCKS, PlanChoice, PlannedRun, chosen_plan, frontier_of
from lightning_pfo.planner.adaptive.windows import MeanEnergy

__all__ = ["TOP_CLOCKS", "FrequencyPlanCallback"]

Key = TypeVar("Key")


class FrequencyPlanCallback(RunCallback[PlannedRun]):
    """Sets the clock of every instruction as a plan says, and measures time and energy of each iteration.

    Before the first step the plan is checked against the pipeline: stages, microbatches, order, supported clocks.

    Logged metrics: `pfo/iteration_time_s` (s; from the first forward to the last backward) and
    `pfo/iteration_energy_j` (J; all GPUs in that time).

    Args:
        plan: A frontier file (`frontier.json` or its folder), a `Frontier`, a `FrequencyPlan`, or `"top_clocks"` for
            the highest clock everywhere, the baseline to compare with; or a function that says which plan an iteration
            has, by its number (None: the top clocks).
        select: Which plan of a frontier: `no_slowdown`, `1.02x`, `2.84s`, `T'=2.9s`, ...; see `select_plan`.
        gpu: `auto` (NVML, else emulated), a name such as `nvml` or `emulated_a40`, a `GpuConfig`, or a `Gpu`.
        cluster: How emulated GPUs are connected: a name of conf/cluster such as `nvlink` or `ideal`, or a
            `ClusterConfig`.

    Raises:
        PlanError: When constructed, if the file is malformed or the selection is impossible.
        PlanMismatchError: Before the first step, on every rank, if the plan does not fit the pipeline.

    Example::

        callback = FrequencyPlanCallback("plans/frontier.json", select="no_slowdown")
        Trainer(strategy="pfo_pipeline", devices=4, callbacks=[callback]).fit(model, train_loader)
    """

    def __init__(
        self,
        plan: PlanChoice,
        *,
        select: str = "no_slowdown",
        gpu: GpuChoice = "auto",
        cluster: ClusterChoice = DEFAULT_CLUSTER,
    ) -> None:
        frontier = frontier_of(plan)
        self._plan = chosen_plan(plan if frontier is None else frontier, select)
        self._measured_on = () if frontier is None else frontier.profile.gpus
        self._gpu, self._cluster = gpu, cluster

    @property
    def plan(self) -> FrequencyPlan | None:
        """The plan in use; for `top_clocks`, and for plans by iteration, None until the pipeline is known."""
        if self._run is not None:
            return self._run.plan
        return None if callable(self._plan) else self._plan

    @property
    def measurements(self) -> list[IterationMeasurement]:
        """What the iterations of this run took so far."""
        return self._run.measurements if self._run is not None else []

    def mean_energies(self, group_of: Callable[[int], Key | None]) -> dict[Key, MeanEnergy]:
        """Mean energy in the iterations of each group; see `PlannedRun.mean_energies`. A collective call."""
        return self._run.mean_energies(group_of) if self._run is not None else {}

    @property
    def gpu_name(self) -> str | None:
        """What was measured: the model of this rank's GPU, `(emulated)` where it is; None before training."""
        return self._run.gpu_name if self._run is not None else None

    @property
    def clock_statistics(self) -> ClockStatistics | None:
        """What became of this rank's clock changes; None before training."""
        return self._run.clock_statistics if self._run is not None else None

    def clock_statistics_of_ranks(self) -> dict[str, ClockStatistics]:
        """What became of all ranks' clock changes, by name, such as `rank 1`; a collective call."""
        return self._run.clock_statistics_of_ranks() if self._run is not None else {}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._run = PlannedRun(
            instruction_source_of(trainer, self),
            self._plan,
            gpu=self._gpu,
            cluster=self._cluster,
            num_gpus=ranks_per_node(trainer),
            measured_on=self._measured_on,
            user=self,
            report=_report,
        )

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        measurement = self._run.measure() if self._run is not None else None
        if measurement is None:
            return
        for name, value in (("time_s", measurement.time_s), ("energy_j", measurement.energy_j)):
            pl_module.log(f"pfo/iteration_{name}", value, on_step=True, on_epoch=False, batch_size=1)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._run is not None and self._run.is_open:
            self._run.measure(waits=True)
            self._run.tell_failures()
        super().on_train_end(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._run is not None and self._run.is_open:
            self._run.request_top_clock()


def _report(message: str) -> None:
    rank_zero_info(f"FrequencyPlanCallback: {message}")
