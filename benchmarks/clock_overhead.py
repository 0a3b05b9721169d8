"""What instruction events and clock control cost a training step: with them against without them.

    python benchmarks/clock_overhead.py [gpu=auto] [steps=20] [microbatches=8] [instruction_ms=20] [sets_clocks=false]

A pipeline of one stage is trained by plain torch, in turns without any listener and under plans that change the clock
with every instruction, the worst case. Prints one JSON line: `overhead_percent` of a step with its standard error,
and `verdict`: whether that is within the limit of 0.5 %, with two standard errors to spare. Exits with 1 if it is not.

With CUDA and a real GPU, instructions are matrix products of about `instruction_ms`, and `overhead_percent` compares
step times. `sets_clocks=false` is a dry run: requests go all the way and are read back (never reached, so reading costs
the most), but the GPU keeps its clocks, and no permission is needed. With `sets_clocks=true` the plans change between
the neighbours of one clock, and steps at that clock are compared with.

Without, instructions sleep that long, the clocks are those of an emulated GPU (with gpu=nvml those of the real one),
and `overhead_percent` is the CPU time of the training thread as a share of the step; `all_threads_percent` that of all
threads, which run beside it. That is the host's part; a GPU's own part is not in it.
"""

from __future__ import annotations

import json
import logging
import math
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

from lightning_pfo.cli.settings import read_settings, without_dashes
from lightning_pfo.core.errors import PfoError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.device import Gpu, GpuConfig, load_gpu_config, open_gpu
from lightning_pfo.device.backends.nvml import nvml_available
from lightning_pfo.device.clocks.transition import ClockStatistics
from lightning_pfo.listeners import PlannedRun
from lightning_pfo.loops import PipelinedModel

WIDTH = 4096
LIMIT_PERCENT = 0.5
STEPS_PER_TURN = 2
SETTLE_S = 0.1


@dataclass
class Settings:
    """What can be told on the command line."""

    gpu: str = "auto"
    steps: int = 20
    microbatches: int = 8
    instruction_ms: float = 20.0
    sets_clocks: bool = False
    share: bool = False


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
    config.time = "real"  # what its threads cost is to be measured
    config.dry_run, config.share = not settings.sets_clocks, settings.share
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
    plans, middle_mhz = _plans(schedule, gpu.supported_clocks_mhz())
    turns: list[tuple[Cost, Cost]] = []
    measure(step, 2, device)  # warm up

    def plain() -> Cost:
        if settings.sets_clocks:
            gpu.lock_graphics_clock(middle_mhz)
            time.sleep(SETTLE_S)
        try:
            return measure(step, STEPS_PER_TURN, device)
        finally:
            gpu.restore()

    def planned(plan: FrequencyPlan) -> tuple[Cost, ClockStatistics]:
        with PlannedRun(model.instruction_source, plan, gpu=gpu, num_gpus=1) as run:

            def planned_step() -> None:
                step()
                run.measure()

            planned_step()  # the first one checks the plan
            return measure(planned_step, STEPS_PER_TURN, device), run.clock_statistics

    for turn in range(max(2, settings.steps // STEPS_PER_TURN)):
        plan = plans[turn % 2]
        if turn // 2 % 2 == 0:  # in both orders, as a GPU warms up
            without, (led, clocks) = plain(), planned(plan)
        else:
            (led, clocks), without = planned(plan), plain()
        turns.append((without, led))
    step_s = statistics.median(cost.wall_s for cost, _ in turns)
    if device.type == "cuda":
        overheads = [led.wall_s / cost.wall_s - 1 for cost, led in turns]
    else:
        overheads = [(led.thread_s - cost.thread_s) / step_s for cost, led in turns]
    beside_s = statistics.median(led.process_s - cost.process_s for cost, led in turns)
    num_instructions = len(schedule.orders[0])
    return {
        "gpu": gpu.name,
        "training": device.type,
        "instructions_per_step": num_instructions,
        "step_s": round(step_s, 5),
        "all_threads_percent": round(100 * beside_s / step_s, 3),
        "cpu_us_per_instruction": round(1e6 * beside_s / num_instructions, 1),
        "clocks": str(clocks),
        **judge(overheads),
    }


def _plans(schedule: PipelineSchedule, supported_mhz: tuple[int, ...]) -> tuple[list[FrequencyPlan], int]:
    """Two plans that change the clock with each instruction, and the clock at which steps take as long as theirs.

    Forwards are above that clock and backwards below it, or the other way round: on average nothing is won or lost.
    """
    middle = min(
        range(1, len(supported_mhz) - 1), key=lambda index: abs(supported_mhz[index] - 0.75 * supported_mhz[0])
    )
    above_mhz, middle_mhz, below_mhz = supported_mhz[middle - 1 : middle + 2]
    pairs = ((above_mhz, below_mhz), (below_mhz, above_mhz))
    rows = [tuple(pair[index % 2] for index in range(len(schedule.orders[0]))) for pair in pairs]
    return [FrequencyPlan(schedule, (row,), 1.0, 1.0) for row in rows], middle_mhz


def judge(overheads: list[float]) -> dict[str, Any]:
    """The overhead in per cent, its standard error, and what follows for the limit."""
    overhead = 100 * statistics.median(overheads)
    # that of a median of normal values, from a spread that single outliers do not change
    spread = 1.4826 * statistics.median(abs(100 * value - overhead) for value in overheads)
    stderr = 1.2533 * spread / math.sqrt(len(overheads))
    if overhead + 2 * stderr <= LIMIT_PERCENT:
        verdict = "within the limit"
    elif overhead - 2 * stderr > LIMIT_PERCENT:
        verdict = "ABOVE THE LIMIT"
    else:
        verdict = "undecided: give more steps"
    return {
        "overhead_percent": round(overhead, 3),
        "stderr_percent": round(stderr, 3),
        "limit_percent": LIMIT_PERCENT,
        "verdict": verdict,
    }


def main(arguments: list[str]) -> int:
    """Measure, print, judge."""
    logging.basicConfig(level=logging.WARNING)
    try:
        result = run(read_settings(Settings, without_dashes(arguments)))
    except PfoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return int(result["verdict"] == "ABOVE THE LIMIT")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
