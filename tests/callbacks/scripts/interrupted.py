"""One part of a run that is killed with all its ranks in the midst of an iteration, in a given state.

`interrupted.py FOLDER NAME STATE FROM_CHECKPOINT`: writes FOLDER/NAME.json before it is killed, or when it has ended.
STATE `none`: a run without the optimizer, to its end.
"""

import json
import os
import signal
import sys
from pathlib import Path

import lightning as L
import torch.distributed as dist
from common import DEVICES, fit
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pfo.callbacks import PipelineFrequencyOptimizerCallback
from lightning_pfo.core.events import InstructionListener
from lightning_pfo.device import load_gpu_config
from lightning_pfo.listeners.optimizer.memory import Memory
from lightning_pfo.listeners.optimizer.settings import OptimizerSettings
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

SETTINGS = OptimizerSettings(num_iterations=100_000, most_rounds=2, pairs=1)
ITERATIONS_BEFORE = {"WarmUp": 3, "Measure": 2, "Plan": 1, "Verify": 3, "Hold": 2, "end": 4}
STEPS = 30


def cells(memory):
    return {
        f"{row.stage} {row.instruction} {row.frequency}": [row.time, row.energy, row.samples] for row in memory.rows
    }


class Interruption(InstructionListener, L.Callback):
    """Ends everything in the given state, as a node that loses its power would."""

    def __init__(self, path, state, optimizer):
        self.path, self.state, self.optimizer = path, state, optimizer
        self.num_in_state, self.recalled, self.first_step = 0, None, None

    def on_train_start(self, trainer, pl_module):
        self.pl_module, self.trainer = pl_module, trainer
        self.first_step = trainer.global_step
        trainer.strategy.instruction_source.add_listener(self)

    def on_iteration_begin(self, iteration):
        run = self.optimizer.run
        if self.recalled is None:
            self.recalled = cells(run.memory)
        self.num_in_state += run.state.value == self.state.replace("end", "Hold")
        if self.is_due and dist.get_rank() == 0:
            found = {
                "state": run.state.value,
                "notes": run.notes,
                "first_step": self.first_step,
                "losses": self.pl_module.history["train"],
                "recalled": self.recalled,
                "measured": measured,
                "cells": cells(run.memory),
                "iterations": run.memory.iterations,
            }
            self.path.write_text(json.dumps(found))
        self.trainer.should_stop = self.is_due

    @property
    def is_due(self):
        return self.num_in_state == ITERATIONS_BEFORE[self.state]

    def on_instruction_end(self, event):
        if self.is_due and self.state != "end" and dist.get_rank() == 1:  # the first rank is in the midst of it, too
            os.killpg(os.getpgid(0), signal.SIGKILL)


measured = []
with_rows = Memory.with_rows


def noted(memory, rows):
    measured.extend(f"{row.stage} {row.instruction} {row.frequency}" for row in rows)
    return with_rows(memory, rows)


def main(folder, name, state, from_checkpoint):
    Memory.with_rows = noted
    folder = Path(folder)
    options = {"max_epochs": -1, "limit_train_batches": 1, "strategy": PfoPipelineStrategy(num_microbatches=6)}
    if state == "none":
        _, module = fit([], max_steps=STEPS, **options)
        if dist.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(module.history["train"]))
        return
    optimizer = PipelineFrequencyOptimizerCallback(
        gpu=load_gpu_config("emulated_a100"), output_dir=folder / "pfo", settings=SETTINGS
    )
    checkpoint = ModelCheckpoint(folder, "checkpoint", enable_version_counter=False)
    interruption = Interruption(folder / f"{name}.json", state, optimizer)
    fit(
        [optimizer, interruption, checkpoint],
        max_steps=STEPS,
        enable_checkpointing=True,
        ckpt_path=folder / "checkpoint.ckpt" if from_checkpoint == "yes" else None,
        **options,
    )


run_ranks(main, DEVICES, *sys.argv[1:])
