"""Profiles and trains under a plan in an Accelerate loop; every rank writes FOLDER/rank_N.json."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from net import NetWithLoss, make_loaders

from lightning_pfo.accelerate import prepare_pipeline
from lightning_pfo.core.errors import PfoError
from lightning_pfo.core.frequency_plan import uniform_plan
from lightning_pfo.core.schedules.registry import one_f_one_b
from lightning_pfo.device import load_gpu_config
from lightning_pfo.listeners import OptimizedRun, OptimizerSettings, PlannedRun, ProfilingRun, ScanSettings
from lightning_pfo.planner import load_frontier, plan_frontier, save_frontier
from tests.ranks import run_ranks

GPU = load_gpu_config("emulated_a100")
FOLDER = Path(sys.argv[1])


def train(accelerator, listen, is_done):
    """Train until `is_done(run, losses)`; `listen` attaches to the pipeline and gives `run`."""
    set_seed(3)
    net = NetWithLoss(width=32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader, _ = make_loaders(num_samples=64)
    model, optimizer, loader = prepare_pipeline(
        accelerator, net, optimizer, loader, num_microbatches=4, pipeline_module="layers"
    )
    losses = []
    with listen(model.instruction_source) as run:
        while True:
            for x, y in loader:
                loss = model(x=x, labels=y).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if isinstance(run, PlannedRun):
                    run.measure()
                if is_done(run, losses):
                    return losses, run


def six(run, losses):
    return len(losses) == 6


def main():
    accelerator = Accelerator(cpu=True)
    results = {"plain": train(accelerator, lambda source: nullcontext(), six)[0]}
    settings = ScanSettings(clock_step_mhz=300, iterations_per_clock=2)
    results["profiled"], _ = train(
        accelerator,
        lambda source: ProfilingRun(source, FOLDER / "profile.csv", settings=settings, gpu=GPU),
        lambda run, losses: run.done,
    )
    if accelerator.is_main_process:
        save_frontier(plan_frontier(FOLDER / "profile.csv", num_microbatches=4, num_plans=10), FOLDER / "plans")
    accelerator.wait_for_everyone()
    plan = load_frontier(FOLDER / "plans").least_energy
    for name, chosen in (("top", None), ("plan", plan)):
        losses, run = train(accelerator, lambda source, chosen=chosen: PlannedRun(source, chosen, gpu=GPU), six)
        measured = [[m.iteration, m.time_s, m.energy_j] for m in run.measurements]
        results[name] = {"losses": losses, "measured": measured, "restored": not run._session.gpu._is_locked}
    wanted = OptimizerSettings(pairs=1, most_rounds=1)
    losses, run = train(
        accelerator,
        lambda source: OptimizedRun(source, FOLDER / "one_run", settings=wanted, gpu=GPU),
        lambda run, losses: run.state.value == "Hold",
    )
    results["one_run"] = {"losses": losses, "summary": run.summary(), "restored": not run._session.gpu._is_locked}
    try:
        unfit = uniform_plan(one_f_one_b(2, 8), [1410] * 2)
        train(accelerator, lambda source: PlannedRun(source, unfit, gpu=GPU), six)
    except PfoError as error:
        results["unfit"] = [type(error).__name__, str(error)]
    (FOLDER / f"rank_{accelerator.process_index}.json").write_text(json.dumps(results))


run_ranks(main, 2)
