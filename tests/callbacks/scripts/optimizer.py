"""Runs that optimise themselves on emulated GPUs; every rank writes FOLDER/rank_N.json."""

import json
import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import lightning as L
import torch
from common import DEVICES, FullDisk, fit, make_loaders
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_pfo.callbacks import PipelineFrequencyOptimizerCallback, PlanSweepCallback
from lightning_pfo.core.errors import ClockPermissionError, DeviceError
from lightning_pfo.core.events import InstructionListener
from lightning_pfo.device import EmulatedGpu, load_gpu_config
from lightning_pfo.listeners.optimizer.choosing.objectives import EnergyPrice, JobDeadline, Moment, Selection
from lightning_pfo.listeners.optimizer.settings import OptimizerSettings
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

GPU = load_gpu_config("emulated_a100")
SETTINGS = OptimizerSettings(num_iterations=100_000, most_rounds=2, pairs=2)
STEPS, MOST_STEPS = 26, 34
results = {}


def optimized(
    name,
    folder,
    steps=STEPS,
    *,
    objective=None,
    cache_dir=None,
    further=(),
    settings=SETTINGS,
    gpu=GPU,
    **options,
):
    """One training; notes what came of it."""
    callback = PipelineFrequencyOptimizerCallback(
        objective, gpu=gpu, output_dir=folder, cache_dir=cache_dir, settings=settings
    )
    options = {"strategy": PfoPipelineStrategy(num_microbatches=6), **options}
    trainer, module = fit([callback, *further], max_steps=steps, **options)
    run = callback.run
    results[name] = {
        "losses": module.history["train"],
        "states": [step.state.value for step in run.ledger.steps],
        "times_s": [step.time_s for step in run.ledger.steps],
        "energies_j": [step.energy_j for step in run.ledger.steps],
        "planned": [step.is_planned for step in run.ledger.steps],
        "step_clocks": [step.clock_mhz for step in run.ledger.steps],
        "problem": run.problem,
        "notes": run.notes,
        "places": sorted([row.stage, row.instruction, row.frequency] for row in run.memory.rows),
        "measured": [[row.stage, row.instruction, row.frequency, row.time, row.energy] for row in run.memory.rows],
        "clocks": run.plan and run.plan.clocks_mhz,
        "summary": {key: value for key, value in run.summary().items() if key not in ("baseline", "plan")},
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items() if "pfo" in name},
        "in_bar": sorted(name for name in trainer.progress_bar_metrics if "pfo" in name),
        "open": run._session.gpu._is_locked,
    }
    return callback


class Slower(L.Callback):
    """The GPU of stage 1 gets slower while the plan is held: its windows in turn show it."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        run = next(one for one in trainer.callbacks if isinstance(one, PipelineFrequencyOptimizerCallback)).run
        if run.state.value == "Hold" and run._session.gpu.index == 1:
            run._session.gpu._duration_factor = 1.1


def optimizer_of(trainer):
    return next(one for one in trainer.callbacks if isinstance(one, PipelineFrequencyOptimizerCallback))


class Late(InstructionListener, L.Callback):
    """Whatever is asked of these GPUs, they take 2 % longer under a plan."""

    def on_train_start(self, trainer, pl_module):
        self.run = optimizer_of(trainer).run
        self.gpu = self.run._session.gpu
        self.usual = self.gpu._duration_factor
        trainer.strategy.instruction_source.add_listener(self)

    def on_iteration_begin(self, iteration):
        is_planned = self.run.run.plan.clocks_mhz == self.run.applied.clocks_mhz
        self.gpu._duration_factor = self.usual * (1.02 if is_planned else 1.0)


class Wishes(L.Callback):
    """What is wanted changes while the plan is held."""

    PHASE = 3
    """Steps with each wish: the ranks look round, follow, and an iteration is measured."""

    def __init__(self):
        clock = datetime(2027, 1, 8, tzinfo=timezone.utc).timestamp()
        self.wishes = {
            "no_slowdown": Selection("no_slowdown"),
            "least_energy": Selection("least_energy"),
            "least_edp": Selection("least_edp"),
            "power": Selection("280W"),
            "cheap": EnergyPrice(lambda now_s: 0.0, per_gpu_hour=2.0),
            "dear": EnergyPrice(lambda now_s: 1e9, per_gpu_hour=2.0),
            "deadline": JobDeadline(clock),
            "broken": EnergyPrice(lambda now_s: 1 / 0, per_gpu_hour=2.0),
            "straggler": Selection("no_slowdown"),
            "recovered": Selection("no_slowdown"),
        }
        self.names, self.held, self.phases = list(self.wishes), 0, {}
        self.ends_s = clock

    @property
    def name(self):
        return self.names[min(self.held // self.PHASE, len(self.names) - 1)]

    def plan_of(self, frontier, moment):
        if self.name == "deadline":  # 100 more iterations, each with 4 % of slack
            moment = Moment(self.ends_s - 100 * 1.04 * frontier.baseline.iteration_time_s / 0.99, 100)
        return self.wishes[self.name].plan_of(frontier, moment)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        optimizer = optimizer_of(trainer)
        run = optimizer.run
        if run.state.value != "Hold":
            return
        if self.held % self.PHASE == self.PHASE - 1:
            seen = {"plan_s": run.applied.iteration_time_s, "plan_j": run.applied.iteration_energy_j}
            self.phases[self.name] = seen | {"time_s": run.latest.time_s, "energy_j": run.latest.energy_j}
            trainer.should_stop = self.name == self.names[-1]
        self.held += 1
        if self.name == "straggler":
            optimizer.set_straggler(1.1 * run.frontier.baseline.iteration_time_s)
        elif self.name == "recovered":
            optimizer.set_straggler(None)


def trainings_of_all_kinds(folder):
    """Trainings that are cut short, or change on the way; each ends in its own way, not by an exception."""
    checkpoint = ModelCheckpoint(folder, "stages", save_on_train_epoch_end=True, enable_version_counter=False)
    accumulation = GradientAccumulationScheduler({0: 1, 2: 2})
    train, val = make_loaders(num_samples=52, batch_size=12)  # and a last batch of four samples, too few to divide
    train = DataLoader(train.dataset, batch_size=12)
    kinds = {
        "fast_dev_run": {"fast_dev_run": 2},
        "early_stopping": {"further": [EarlyStopping("train_loss", patience=1, min_delta=9)]},
        "accumulation": {
            **{"further": [accumulation, checkpoint], "enable_checkpointing": True, "val_dataloaders": val},
            **{"train_dataloaders": train, "max_epochs": 4},
        },
        "one_stage": {
            "ckpt_path": folder / "stages.ckpt",
            "max_epochs": 6,
            "strategy": PfoPipelineStrategy(num_microbatches=6, data_parallel_size=2),
        },
    }
    for name, options in kinds.items():
        optimized(name, folder / name, -1, **options)


def refuse(gpu, clock_mhz):
    raise ClockPermissionError("This user may not set clocks.")


def ignore(gpu, clock_mhz):
    """As a driver that acknowledges what it does not do."""


def fail(gpu):
    raise DeviceError("The energy counter cannot be read.")


def main(folder):
    folder = Path(folder)
    _, plain = fit([], max_steps=MOST_STEPS, strategy=PfoPipelineStrategy(num_microbatches=6))
    results["plain"] = plain.history["train"]
    whole = optimized("whole", folder / "whole", cache_dir=folder / "cache")
    optimized("noisy", folder / "noisy", MOST_STEPS, gpu=replace(GPU, noise=0.3, seed=6))
    optimized("full", folder / "full", further=[FullDisk()])
    optimized("full_once", folder / "full_once", further=[FullDisk(STEPS)])
    ready = {"cache_dir": folder / "cache", "settings": SETTINGS.changed(pairs=1, look_every=1)}
    optimized("late", folder / "late", 13, objective="1.05x", further=[Late()], **ready)
    wishes = Wishes()
    optimized("wishes", folder / "wishes", 100, objective=wishes, further=[wishes], **ready)
    results["wishes"]["phases"] = wishes.phases
    trainings_of_all_kinds(folder)
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
    EmulatedGpu.lock_graphics_clock = ignore
    optimized("deaf", folder / "deaf", 30)
    EmulatedGpu.lock_graphics_clock = lock
    counter, EmulatedGpu.total_energy_mj = EmulatedGpu.total_energy_mj, fail
    optimized("no_counter", folder / "no_counter", 8)
    EmulatedGpu.total_energy_mj = counter
    assert whole.plan is not None
    (folder / f"rank_{torch.distributed.get_rank()}.json").write_text(json.dumps(results))


run_ranks(main, DEVICES, sys.argv[1])
