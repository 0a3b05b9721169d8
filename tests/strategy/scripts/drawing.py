"""Trains a step that draws between layers, traced as it is and each time; usage: drawing.py FOLDER"""

import json
import os
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.step import programs
from tests.quiet import QUIET
from tests.ranks import run_ranks

BATCHES = torch.randn(12, 4, 8, generator=torch.Generator().manual_seed(1))


class Draws(L.LightningModule):
    """Draws numbers that decide nothing at first, and then which layers it calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.losses, self.counts = [], [0]

    def training_step(self, batch, batch_idx):
        x = self.net[0](batch)
        drawn = torch.rand(()).item()
        for layer in self.net[1:3] if batch_idx < 8 or drawn < 0.5 else self.net[2:3]:
            x = layer(x + 0.1 * drawn)
        return (self.net[3](x) - 0.5).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        self.counts.append(traced)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


traced = 0
ordinary = programs.Programs._trace


def trace(self, *args):
    global traced
    traced += 1
    return ordinary(self, *args)


def main():
    programs.Programs._trace = trace
    found = []
    for sure in (programs._SURE, 1000):
        programs._SURE = sure
        L.seed_everything(3, verbose=False)
        module = Draws()
        module.counts = [traced]
        strategy = PfoPipelineStrategy(num_microbatches=2, check_loss=False)
        trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **QUIET)
        trainer.fit(module, DataLoader(BATCHES, batch_size=None))
        each = [after - before for before, after in zip(module.counts, module.counts[1:], strict=False)]
        found.append({"losses": module.losses, "traced": each})
    (Path(sys.argv[1]) / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(found))


run_ranks(main, 2)
