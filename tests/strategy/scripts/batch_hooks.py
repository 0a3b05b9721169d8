"""Hooks on the way of a batch to its device, which the look at the first batch calls as well.

Usage: batch_hooks.py FOLDER. On one rank and on two; each writes the losses, and what the hooks have noted.
"""

import json
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
NOISE = torch.Generator().manual_seed(1)
SAMPLES, CLASSES = torch.randn(37, 8, generator=NOISE), torch.randint(3, (37,), generator=NOISE)


def loader():
    return DataLoader(TensorDataset(SAMPLES, CLASSES), batch_size=8)


class Takes(L.LightningModule):
    """Its layers are not called in the order in which it holds them, so that it needs the look at the first batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.losses = []

    def training_step(self, batch, batch_idx):
        found = batch["samples"]
        for layer in reversed(self.layers):
            found = layer(found)
        return nn.functional.cross_entropy(self.head(found), batch["classes"])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def train_dataloader(self):
        return loader()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NamedBefore(Takes):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {"samples": batch[0], "classes": batch[1]}


class NamedAfter(Takes):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {"samples": batch[0], "classes": batch[1]}


class InRows(Takes):
    """Samples are only known once the batch has arrived."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {"samples": torch.cat([batch[0], -batch[0]]), "classes": batch[1].repeat(2)}


class Data(L.LightningDataModule):
    """Counts its hooks."""

    def __init__(self):
        super().__init__()
        self.count = {"before": 0, "transfer": 0, "after": 0}
        self.sums, self.latest = [], 0

    def train_dataloader(self):
        return loader()

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.count["before"] += 1
        return {"samples": batch[0], "classes": batch[1]}

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.count["transfer"] += 1
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.count["after"] += 1
        self.latest += 1
        self.sums.append(batch["samples"].sum().item())
        return batch


def run(number):
    found = {}
    for case in (NamedBefore, NamedAfter, InRows, Takes):
        L.seed_everything(3, verbose=False)
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
        module, data = case(), Data() if case is Takes else None
        trainer.fit(module, datamodule=data)
        noted = [] if data is None else [data.count, data.sums, data.latest]
        found[case.__name__] = {"losses": module.losses, "noted": noted}
    (FOLDER / f"{number}_{trainer.global_rank}.json").write_text(json.dumps(found))


for size in (1, 2):
    run_ranks(run, size, size)
