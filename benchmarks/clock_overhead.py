"""What instruction events and clock control cost a training step: with them against without them.

    python benchmarks/clock_overhead.py [gpu=auto] [steps=20] [microbatches=8] [instruction_ms=20] [sets_clocks=false]

A pipeline of one stage is trained by plain torch, in turns without any listener and under a plan that changes the clock
with every instruction, the worst case. Prints one JSON line.

With CUDA and a real GPU, instructions are matrix products of about `instruction_ms`, and `step_overhead_percent` is the
median of the paired ratios of step times. `sets_clocks=false` is a dry run: requests go all the way and are read back
(never reached, so reading costs the most), but the GPU keeps its clocks, and no permission is needed.

Without, instructions sleep that long, the clocks are those of an emulated GPU, and CPU time is measured: that of
the training thread (`training_thread_percent`) and that of all threads, which run beside it (`all_threads_percent`),
each as a share of the step. That is the host's part; a GPU's own part is not in it.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.callbacks.planned_run import PlannedRun
from lightning_pfo.cli import read_settings, without_dashes
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.pipeline_schedule import make_schedule
from lightning_pfo.device import Gpu, GpuConfig, load_gpu_config, open_gpu
from lightning_pfo.device.nvml import nvml_available
from lightning_pfo.strategy.plain import PipelinedModel

WIDTH = 4096


@dataclass
class Settings:
    """What can be told on the command line."""

    gpu: str = "auto"
    steps: int = 20
    microbatches: int = 8
    instruction_ms: float = 20.0
    sets_clocks: bool = False


class _Sleep(torch.autograd.Function):
    """Takes a time forward and backward, without using the CPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sleep_s: float) -> torch.Tensor:
        ctx.sleep_s = sleep_s
        time.sleep(sleep_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.sleep_s)
        return gradients[0], None


class Sleeper(nn.Module):
    """A layer that takes its time."""

    def __init__(self, sleep_s: float) -> None:
        super().__init__()
        self.sleep_s = sleep_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Wait, and pass the input on."""
        return _Sleep.apply(x, self.sleep_s)  # type: ignore[no-any-return]


class KeptOpen:
    """A GPU that stays open from turn to turn. An emulated one takes clock requests but no time, told by this type."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)

    def close(self) -> None:
        """Do nothing."""


def make_model(settings: Settings, device: torch.device) -> tuple[nn.Sequential, torch.Tensor]:
    """A model whose forward takes about `instruction_ms`, and a batch for it."""
    if device.type == "cpu":
        layers: list[nn.Module] = [nn.Linear(8, 8), Sleeper(settings.instruction_ms / 1000), nn.Linear(8, 1)]
        return nn.Sequential(*layers), torch.randn(settings.microbatches, 8)
    layer = nn.Linear(WIDTH, WIDTH, device=device)
    x = torch.randn(WIDTH, WIDTH, device=device)
    layer_s = min(_timed(lambda: layer(x)) for _ in range(5))
    count = max(1, round(settings.instruction_ms / 1000 / layer_s))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, device=device) for _ in range(count)])
    return model, torch.randn(settings.microbatches * WIDTH, WIDTH, device=device)


def _timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin_s


@dataclass(frozen=True)
class Cost:
    """What a step took: wall time, CPU time of the training thread, CPU time of all threads."""

    wall_s: float
    thread_s: float
    process_s: float


def measure(step: Callable[[], object], count: int, device: torch.device) -> Cost:
    """The mean cost of some steps."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter(), time.thread_time(), time.process_time()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    end = time.perf_counter(), time.thread_time(), time.process_time()
    return Cost(*((after - before) / count for before, after in zip(begin, end, strict=True)))


def run(settings: Settings) -> dict[str, Any]:
    """Measure in turns, compare."""
    is_real = torch.cuda.is_available() and nvml_available() and not settings.gpu.startswith("emulated")
    device = torch.device("cuda", 0) if is_real else torch.device("cpu")
    config: GpuConfig = load_gpu_config(settings.gpu)
    config.dry_run = not settings.sets_clocks
    opened = open_gpu(config, 0)
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if is_real else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        try:
            return _compare(settings, device, KeptOpen(opened))
        finally:
            dist.destroy_process_group()
            opened.close()


def _compare(settings: Settings, device: torch.device, gpu: Any) -> dict[str, Any]:
    module, batch = make_model(settings, device)
    model = PipelinedModel(
        module, lambda output, _: output.square().mean(), num_microbatches=settings.microbatches, device=device
    )
    target = torch.zeros(len(batch), device=device)

    def step() -> None:
        model.step(batch, target)

    schedule = make_schedule("1f1b", 1, settings.microbatches)
    top_mhz, *_, low_mhz = [mhz for mhz in gpu.supported_clocks_mhz() if mhz >= gpu.supported_clocks_mhz()[0] / 2]
    row = [(top_mhz, low_mhz)[index % 2] for index in range(len(schedule.orders[0]))]
    plan = FrequencyPlan(schedule, (tuple(row),), 1.0, 1.0)
    turns: list[tuple[Cost, Cost]] = []
    per_turn, num_turns = 2, max(1, settings.steps // 2)
    measure(step, 2, device)  # warm up
    for _ in range(num_turns):
        plain = measure(step, per_turn, device)
        with PlannedRun(model.instruction_source, plan, gpu=gpu, num_gpus=1) as planned:

            def planned_step(planned: PlannedRun = planned) -> None:
                step()
                planned.measure()

            planned_step()  # the first one checks the plan
            turns.append((plain, measure(planned_step, per_turn, device)))
            changes = str(planned.clock_statistics)
    step_s = statistics.median(plain.wall_s for plain, _ in turns)

    def extra(cost: str) -> float:
        return statistics.median(getattr(led, cost) - getattr(plain, cost) for plain, led in turns)

    result: dict[str, Any] = {
        "gpu": gpu.name,
        "training": device.type,
        "instructions_per_step": len(row),
        "step_s": round(step_s, 5),
        "training_thread_percent": round(100 * extra("thread_s") / step_s, 3),
        "all_threads_percent": round(100 * extra("process_s") / step_s, 3),
        "cpu_us_per_instruction": round(1e6 * extra("process_s") / len(row), 1),
        "clocks": changes,
    }
    if device.type == "cuda":
        ratio = statistics.median(led.wall_s / plain.wall_s for plain, led in turns)
        result["step_overhead_percent"] = round(100 * (ratio - 1), 3)
    return result


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    print(json.dumps(run(read_settings(Settings, without_dashes(sys.argv[1:])))))
