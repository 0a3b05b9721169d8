"""Runs that optimise themselves on emulated GPUs; every rank writes FOLDER/rank_N.json."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
from common import DEVICES, fit

from lightning_pfo.callbacks import PipelineFrequencyOptimizerCallback, PlanSweepCallback
from lightning_pfo.core.errors import ClockPermissionError
from lightning_pfo.device import EmulatedGpu, load_gpu_config
from lightning_pfo.listeners.optimizer.settings import OptimizerSettings
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

GPU = load_gpu_config("emulated_a100")
SETTINGS = OptimizerSettings(num_iterations=100_000, most_rounds=2, pairs=2)
STEPS, MOST_STEPS = 26, 44
results = {}


def optimized(name, folder, steps=STEPS, state=None, gpu=GPU, further=(), settings=SETTINGS, **options):
    """One training; notes what came of it."""
    callback = PipelineFrequencyOptimizerCallback(gpu=gpu, output_dir=folder, settings=settings, **options)
    if state is not None:
        callback.load_state_dict(json.loads(json.dumps(state)))
    _, module = fit([callback, *further], max_steps=steps, strategy=PfoPipelineStrategy(num_microbatches=6))
    run = callback.run
    results[name] = {
        "losses": module.history["train"],
        "states": [step.state.value for step in run.ledger.steps],
        "times_s": [step.time_s for step in run.ledger.steps],
        "energies_j": [step.energy_j for step in run.ledger.steps],
        "planned": [step.is_planned for step in run.ledger.steps],
        "problem": run.problem,
        "notes": run.notes,
        "places": sorted([row.stage, row.instruction, row.frequency] for row in run.memory.rows),
        "measured": [[row.stage, row.instruction, row.frequency, row.time, row.energy] for row in run.memory.rows],
        "clocks": run.plan and run.plan.clocks_mhz,
        "summary": {key: value for key, value in run.summary().items() if key not in ("baseline", "plan")},
        "open": run._session.gpu._is_locked,
    }
    return callback


class Slower(L.Callback):
    """The GPU of stage 1 gets slower while the plan is held: its windows in turn show it."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        run = next(one for one in trainer.callbacks if isinstance(one, PipelineFrequencyOptimizerCallback)).run
        if run.state.value == "Hold" and run._session.gpu.index == 1:
            run._session.gpu._duration_factor = 1.1


def refuse(gpu, clock_mhz):
    raise ClockPermissionError("This user may not set clocks.")


def main(folder):
    folder = Path(folder)
    _, plain = fit([], max_steps=MOST_STEPS, strategy=PfoPipelineStrategy(num_microbatches=6))
    results["plain"] = plain.history["train"]
    whole = optimized("whole", folder / "whole", cache_dir=folder / "cache")
    cut = optimized("cut_measuring", folder / "cut", 6)
    cut = optimized("cut_again", folder / "checkpoint", 7, state=cut.state_dict())
    optimized("resumed", folder / "resumed", state=cut.state_dict())
    for name, sampled in (("sweep_cut", 2), ("sweep", 4)):  # the second goes on with what the first has left
        sweep = PlanSweepCallback(
            folder / "whole" / "plans", folder / "sweep.csv", iterations=2, num_plans=sampled, seed=3, gpu=GPU,
            stop_when_done=True,
        )  # fmt: skip
        _, module = fit([sweep], max_steps=100, strategy=PfoPipelineStrategy(num_microbatches=6))
        results[name] = {"losses": module.history["train"], "rows": list(sweep.rows.values())}
    often = SETTINGS.changed(check_every=4, pairs=1)
    optimized(
        "drifting", folder / "drifting", MOST_STEPS, cache_dir=folder / "cache", further=[Slower()], settings=often
    )
    lock, EmulatedGpu.lock_graphics_clock = EmulatedGpu.lock_graphics_clock, refuse
    optimized("no_permission", folder / "no_permission", 8)
    EmulatedGpu.lock_graphics_clock = lock
    assert whole.plan is not None
    (folder / f"rank_{torch.distributed.get_rank()}.json").write_text(json.dumps(results))


run_ranks(main, DEVICES, sys.argv[1])
