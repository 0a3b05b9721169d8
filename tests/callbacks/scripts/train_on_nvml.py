"""Trains under a plan on NVML GPUs until something ends it: `train_on_nvml.py ENDING LAUNCH [FOLDER]`.

With ENDING `profile` it scans clocks into FOLDER instead, and goes on.

The ranks are forked (LAUNCH is `forks`), or started by the Trainer, which runs the script again (`popen`) or lets it go
on in forks (`clone`).
"""

import sys
import time
from pathlib import Path

import lightning as L
from common import DEVICES, fit
from plain_module import PlainModule

from lightning_pfo.callbacks import EnergyProfilerCallback, FrequencyPlanCallback
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.schedules.registry import one_f_one_b
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks


class Ending(L.Callback):
    def __init__(self, ending):
        self.ending = ending

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            if trainer.is_global_zero:
                print("training", flush=True)
            if self.ending == "exception":
                raise ZeroDivisionError("the user's own mistake")
        if self.ending == "signal":
            time.sleep(0.1)


def main(ending, start_method="popen", folder="."):
    schedule = one_f_one_b(DEVICES, 4)
    clocks = tuple(tuple(1410 - 15 * (index % 3) for index in range(len(order))) for order in schedule.orders)
    plan = FrequencyPlan(schedule, clocks, 1.0, 1.0)
    callback = FrequencyPlanCallback(plan, gpu="nvml")
    if ending == "profile":
        callback = EnergyProfilerCallback(Path(folder) / "profile.csv", gpu="nvml", clock_step_mhz=300)
    strategy = PfoPipelineStrategy(num_microbatches=4, start_method=start_method)
    module = PlainModule(width=32, num_layers=5)
    for layer in module.model:  # instructions that take so long that clocks land in between
        layer.register_forward_hook(lambda *_: time.sleep(0.003))
    max_steps = 6 if ending != "signal" else 100_000
    fit([callback, Ending(ending)], max_steps, strategy, module)
    if ending == "profile":
        print(f"finished {callback.done} {callback.error}", flush=True)
    else:
        failures = [rank for rank, clocks in callback.clock_statistics_of_ranks().items() if clocks.failure]
        print(f"finished {len(callback.measurements)}, failed: {failures}", flush=True)


ending, launch, *folder = sys.argv[1:]
if launch == "forks":
    run_ranks(main, DEVICES, ending, "popen", *folder)
else:
    main(ending, launch)
