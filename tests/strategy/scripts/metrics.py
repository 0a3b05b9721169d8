"""torchmetrics objects that steps update and hooks compute, several times; usage: metrics.py FOLDER.

On one rank and on two; each writes values and warnings.
"""

import json
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
DATA = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))


class Computes(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.mean, self.of_validation, self.unused = (torchmetrics.MeanMetric() for _ in range(3))
        self.both = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()])
        self.seen = []

    def training_step(self, batch, batch_idx):
        found = self.net(batch[0])
        self.mean.update(found.square().mean())
        self.both.update(found, batch[0])
        return found.square().mean()

    def validation_step(self, batch, batch_idx):
        self.of_validation.update(self.net(batch[0]).mean())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += [self.mean.compute().item(), self.mean.compute().item()]  # the second is what was computed

    def on_train_epoch_end(self):
        self.seen += [value.item() for value in self.both.compute().values()]
        self.mean.reset()
        self.both.reset()

    def on_validation_epoch_end(self):
        self.seen.append(self.of_validation.compute().item())
        self.of_validation.reset()

    def on_train_end(self):
        self.unused.compute()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def run(number):
    trainer = L.Trainer(
        accelerator="cpu",
        devices=number,
        strategy=PfoPipelineStrategy(num_microbatches=4) if number > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2,
    )
    module, loader = Computes(), DataLoader(TensorDataset(DATA), batch_size=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader, loader)
    told = [str(warning.message) for warning in caught if "``compute`` method" in str(warning.message)]
    (FOLDER / f"{number}_{trainer.global_rank}.json").write_text(json.dumps({"seen": module.seen, "told": told}))


for number in (1, 2):
    run_ranks(run, number, number)
