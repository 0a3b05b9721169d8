"""A cluster of emulated GPUs on one machine: iterations per minute, and the memory of all processes.

    python benchmarks/emulated_cluster.py [stages=16] [microbatches=64] [replicas=2] [schedule=1f1b] [steps=3]
        [width=32] [sequence_length=16] [gpu=emulated_a100] [gpu.KEY=VALUE ...]

Trains a small GPT of two layers per stage under the top clocks, a process per rank. Prints one JSON line; time and
memory are those of the steps after the first, in which emulated GPUs count their work. `memory_mb` is the sum of all
ranks' proportional set sizes (Linux) at the end, `cpu_s_per_iteration` that of their CPU times. With `gpu.time=real`
iterations take as long as they are modelled, or as the machine needs.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.callbacks import FrequencyPlanCallback
from lightning_pfo.callbacks.frequency_plan import TOP_CLOCKS
from lightning_pfo.cli.settings import read_settings, without_dashes
from lightning_pfo.core.errors import PfoError
from lightning_pfo.core.wording import pipeline_size
from lightning_pfo.device import GpuConfig, load_gpu_config
from lightning_pfo.experiment.training import quiet_lightning
from lightning_pfo.strategy import PfoPipelineStrategy

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt"))
from model import NUM_BYTES, Gpt, GptConfig

WARM_UP_STEPS = 1


@dataclass
class Settings:
    """What can be told on the command line, beside the keys of the GPU."""

    stages: int = 16
    microbatches: int = 64
    replicas: int = 2
    schedule: str = "1f1b"
    steps: int = 3
    width: int = 32
    sequence_length: int = 16
    gpu: str = "emulated_a100"


class Watch(L.Callback):
    """Notes when each step ends, and what the process has used by then."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """A step is over when it is on all ranks."""
        dist.barrier()
        self.ends.append((time.perf_counter(), time.process_time()))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Sum over the ranks while all of them have what they need for training."""
        steps = self.ends[WARM_UP_STEPS - 1 :]
        self.wall_s = (steps[-1][0] - steps[0][0]) / (len(steps) - 1)
        used = torch.tensor([own_memory_mb(), (steps[-1][1] - steps[0][1]) / (len(steps) - 1)])
        dist.all_reduce(used)
        self.memory_mb, self.cpu_s = used.tolist()


def own_memory_mb() -> float:
    """The share of this process in the memory of all: what it shares with n others counts as an n-th."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/smaps_rollup has no line 'Pss:', which Linux writes since 4.14")


def make_loader(settings: Settings) -> DataLoader[Any]:
    """One sequence of random bytes per microbatch."""
    samples = settings.microbatches * settings.replicas * (settings.steps + WARM_UP_STEPS)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(NUM_BYTES, (samples, settings.sequence_length + 1), generator=generator)
    return DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=settings.microbatches)


def run(settings: Settings, gpu: GpuConfig) -> dict[str, Any]:
    """Train; returns what is printed."""
    quiet_lightning()
    L.seed_everything(0, verbose=False)
    watch, plan = Watch(), FrequencyPlanCallback(TOP_CLOCKS, gpu=gpu)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=settings.stages * settings.replicas,
        strategy=PfoPipelineStrategy(
            num_microbatches=settings.microbatches,
            schedule=settings.schedule,
            data_parallel_size=settings.replicas,
            start_method="clone",
        ),
        max_epochs=1,
        callbacks=[watch, plan],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    blocks = GptConfig(2 * settings.stages - 2, settings.width, sequence_length=settings.sequence_length)
    trainer.fit(Gpt(blocks), make_loader(settings))
    measured = plan.measurements[WARM_UP_STEPS:]
    return {
        "pipeline": f"{pipeline_size(settings.stages, settings.microbatches)} x {settings.replicas} replicas",
        "schedule": settings.schedule,
        "iterations_per_minute": round(60 / watch.wall_s, 2),
        "emulated_iteration_time_s": round(statistics.median(one.time_s for one in measured), 4),
        "emulated_iteration_energy_j": round(statistics.median(one.energy_j for one in measured), 2),
        "cpu_s_per_iteration": round(watch.cpu_s, 2),
        "memory_mb": round(watch.memory_mb),
        "processes": settings.stages * settings.replicas,
    }


def main(arguments: list[str]) -> int:
    """Train and print what it took, on the first rank."""
    of_gpu = [argument.removeprefix("gpu.") for argument in arguments if argument.startswith("gpu.")]
    torch.set_num_threads(1)  # processes with threads cannot be cloned
    try:
        settings = read_settings(Settings, without_dashes([a for a in arguments if not a.startswith("gpu.")]))
        known = OmegaConf.structured(load_gpu_config(settings.gpu))
        result = run(settings, OmegaConf.to_object(OmegaConf.merge(known, OmegaConf.from_dotlist(of_gpu))))
    except PfoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if dist.get_rank() != 0:
        os._exit(0)  # Python's own way out writes to all memory, of which every clone would need a copy then
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
