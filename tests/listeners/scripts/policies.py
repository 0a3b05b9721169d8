"""Trains under other systems' plans on emulated GPUs and compares with what is predicted; prints what was checked.

One pipeline under 1F1B and one under EnvPipe's early forwards; each is profiled, and every plan runs for an iteration.
"""

import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.core.envpipe import RECONFIGURATIONS
from lightning_pfo.device import load_cluster_config, load_gpu_config
from lightning_pfo.listeners import OnlineEnvPipe, PlannedRun, ProfilingRun, ScanSettings
from lightning_pfo.loops.plain import PipelinedModel
from lightning_pfo.planner import plan_frontier
from lightning_pfo.planner.policies.envpipe import TYPES, EnvPipe
from tests.ranks import run_ranks

GPU = replace(load_gpu_config("emulated_v100"), clock_latency_s=0.0)
# Half as fine as EnvPipe's own for a V100, which takes half as long.
ENVPIPES_RANGE = {"scan_max_mhz": 1530, "scan_min_mhz": 810, "scan_step_mhz": 180}
OPTIONS = {"gpu": replace(GPU, **ENVPIPES_RANGE), "cluster": load_cluster_config("ideal")}
PROFILE = Path(sys.argv[1]) / "profile.csv"


def make_model(schedule):
    torch.manual_seed(0)
    widths = [4, 32, 16, 24, 24, 24, 24]  # the last stage is the heaviest
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    net = nn.Sequential(*layers, nn.Linear(widths[-1], 3))
    return PipelinedModel(net, nn.functional.cross_entropy, num_microbatches=5, schedule=schedule, check_loss=False)


def on_rank_zero(function, *arguments, **options):
    result = [function(*arguments, **options) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result)
    return result[0]


def check(model, policies):
    batch = torch.randn(10, 4), torch.randint(0, 3, (10,))
    for policy in policies:
        frontier = on_rank_zero(plan_frontier, PROFILE, num_microbatches=5, policy=policy, num_plans=4)
        plan = frontier.own_choice
        with PlannedRun(model.instruction_source, plan, **OPTIONS) as run:
            for _ in range(2):  # the first counts work
                model.step(*batch)
                run.measure()
        measured = run.measurements[-1]
        assert math.isclose(measured.time_s, plan.iteration_time_s, rel_tol=1e-9), (frontier.policy, measured)
        assert math.isclose(measured.energy_j, plan.iteration_energy_j, rel_tol=1e-9), (frontier.policy, measured)
        if dist.get_rank() == 0:
            print(f"{frontier.policy} {frontier.schedule.name.partition(':')[0]}", flush=True)


def check_online(model, batch):
    """From the envelope's plan without reconfiguration on, whatever is measured decides."""
    begin = on_rank_zero(plan_frontier, PROFILE, num_microbatches=5, policy="envpipe_envelope_default")
    top_mhz = begin.baseline.clocks_mhz[0][0]
    online = OnlineEnvPipe(begin.own_choice, top_mhz=top_mhz)
    with PlannedRun(model.instruction_source, online, **OPTIONS) as run:
        while not online.finished and len(run.measurements) < 100:
            model.step(*batch)
            run.measure()
    assert online.finished
    assert online.num_changes > 0
    clocks = [clock for row in online.plan.clocks_mhz for clock in row]
    begun = [clock for row in begin.own_choice.clocks_mhz for clock in row]
    assert all(before <= after <= top_mhz for before, after in zip(begun, clocks, strict=True))
    # A tenth of an instruction may hide.
    assert run.measurements[-1].time_s <= 1.02 * begin.baseline.iteration_time_s < begin.own_choice.iteration_time_s
    assert run.measurements[-1].energy_j < begin.baseline.iteration_energy_j
    if dist.get_rank() == 0:
        print(f"online after {len(run.measurements)} iterations", flush=True)


def three_ranks():
    model = make_model("1f1b")
    batch = torch.randn(10, 4), torch.randint(0, 3, (10,))
    settings = ScanSettings(iterations_per_clock=1, warmup_iterations=1, patience=100)
    with ProfilingRun(model.instruction_source, PROFILE, settings=settings, **OPTIONS) as profiling:
        while not profiling.done:
            model.step(*batch)
    dist.barrier()
    check_online(model, batch)
    envpipe = [EnvPipe(kind, "1f1b", reconfig) for kind in TYPES[1:] for reconfig in RECONFIGURATIONS]
    check(model, ["envpipe_baseline", *envpipe, "zeus_global", "zeus_per_stage_power_limit", "perseus"])
    for kind in TYPES[1:]:  # the order depends on the valleys, and so on the type
        early = [replace(policy, scheduling="ours") for policy in envpipe if policy.type == kind]
        order = on_rank_zero(plan_frontier, PROFILE, num_microbatches=5, policy=early[0], num_plans=4).schedule
        check(make_model(order.name), early)


run_ranks(three_ranks, 3)
