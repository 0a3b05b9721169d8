"""Trains under random plans on emulated GPUs and compares with the planner, in virtual time; prints what was checked.

All ranks run the same examples: hypothesis is derandomised, and what an example sees is the same on every rank.
"""

import math
import random
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.callbacks import EnergyProfilerCallback, FrequencyPlanCallback
from lightning_pfo.core.frequency_plan import FrequencyPlan, WaitClock
from lightning_pfo.device import load_cluster_config, load_gpu_config
from lightning_pfo.listeners import PlannedRun, ProfilingRun, ScanSettings
from lightning_pfo.loops.plain import PipelinedModel
from lightning_pfo.planner import plan_frontier
from lightning_pfo.planner.pipeline.timeline import simulate_plan
from lightning_pfo.planner.profile.blocking_power import resolve_blocking
from lightning_pfo.planner.profile.profile_csv import read_profile
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

GPU = replace(load_gpu_config("emulated_a40"), clock_latency_s=0.0, min_clock_mhz=1020)
SCAN = ScanSettings(clock_step_mhz=360, iterations_per_clock=1, warmup_iterations=1, patience=100)
IDEAL = load_cluster_config("ideal")
SLOW = replace(load_cluster_config("pcie"), gpus_per_node=2)  # over the network 17 ms, as long as instructions
SCHEDULES = (
    *("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"),
    *("envpipe", "envpipe:1,0"),
)
FOLDER = Path(sys.argv[1])


class Pipeline:
    """A small model under a schedule, and a profile of it."""

    def __init__(self, schedule, gpu=GPU, cluster=IDEAL, num_microbatches=4, **options):
        torch.manual_seed(0)
        widths = [4, 8, 16, 32, 24, 16, 8]  # stages that differ
        layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
        net = nn.Sequential(*layers, nn.Linear(widths[-1], 3))
        self.gpu, self.cluster = gpu, cluster
        self.model = PipelinedModel(
            net,
            nn.functional.cross_entropy,
            num_microbatches=num_microbatches,
            schedule=schedule,
            check_loss=False,
            **options,
        )
        self.source = self.model.instruction_source
        self.batch = torch.randn(4 * num_microbatches, 4), torch.randint(0, 3, (4 * num_microbatches,))
        self.path = FOLDER / f"{schedule.replace(':', '-')}.csv"
        with ProfilingRun(
            self.source, self.path, settings=SCAN, gpu=replace(gpu, noise=0.0), cluster=cluster
        ) as profiling:
            while not profiling.done:
                self.model.step(*self.batch)
        dist.barrier()
        self.profile = read_profile(self.path)
        self.blocking = resolve_blocking(self.profile, self.source.schedule, None)

    def measure(self, plan):
        """What an iteration under the plan takes when others went before."""
        with PlannedRun(self.source, plan, gpu=self.gpu, cluster=self.cluster) as run:
            # the first counts work; where clocks land late, the one before decides at which clocks one begins
            for _ in range(3 if self.gpu.clock_latency_s else 2):
                self.model.step(*self.batch)
                run.measure()
        return run.measurements[-1]

    def plans(self, with_waits):
        """Random clocks for instructions, and for some waits."""
        schedule = self.source.schedule
        first = schedule.instructions[0]
        clock = st.sampled_from(self.profile.of(first.stage, first.type).clocks_mhz)
        rows = st.tuples(*(st.tuples(*(clock for _ in order)) for order in schedule.orders))
        places = [(rank, position) for rank, order in enumerate(schedule.orders) for position in range(len(order) + 1)]
        waits = st.lists(
            st.tuples(st.sampled_from(places), clock, st.floats(0, 0.1)),
            max_size=4 if with_waits else 0,
            unique_by=lambda wait: wait[0],
        ).map(lambda waits: tuple(WaitClock(*place, mhz, hold_s) for place, mhz, hold_s in sorted(waits)))
        return st.builds(
            lambda rows, waits: FrequencyPlan(schedule, rows, math.nan, math.nan, wait_clocks=waits), rows, waits
        )

    def check(self, examples, latency_s=0.0, with_waits=False):
        """Compare random plans, to 1e-9."""

        @settings(derandomize=True, database=None, deadline=None, max_examples=examples, phases=[Phase.generate])
        @given(self.plans(with_waits))
        def measured_is_predicted(plan):
            predicted = simulate_plan(self.profile, plan, self.blocking, switch_latency_s=latency_s)
            measured = self.measure(plan)
            check_equal(measured, predicted)

        measured_is_predicted()

    def check_frontier(self, latency_s=0.0, **limits):
        """Compare the plans that the planner makes with what it says of them."""
        frontier = plan_frontier(self.path, num_microbatches=4, num_plans=4, switch_latency_s=latency_s, **limits)
        for plan in frontier.plans:
            check_equal(self.measure(plan), plan)


def check_equal(measured, predicted):
    for quantity, unit in (("time", "s"), ("energy", "J")):
        seen = getattr(measured, f"{quantity}_{unit.lower()}")
        expected = getattr(predicted, f"iteration_{quantity}_{unit.lower()}")
        assert math.isclose(seen, expected, rel_tol=1e-9), f"{quantity}: measured {seen} {unit}, predicted {expected}"


class Module(L.LightningModule):
    """Half of each block on each of two GPUs; gradients of two batches are accumulated."""

    def configure_model(self):
        widths = [8, 16, 12, 20]
        blocks = (nn.Sequential(nn.Linear(8, w), nn.Tanh(), nn.Linear(w, 8)) for w in widths)
        self.model = nn.Sequential(*blocks, nn.Linear(8, 3))
        for block in self.model[:-1]:
            parallelize_module(
                block, self.device_mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
            )

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(callback, steps=-1):
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        max_steps=steps,
        accumulate_grad_batches=2,
        val_check_interval=2,  # evaluation takes no virtual time
        strategy=PfoPipelineStrategy(num_microbatches=4, tensor_parallel_size=2, check_loss=False),
        callbacks=[callback],
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    L.seed_everything(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    trainer.fit(Module(), DataLoader(data, batch_size=16), DataLoader(data, batch_size=16))


def check_tensor_parallel(path):
    options = {"gpu": GPU, "cluster": IDEAL}
    fit(EnergyProfilerCallback(path, stop_when_done=True, **vars(SCAN), **options))
    dist.barrier()
    frontier = plan_frontier(path, num_microbatches=4, num_plans=2)
    draw = random.Random(0)
    clocks_mhz = frontier.profile.of(0, frontier.schedule.instructions[0].type).clocks_mhz
    rows = tuple(tuple(draw.choice(clocks_mhz) for _ in order) for order in frontier.schedule.orders)
    plan = FrequencyPlan(frontier.schedule, rows, math.nan, math.nan)
    applied = FrequencyPlanCallback(plan, **options)
    fit(applied, steps=3)
    check_equal(applied.measurements[-1], simulate_plan(frontier.profile, plan, frontier.blocking))


def say(what):
    if dist.get_rank() == 0:
        print(what, flush=True)


def two_ranks():
    for name in SCHEDULES:
        Pipeline(name).check(examples=2)
        say(name)
    for name in ("zbv", "interleaved_1f1b"):
        Pipeline(name, cluster=SLOW).check(examples=2)
        say(f"transfers {name}")


def four_ranks():
    # Between iterations there is time for the first clock to land, as the planner assumes.
    late, pause = replace(GPU, clock_latency_s=0.013), replace(IDEAL, optimizer_s=0.05)
    pipeline = Pipeline("1f1b", gpu=late, cluster=pause)
    pipeline.check(examples=5, latency_s=0.013, with_waits=True)
    say("latency")
    pipeline.check_frontier(latency_s=0.013, least_dwell_s=0.02, change_cost_j=0.1)
    say("limits")
    Pipeline("1f1b", data_parallel_size=2).check(examples=3, with_waits=True)
    say("replicas")
    pipeline = Pipeline("1f1b", cluster=SLOW)
    pipeline.check(examples=4, with_waits=True)
    pipeline.check_frontier()
    say("transfers 1f1b")
    check_tensor_parallel(FOLDER / "tensor.csv")
    say("tensor parallel")


run_ranks(two_ranks, 2)
run_ranks(four_ranks, 4)
