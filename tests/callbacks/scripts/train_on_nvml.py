"""Trains under a plan on NVML GPUs until something ends it: `train_on_nvml.py ENDING LAUNCH`.

The ranks are forked (LAUNCH is `forks`), or started by the Trainer, which runs the script again (`popen`) or lets it go
on in forks (`clone`).
"""

import sys
import time

import lightning as L
from common import DEVICES, fit

from lightning_pfo.callbacks import FrequencyPlanCallback
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
            time.sleep(0.02)


def main(ending, start_method="popen"):
    schedule = one_f_one_b(DEVICES, 4)
    clocks = tuple(tuple(1410 - 15 * (index % 3) for index in range(len(order))) for order in schedule.orders)
    plan = FrequencyPlan(schedule, clocks, 1.0, 1.0)
    callback = FrequencyPlanCallback(plan, gpu="nvml")
    strategy = PfoPipelineStrategy(num_microbatches=4, start_method=start_method)
    fit([callback, Ending(ending)], max_steps=6 if ending != "signal" else 100_000, strategy=strategy)
    print(f"finished {len(callback.measurements)}", flush=True)


ending, launch = sys.argv[1:]
if launch == "forks":
    run_ranks(main, DEVICES, ending)
else:
    main(ending, launch)
