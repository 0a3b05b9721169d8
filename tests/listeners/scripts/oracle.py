"""Trains under random plans on emulated GPUs and compares with the planner, in virtual time; prints what was checked.

All ranks run the same examples: hypothesis is derandomised, and what an example sees is the same on every rank.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_pfo.core.frequency_plan import FrequencyPlan, WaitClock
from lightning_pfo.device import ClusterConfig, load_cluster_config, load_gpu_config
from lightning_pfo.listeners import PlannedRun, ProfilingRun, ScanSettings
from lightning_pfo.loops.plain import PipelinedModel
from lightning_pfo.planner.pipeline.timeline import simulate_plan
from lightning_pfo.planner.profile.blocking_power import resolve_blocking
from lightning_pfo.planner.profile.profile_csv import read_profile
from tests.ranks import run_ranks

GPU = replace(load_gpu_config("emulated_a40"), clock_latency_s=0.0, min_clock_mhz=1020)
SCAN = ScanSettings(clock_step_mhz=180, iterations_per_clock=1, warmup_iterations=0, patience=100)
IDEAL = load_cluster_config("ideal")
SCHEDULES = {
    "1f1b": {},
    "gpipe": {},
    "interleaved_1f1b": {},
    "interleaved_1f1b x 3": {"stages_per_rank": 3},
    "looped_bfs": {},
    "interleaved_zero_bubble": {},
    "zbv": {},
    "dualpipev": {},
    "envpipe": {},
    "envpipe:1,0": {},
}
FOLDER = Path(sys.argv[1])


class Pipeline:
    """A small model under a schedule, and a profile of it."""

    def __init__(self, schedule, gpu=GPU, cluster=IDEAL, num_microbatches=4, **options):
        torch.manual_seed(0)
        widths = [4, 8, 16, 32, 24, 16, 8]  # stages that differ
        layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(widths[:-1], widths[1:], strict=True)]
        net = nn.Sequential(*layers, nn.Linear(widths[-1], 3))
        self.gpu, self.cluster = gpu, cluster
        self.model = PipelinedModel(
            net, nn.functional.cross_entropy, num_microbatches=num_microbatches, schedule=schedule, **options
        )
        self.source = self.model.instruction_source
        self.batch = torch.randn(4 * num_microbatches, 4), torch.randint(0, 3, (4 * num_microbatches,))
        path = FOLDER / f"{schedule.replace(':', '-')}.csv"
        with ProfilingRun(self.source, path, settings=SCAN, gpu=replace(gpu, noise=0.0), cluster=cluster) as profiling:
            while not profiling.done:
                self.model.step(*self.batch)
        dist.barrier()
        self.profile = read_profile(path)
        self.blocking = resolve_blocking(self.profile, self.source.schedule, None)

    def measure(self, plan):
        """What an iteration under the plan takes when others went before."""
        with PlannedRun(self.source, plan, gpu=self.gpu, cluster=self.cluster) as run:
            for _ in range(3):  # the first counts work
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
        return st.builds(lambda rows, waits: FrequencyPlan(schedule, rows, math.nan, math.nan, wait_clocks=waits), rows, waits)

    def check(self, examples, latency_s=0.0, with_waits=False):
        """Compare random plans, to 1e-9."""

        @settings(derandomize=True, database=None, deadline=None, max_examples=examples)
        @given(self.plans(with_waits))
        def measured_is_predicted(plan):
            predicted = simulate_plan(self.profile, plan, self.blocking, switch_latency_s=latency_s)
            measured = self.measure(plan)
            assert math.isclose(measured.time_s, predicted.iteration_time_s, rel_tol=1e-9), (measured, predicted)
            assert math.isclose(measured.energy_j, predicted.iteration_energy_j, rel_tol=1e-9), (measured, predicted)

        measured_is_predicted()


def two_ranks():
    for name, options in SCHEDULES.items():
        Pipeline(name.split()[0], **options).check(examples=5)
        print(name, flush=True) if dist.get_rank() == 0 else None


run_ranks(two_ranks, 2)
