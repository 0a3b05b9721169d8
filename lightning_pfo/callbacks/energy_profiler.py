"""`EnergyProfilerCallback`: measures time and energy of every stage's instructions at each clock, during training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_pfo.callbacks.glue import RunCallback, instruction_source_of, ranks_per_node
from lightning_pfo.core.errors import PfoError
from lightning_pfo.listeners.gpu_session import DEFAULT_CLUSTER, ClusterChoice, GpuChoice
from lightning_pfo.listeners.profiling_run import ProfilingRun, ScanSettings


class EnergyProfilerCallback(RunCallback[ProfilingRun]):
    """Scans clocks from the highest down while the model trains, and writes the profile that the planner reads.

    At each clock, every stage's forward and backward are measured over several iterations. An instruction whose energy
    rises five times in a row has passed its energy valley and is measured no more. Training itself is not changed:
    losses are those of a run without this callback.

    The CSV has a row per stage, instruction and clock (s and J per microbatch and GPU), with standard errors and the
    P2P blocking power measured at that clock; it is replaced, whole, after each clock. Replicas of the pipeline and
    the processes of tensor parallelism have rows of their own, told apart by columns `dp_rank` and `tp_rank`.

    A scan sets clocks. Where any rank may not, it stops on all ranks, writes no profile and says why (`error`);
    training goes on, unless `stop_when_done`.

    Logged metrics: `pfo/clock_mhz` (the clock being measured on rank 0, also in the progress bar).

    Args:
        output: The CSV file to write.
        gpu: `auto` (NVML, else emulated), a name such as `nvml` or `emulated_a40`, a `GpuConfig`, or a `Gpu`.
        cluster: How emulated GPUs are connected: a name of conf/cluster such as `nvlink` or `ideal`, or a
            `ClusterConfig`.
        clock_step_mhz: Scan clocks at least this far apart, MHz; None: as `scan_step_mhz` of the GPU's
            configuration says, else every supported clock.
        min_clock_mhz: Do not go below this clock, MHz; None: `scan_min_mhz` of the GPU's configuration, else as far as
            needed.
        iterations_per_clock: Iterations measured at each clock, at least.
        max_iterations_per_clock: At most so many; None: ten times `iterations_per_clock`.
        target_error: Where the energy counter ticks, measure until two standard errors of each energy are below this
            share of it: 0.02 is 2 %. Energies that stay above are flagged `energy_uncertain`.
        warmup_iterations: Iterations before that, in which the clock settles.
        patience: Rises of energy in a row after which an instruction is measured no more.
        stop_when_done: Stop training when the scan is finished.

    Raises:
        ConfigurationError: Before training, if a number is out of range or the strategy emits no instruction events.

    Example::

        profiler = EnergyProfilerCallback("profile.csv", clock_step_mhz=60)
        Trainer(strategy="pfo_pipeline", devices=4, callbacks=[profiler]).fit(model, train_loader)
    """

    def __init__(
        self,
        output: str | os.PathLike[str] = "profile.csv",
        *,
        gpu: GpuChoice = "auto",
        cluster: ClusterChoice = DEFAULT_CLUSTER,
        clock_step_mhz: int | None = None,
        min_clock_mhz: int | None = None,
        iterations_per_clock: int = 3,
        warmup_iterations: int = 1,
        patience: int = 5,
        max_iterations_per_clock: int | None = None,
        target_error: float = 0.02,
        stop_when_done: bool = False,
    ) -> None:
        self.output = Path(output)
        self._gpu, self._cluster = gpu, cluster
        self._settings = ScanSettings(
            clock_step_mhz,
            min_clock_mhz,
            iterations_per_clock,
            warmup_iterations,
            patience,
            max_iterations_per_clock,
            target_error,
        )
        self._stop_when_done = stop_when_done

    @property
    def done(self) -> bool:
        """Whether the scan is finished, or has ended early."""
        return self._run is not None and self._run.done

    @property
    def error(self) -> PfoError | None:
        """What has ended the scan early, on whichever rank; the same on every rank."""
        return self._run.error if self._run is not None else None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._run = ProfilingRun(
            instruction_source_of(trainer, self),
            self.output,
            settings=self._settings,
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
        if self._run is None:
            return
        clock_mhz = float(self._run.scan.clock_mhz)
        pl_module.log("pfo/clock_mhz", clock_mhz, prog_bar=True, on_step=True, on_epoch=False, batch_size=1)
        if self._run.done and self._run.is_open:
            self._run.close()
            if self.error is None and self._run.is_written:
                _report(f"the profile is complete: {self.output}")
        if self._stop_when_done and self._run.done:
            trainer.should_stop = True

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._run is not None and not self._run.done:
            scan = self._run.scan
            rank_zero_warn(
                f"Training ended before the frequency scan: {scan.position} of up to {scan.num_clocks} "
                f"clocks were measured. Train for more steps, or scan fewer clocks with a larger clock_step_mhz."
            )
        super().on_train_end(trainer, pl_module)


def _report(message: str) -> None:
    rank_zero_info(f"EnergyProfilerCallback: {message}")
