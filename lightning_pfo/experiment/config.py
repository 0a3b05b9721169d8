"""The configuration of an experiment: the schema of the files in `conf/`.

A script declares its own `model` and `data` sections and gets everything checked before anything runs::

    @dataclass
    class Config(ExperimentConfig):
        model: GptConfig = MISSING
        data: TextConfig = MISSING

    @hydra_main("gpt", Config)  # lightning_pfo.hydra_app
    def main(config: Config) -> None: ...
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from lightning_pfo.device.config import GpuConfig
from lightning_pfo.device.emulated.cluster import ClusterConfig
from lightning_pfo.planner.settings import PlanSettings


@dataclass
class ScheduleConfig:
    """How the iteration is cut into instructions, and who runs which."""

    name: str = "1f1b"
    """Order of forwards and backwards."""
    num_microbatches: int = 8
    """Microbatches per iteration; it must be at least trainer.devices, and the batch size is best a multiple of it."""
    partition: str = "uniform"
    """Layers per stage: uniform, parameters, or the bounds themselves, such as custom:0,3,6,9,12."""


@dataclass
class TrainerConfig:
    """What Lightning's Trainer gets, and how long to train."""

    devices: int = 4
    """Processes per node; one pipeline stage each."""
    num_nodes: int = 1
    """Machines."""
    accelerator: str = "auto"
    """cpu, gpu, or auto: GPUs if this machine has `devices` of them, else the CPU."""
    share_gpus: bool = False
    """Several ranks train on each GPU, over gloo and without setting clocks: to try stages out where GPUs are few."""
    precision: str = "32-true"
    """Lightning's precision setting, such as 32-true or bf16-mixed."""
    steps: int = 16
    """Training steps at the top clocks, and as many under the plan, in one training."""
    window_steps: int = 2
    """Both take turns after this many steps, which divides `steps`. Six pairs of windows give intervals."""
    warmup_steps: int = 1
    """First steps of each window that are not measured."""
    val_batches: int = 4
    """Validation batches after the training; 0 for none."""
    progress_bar: bool = True
    """Show Lightning's progress bar on rank 0."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of lightning.Trainer, e.g. +trainer.options.gradient_clip_val=1.0."""


@dataclass
class ProfilerConfig:
    """How the clocks are scanned."""

    clock_step_mhz: int | None = None
    """Distance between scanned clocks in MHz; null for every clock that the GPU supports."""
    min_clock_mhz: int | None = None
    """Lowest clock to scan in MHz; null for the lowest that the GPU supports."""
    iterations_per_clock: int = 3
    """Measured iterations at each clock, at least."""
    max_iterations_per_clock: int | None = None
    """Measured iterations at each clock at most; null for ten times iterations_per_clock."""
    target_error: float = 0.02
    """Where the energy counter ticks, measure until two standard errors of each energy are below this share of it."""
    warmup_iterations: int = 1
    """Iterations at each clock before measuring."""
    patience: int = 5
    """Stop an instruction's scan when its energy has risen this many clocks in a row."""


@dataclass
class PlanConfig(PlanSettings):
    """How to plan, and which point of the frontier to train with."""

    compare: list[str] = field(default_factory=list)
    """Other policies to train under in the same training, in windows in turn with those of the plan and of the top
    clocks: such as [perseus, zeus_global, envpipe]; each takes its own choice."""
    auto: bool = False
    """Measure, plan, apply and verify in one training, instead of one after the other."""
    type: str = "envelope"
    """Of EnvPipe (plan.policy=envpipe), as are the following: baseline, uniform or envelope."""
    scheduling: str = "1f1b"
    """1f1b, or ours: EnvPipe's early forwards, for the training; the profile is measured under 1F1B, as in EnvPipe."""
    reconfig: str = "balanced"
    """default, greedy or balanced."""
    max_in_flight: int | None = None
    """Most microbatches whose activations fit into a stage's memory, for the early forwards; null for no limit."""
    step_mhz: int = 30
    """By how much a reconfiguration raises clocks, MHz; greedy takes three such steps at once."""
    online: bool = False
    """Reconfigure as EnvPipe was published: in a training, from the waits that are measured; see `OnlineEnvPipe`."""
    threshold_scale: float = 4.0
    """With online: waits of more than so many times the shortest one on the last stage are for a neighbour."""


@dataclass
class ExperimentConfig:
    """Everything an experiment needs. Scripts derive from it and give `model` and `data` a type."""

    name: str = MISSING
    """Name of the experiment, shown in titles."""
    model: Any = MISSING
    """The model; its keys depend on the script."""
    data: Any = MISSING
    """The data; its keys depend on the script."""
    gpu: GpuConfig = field(default_factory=GpuConfig)
    """The GPU whose clocks are set and whose energy is measured."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """How GPUs are connected, if they are emulated."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The pipeline schedule."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Training."""
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    """Profiling."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    """Planning."""
    callbacks: dict[str, Any] = field(default_factory=dict)
    """Further callbacks of the training: by any name, each with its class as `_target_`."""
    logger: dict[str, Any] = field(default_factory=dict)
    """Where its metrics go: by any name, Lightning's loggers, each with its class as `_target_`."""
    profile: str = ""
    """A profile that was measured before, to plan with instead of measuring; empty: measure."""
    seed: int = 0
    """Seed of weights and data order."""
    output_dir: str = MISSING
    """Folder of all results."""
