"""Two replicas of four stages, one of which gets slower and recovers; every rank writes FOLDER/rank_N.json."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
from common import fit

from lightning_pfo.callbacks import PipelineFrequencyOptimizerCallback
from lightning_pfo.core.events import InstructionListener
from lightning_pfo.device import load_gpu_config
from lightning_pfo.listeners.optimizer.settings import OptimizerSettings
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FACTORS = (1.05, 1.2, 1.5, 1.0)
PHASE = 3
"""Steps with each factor."""


class Energy(InstructionListener):
    """What this rank's GPU uses in each iteration."""

    def __init__(self, gpu):
        self.gpu, self.energies_j = gpu, {}

    def on_iteration_begin(self, iteration):
        self.begin_mj = self.gpu.total_energy_mj()

    def on_iteration_end(self, iteration):
        self.energies_j[iteration] = (self.gpu.total_energy_mj() - self.begin_mj) / 1000


class Slow(L.Callback):
    """Slows replica 1 down once the plan is held."""

    def __init__(self, optimizer):
        self.optimizer, self.held, self.phases = optimizer, 0, []

    def on_train_start(self, trainer, pl_module):
        self.source, self.gpu = trainer.strategy.instruction_source, self.optimizer.run._session.gpu
        self.energy = Energy(self.gpu)
        self.source.add_listener(self.energy)
        self.usual = self.gpu._duration_factor

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        run = self.optimizer.run
        if run.state.value != "Hold":
            return
        phase, step = divmod(self.held, PHASE)
        self.held += 1
        if phase and step == 0:
            last = max(self.energy.energies_j)
            applied = run.applied
            seen = {"factor": self.factor, "time_s": run.latest.time_s, "energy_j": self.energy.energies_j[last]}
            plan = {
                "plan_s": applied.iteration_time_s,
                "plan_j": applied.iteration_energy_j,
                "last_mhz": applied.clocks_mhz[self.source.rank][-1],
            }
            self.phases.append(seen | plan)
        if step == 0 and phase < len(FACTORS):
            self.factor = FACTORS[phase]
            self.gpu._duration_factor = self.usual * (self.factor if self.source.place[0] == 1 else 1.0)
        trainer.should_stop = phase >= len(FACTORS)


def main(folder):
    settings = OptimizerSettings(pairs=1, look_every=1, most_rounds=2, num_iterations=100_000)
    optimizer = PipelineFrequencyOptimizerCallback(
        gpu=load_gpu_config("emulated_a100"), cluster="ideal", output_dir=Path(folder) / "pfo", settings=settings
    )
    slow = Slow(optimizer)
    strategy = PfoPipelineStrategy(num_microbatches=4, data_parallel_size=2, check_loss=False)
    fit([optimizer, slow], max_steps=100, strategy=strategy, devices=8)
    found = {"place": slow.source.place, "rank": slow.source.rank, "phases": slow.phases, "notes": optimizer.run.notes}
    (Path(folder) / f"rank_{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


run_ranks(main, 8, sys.argv[1])
