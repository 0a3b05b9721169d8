"""A step of `Trainer.fit` with pfo_pipeline against a hand-written loop on torch.distributed.pipelining.

    python benchmarks/strategy_overhead.py [--ranks 2] [--steps 40] [--repeats 3] [--cases small large profiler plan]
    python benchmarks/strategy_overhead.py --replicas 2 --cases small large

Both train the same model on the same data with 1F1B on CPUs, in turn within one run: after each step of the Trainer, a
callback runs a step by hand, so that both see the same machine. A step of the Trainer is all between two of those:
loading the batch, the step, the optimizer, logging, all hooks. Prints one JSON line per case: medians of the step
times (s), of the ratio of neighbouring steps, and of their difference (ms), and the CPU time of a process for each.
With repeats, all cases are run again and again in turn, each in processes of its own, since where their memory happens
to lie changes the ratio by 2 %; each number is the median over the repeats. With replicas, the loop by hand wraps its
stage in torch's DistributedDataParallel.

Cases: `small` shows the fixed cost of a step (in ten times as many steps), `large` has steps of some 300 ms or more,
`profiler` and `plan` are `large` with that callback on an emulated GPU whose modelled times are shorter than the real
ones, so that it never sleeps; the plan asks for another clock at every instruction. (Two callbacks cannot set clocks in
one run, so they are measured one by one.) `alone` is the loop by hand of `small` in processes of its own, where gloo's
threads interrupt those that compute: beside the Trainer it shares process groups without that, see `in_background`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pfo.callbacks import EnergyProfilerCallback, FrequencyPlanCallback
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.device import load_gpu_config
from lightning_pfo.strategy import PfoPipelineStrategy

NUM_MICROBATCHES = 8
WARM_UP_STEPS = 3
SIZES = {"small": (16, 2), "large": (512, 88)}  # width of the layers, samples in a microbatch
GPU = replace(load_gpu_config("emulated_a100"), forward_s=1e-5, time="real")  # as its threads run beside a real GPU


def make_model(width: int, num_ranks: int) -> nn.Sequential:
    """Three layers for each rank."""
    torch.manual_seed(0)
    layers = []
    for _ in range(3 * num_ranks):
        block = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
        layers.append(nn.Sequential(*block))
    return nn.Sequential(*layers)


def make_loader(width: int, microbatch: int, steps: int, replicas: int) -> DataLoader[Any]:
    """One batch for each step and replica, in order."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps * replicas * NUM_MICROBATCHES * microbatch, width, generator=generator)
    return DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=NUM_MICROBATCHES * microbatch)


class Module(L.LightningModule):
    """What one writes with Lightning."""

    def __init__(self, width: int, num_ranks: int) -> None:
        super().__init__()
        self.model = make_model(width, num_ranks)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return and log the loss."""
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ByHand:
    """What one writes without Lightning: a stage, torch's schedule, an optimizer, a loop; DDP for replicas."""

    def __init__(self, width: int, microbatch: int, loader: DataLoader[Any], replicas: int) -> None:
        mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("dp", "pp"))
        self.rank, num_ranks = mesh.get_local_rank("pp"), mesh.size(1)
        layers = make_model(width, num_ranks)
        own: nn.Module = nn.Sequential(*layers[3 * self.rank : 3 * (self.rank + 1)])
        if replicas > 1:
            own = DistributedDataParallel(own, process_group=mesh.get_group("dp"))
            # which shuffles, as Lightning does
            of_replica = DistributedSampler(loader.dataset, replicas, mesh.get_local_rank("dp"))
            loader = DataLoader(loader.dataset, loader.batch_size, sampler=of_replica)
        example = torch.zeros(microbatch, width, requires_grad=self.rank > 0)
        stage = PipelineStage(
            own,
            self.rank,
            num_ranks,
            torch.device("cpu"),
            input_args=example,
            output_args=torch.zeros(microbatch, width, requires_grad=True),
            group=mesh.get_group("pp"),
        )
        self.is_last = self.rank == num_ranks - 1
        self.schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)
        self.optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3)
        self.batches = iter(loader)
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """Train one batch."""
        x, y = next(self.batches)
        losses: list[torch.Tensor] = []
        self.optimizer.zero_grad()
        args = (x,) if self.rank == 0 else ()
        self.schedule.step(*args, target=y if self.is_last else None, losses=losses, return_outputs=False)
        self.optimizer.step()
        if losses:
            self.losses.append(torch.stack(losses).detach().mean())


def restless_plan(num_ranks: int) -> FrequencyPlan:
    """A plan that changes the clock at every instruction."""
    schedule = make_schedule("1f1b", num_ranks, NUM_MICROBATCHES)
    clocks = (1410, 1215)
    rows = tuple(tuple(clocks[position % 2] for position in range(len(order))) for order in schedule.orders)
    return FrequencyPlan(schedule, rows, float("nan"), float("nan"))


class InTurn(L.Callback):
    """Runs a step by hand after each step of the Trainer, and takes the times of both."""

    def __init__(self, width: int, microbatch: int, loader: DataLoader[Any], replicas: int) -> None:
        self._arguments = (width, microbatch, loader, replicas)
        self.seconds: list[tuple[float, float]] = []
        self.cpu_seconds: list[tuple[float, float]] = []
        self.losses: list[torch.Tensor] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make the loop by hand, now that there is a process group."""
        self.by_hand = ByHand(*self._arguments)
        self._start = self._now()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        """The Trainer's step is over."""
        between = self._now()
        self.by_hand.step()
        end = self._now()
        self.seconds.append((between[0] - self._start[0], end[0] - between[0]))
        self.cpu_seconds.append((between[1] - self._start[1], end[1] - between[1]))
        self.losses.append(outputs["loss"])
        self._start = self._now()

    def _now(self) -> tuple[float, float]:
        dist.barrier()
        return time.perf_counter(), time.process_time()


def measure(case: str, num_ranks: int, replicas: int, steps: int, folder: Path) -> dict[str, Any]:
    """Run one case; returns what is printed."""
    width, microbatch = SIZES["small" if case == "small" else "large"]
    steps = (10 if case == "small" else 1) * steps + WARM_UP_STEPS
    loader = make_loader(width, microbatch, steps, replicas)
    in_turn = InTurn(width, microbatch, loader, replicas)
    callbacks: dict[str, list[L.Callback]] = {
        "profiler": [EnergyProfilerCallback(folder / "profile.csv", gpu=GPU, iterations_per_clock=10 * steps)],
        "plan": [FrequencyPlanCallback(restless_plan(num_ranks), gpu=GPU)],
    }
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks * replicas,
        strategy=PfoPipelineStrategy(num_microbatches=NUM_MICROBATCHES, data_parallel_size=replicas),
        max_epochs=1,
        callbacks=[*callbacks.get(case, []), in_turn],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(width, num_ranks), loader)
    if in_turn.by_hand.is_last and not torch.allclose(
        torch.stack(in_turn.losses), torch.stack(in_turn.by_hand.losses), rtol=1e-3
    ):
        raise RuntimeError(f"the two loops do not train alike: {in_turn.losses} and {in_turn.by_hand.losses}")
    seconds, cpu_seconds = in_turn.seconds[WARM_UP_STEPS:], in_turn.cpu_seconds[WARM_UP_STEPS:]
    return {
        "case": case,
        "ranks": num_ranks,
        "replicas": replicas,
        "steps": len(seconds),
        "trainer_s": round(median(trainer for trainer, _ in seconds), 5),
        "by_hand_s": round(median(by_hand for _, by_hand in seconds), 5),
        "ratio": round(median(trainer / by_hand for trainer, by_hand in seconds), 4),
        "difference_ms": round(1000 * median(trainer - by_hand for trainer, by_hand in seconds), 3),
        "least_difference_ms": round(1000 * (min(seconds)[0] - min(by_hand for _, by_hand in seconds)), 3),
        "cpu_ratio": round(median(trainer / by_hand for trainer, by_hand in cpu_seconds), 4),
        "cpu_difference_ms": round(1000 * median(trainer - by_hand for trainer, by_hand in cpu_seconds), 3),
    }


def measure_alone(num_ranks: int, steps: int) -> dict[str, Any]:
    """Run the loop by hand of `small` in processes without a Trainer; returns what is printed."""
    found = multiprocessing.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_ranks, steps, f"file://{folder}/store", found)
        multiprocessing.start_processes(run_alone, arguments, nprocs=num_ranks, start_method="fork")
    return {"case": "alone", "ranks": num_ranks, "steps": steps, "by_hand_s": round(median(found.get()), 5)}


def run_alone(rank: int, num_ranks: int, steps: int, store: str, found: Any) -> None:
    """One of its processes; the first tells the times of all steps."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    width, microbatch = SIZES["small"]
    by_hand = ByHand(width, microbatch, make_loader(width, microbatch, steps + WARM_UP_STEPS, 1), 1)
    seconds = []
    for _ in range(steps + WARM_UP_STEPS):
        dist.barrier()
        start = time.perf_counter()
        by_hand.step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        found.put(seconds[WARM_UP_STEPS:])
    dist.destroy_process_group()


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, for both loops.

    Else it may give memory back and ask for it anew within each step, in one loop more than in the other, and in each
    run otherwise: 0 to 20,000 page faults, which are up to 20 ms.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mmap_threshold, trim_threshold, top_pad = -3, -1, -2  # as malloc.h numbers them
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)
        mallopt(top_pad, 1 << 28)


def measure_in_turn(options: argparse.Namespace) -> None:
    """Run all cases again and again, each in processes of its own, and print the medians."""
    results: dict[str, list[dict[str, Any]]] = {case: [] for case in options.cases}
    for _ in range(options.repeats):
        for case, found in results.items():
            arguments = ["--ranks", options.ranks, "--steps", options.steps, "--replicas", options.replicas]
            command = [sys.executable, __file__, "--cases", case, *map(str, arguments)]
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            found.append(json.loads(next(line for line in output.splitlines() if line.startswith('{"case"'))))
            sys.stderr.write(f"{found[-1]}\n")
    for case, found in results.items():
        medians = {name: round(median(result[name] for result in found), 5) for name in found[0] if name != "case"}
        sys.stdout.write(json.dumps({"case": case, **medians}) + "\n")


def main() -> None:
    """Run the cases and print their results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--cases", nargs="+", default=["small", "large", "profiler", "plan"])
    options = parser.parse_args()
    if options.repeats > 1 or len(options.cases) > 1:
        return measure_in_turn(options)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    keep_freed_memory()
    if options.cases == ["alone"]:
        sys.stdout.write(json.dumps(measure_alone(options.ranks, 10 * options.steps)) + "\n")
        return None
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options.cases[0], options.ranks, options.replicas, options.steps, Path(folder))
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
