"""Layers that log or tell metrics something by themselves; writes FOLDER/*.json.

On one rank and on two.
"""

import json
import sys
from pathlib import Path

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
DATA = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.linear, self.number = nn.Linear(8, 8), number
        self.log, self.metric = None, None

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        if self.log is not None:
            self.log(f"mean of {self.number}", y.mean())
            self.log(f"size of {self.number}", float(len(y)), reduce_fx="max")
        if self.metric is not None:
            self.metric.update(y.detach(), x.detach())
        return y


class Layers(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Layer(number) for number in range(4)))
        self.found = []

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.found.append(outputs["loss"].item())

    def on_train_epoch_end(self):
        self.found += [float(self.trainer.callback_metrics[name]) for name in sorted(self.trainer.callback_metrics)]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


class Logs(Layers):
    """Layers have kept the method that logs, before a step runs."""

    def on_fit_start(self):
        for layer in self.layers:
            layer.log = self.log


class Measures(Layers):
    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.metric = torchmetrics.MeanSquaredError()

    def on_train_epoch_end(self):
        self.found += [layer.metric.compute().item() for layer in self.layers]


CASES = {"logs": Logs, "measures": Measures}


def run(number):
    found = {}
    for name, kind in CASES.items():
        module = kind()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=number,
            strategy=PfoPipelineStrategy(num_microbatches=4) if number > 1 else "auto",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=1,
        )
        trainer.fit(module, DataLoader(TensorDataset(DATA), batch_size=8))
        found[name] = module.found
    (FOLDER / f"{number}_{trainer.global_rank}.json").write_text(json.dumps(found))


for number in (1, 2):
    run_ranks(run, number, number)
