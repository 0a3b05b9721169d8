"""Profiles, plans and trains under the plan on emulated GPUs; every rank writes OUTPUT/rank_N.json."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
from common import DEVICES, FullDisk, fit
from lightning.pytorch.loggers import CSVLogger

from lightning_pfo.callbacks import EnergyProfilerCallback, FrequencyPlanCallback
from lightning_pfo.core.frequency_plan import uniform_plan
from lightning_pfo.core.schedules.registry import one_f_one_b
from lightning_pfo.device import load_gpu_config
from lightning_pfo.planner import plan_frontier, save_frontier
from tests.ranks import run_ranks

GPU = load_gpu_config("emulated_a100")
results = {}


class Watcher(L.Callback):
    """What the clock and the counter of this rank's GPU say while the callbacks are at work, and afterwards."""

    def on_train_start(self, trainer, pl_module):
        from lightning_pfo.listeners import gpu_session

        self.session = next(iter(gpu_session._sessions.values()))
        self.locks = []
        lock = self.session.gpu.lock_graphics_clock
        self.session.gpu.lock_graphics_clock = lambda mhz: (self.locks.append(mhz), lock(mhz))

    def on_fit_end(self, trainer, pl_module):
        self.clock_afterwards_mhz = self.session.gpu._requests[-1][1] if self.session.gpu._requests else None
        self.restored = not self.session.gpu._is_locked


def attempt(name, case):
    try:
        case()
    except Exception as error:
        results.setdefault("errors", {})[name] = [type(error).__name__, str(error)]


def main(folder):
    folder = Path(folder)
    _, plain = fit([])
    profiler = EnergyProfilerCallback(
        folder / "profile.csv", gpu=GPU, clock_step_mhz=120, iterations_per_clock=2, stop_when_done=True
    )
    watcher = Watcher()
    trainer, profiled = fit(
        [profiler, watcher], max_steps=200, logger=CSVLogger(folder / "profiler_log"), log_every_n_steps=1
    )
    results["profile_steps"] = trainer.global_step
    results["profile_done"] = profiler.done
    results["profile_locks"] = watcher.locks
    results["profile_restored"] = watcher.restored
    results["losses_plain"] = plain.history["train"]
    results["losses_profiled"] = profiled.history["train"][:6]

    trainer.strategy.barrier()
    frontier = plan_frontier(folder / "profile.csv", num_microbatches=4, num_plans=10)
    if trainer.is_global_zero:
        save_frontier(frontier, folder / "plans")
    trainer.strategy.barrier()

    for name, callback in {
        "top": FrequencyPlanCallback("top_clocks", gpu=GPU),
        "plan": FrequencyPlanCallback(folder / "plans" / "frontier.json", select="least_energy", gpu=GPU),
    }.items():
        watcher = Watcher()
        logger = CSVLogger(folder / f"{name}_log")
        _, module = fit([callback, watcher], logger=logger, log_every_n_steps=1)
        results[name] = {
            "measurements": [[m.iteration, m.time_s, m.energy_j] for m in callback.measurements],
            "losses": module.history["train"],
            "locks": watcher.locks,
            "restored": watcher.restored,
            "clocks": callback.plan.clocks_mhz,
        }

    schedule = one_f_one_b(DEVICES, 8)
    attempt("microbatches", lambda: fit([FrequencyPlanCallback(uniform_plan(schedule, [1410] * 2), gpu=GPU)]))
    schedule = one_f_one_b(DEVICES, 4)
    attempt("clock", lambda: fit([FrequencyPlanCallback(uniform_plan(schedule, [1410, 1407]), gpu=GPU)]))
    attempt("gpu", lambda: fit([FrequencyPlanCallback("top_clocks", gpu="emulated_a1000")]))
    attempt("both", lambda: fit([profiler, FrequencyPlanCallback("top_clocks", gpu=GPU)]))
    attempt("no_clock", lambda: fit([EnergyProfilerCallback(folder / "none.csv", gpu=GPU, min_clock_mhz=9000)]))
    attempt("missing", lambda: FrequencyPlanCallback(folder / "nothing.json"))
    incomplete = EnergyProfilerCallback(folder / "incomplete.csv", gpu=GPU, clock_step_mhz=120)
    fit([incomplete], max_steps=2)
    results["incomplete_file"] = (folder / "incomplete.csv").exists()
    for name, until in (("full", None), ("full_once", 4)):
        full = EnergyProfilerCallback(folder / f"{name}.csv", gpu=GPU, clock_step_mhz=600, iterations_per_clock=1)
        _, module = fit([full, FullDisk(until)], max_steps=12)
        results[name] = {"done": full.done, "error": full.error, "losses": module.history["train"][:6]}
    (folder / f"rank_{torch.distributed.get_rank()}.json").write_text(json.dumps(results))


run_ranks(main, DEVICES, sys.argv[1])
