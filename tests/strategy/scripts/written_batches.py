"""Steps that put something into their batch, which hooks find there; usage: written_batches.py FOLDER.

On one device, and on two ranks in several ways; each writes what hooks have found in their batches.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.quiet import QUIET
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
SAMPLES = torch.randn(22, 8, generator=torch.Generator().manual_seed(1))


@dataclass
class Item:
    x: Tensor
    pred: Tensor | None = None


def as_dict(samples):
    return {"x": torch.stack(samples), "n": len(samples), "names": [f"{float(x[0]):.3f}" for x in samples]}


def as_item(samples):
    return Item(torch.stack(samples))


def as_pair(samples):
    return torch.stack(samples), {"more": torch.stack(samples)}


class Finds(L.Callback):
    """As evaluators do that are callbacks: what they need is in the batch."""

    def __init__(self):
        self.found = []

    def note(self, kind, batch):
        values = vars(batch) if isinstance(batch, Item) else batch
        if isinstance(values, tuple):
            values = {"first": values[0], **values[1]}
        told = {
            key: [list(value.shape), float(value.double().sum())] if isinstance(value, Tensor) else value
            for key, value in sorted(values.items())
        }
        self.found.append([kind, told])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.note("train", batch)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.note("validation", batch)

    def on_predict_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.note("predict", batch)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def through(self, x):
        early = x
        for index, layer in enumerate(self.model):
            x = layer(x)
            early = x if index == 0 else early
        return early, x

    def training_step(self, batch, batch_idx):
        self.write(batch)
        return self.through(self.inputs(batch))[1].square().mean()

    def validation_step(self, batch, batch_idx):
        self.write(batch)
        self.through(self.inputs(batch))

    def predict_step(self, batch, batch_idx):
        self.write(batch)
        return self.through(self.inputs(batch))[1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OfDict(Module):
    def inputs(self, batch):
        return batch["x"]

    def write(self, batch):
        early, late = self.through(batch["x"])
        batch["early"], batch["late"] = early, late.detach()  # the first comes from an earlier stage
        batch["mean"] = late.mean().item() if batch["n"] else 0.0
        batch["labels"] = [f"name {name}" for name in batch.pop("names")]
        batch["x"] = batch["x"] * 2


class OfItem(Module):
    def inputs(self, batch):
        return batch.x

    def write(self, batch):
        batch.pred = self.through(batch.x)[1].argmax(-1)


class OfPair(Module):
    def inputs(self, batch):
        return batch[0]

    def write(self, batch):
        batch[0].mul_(2)
        batch[1]["pred"] = self.through(batch[1]["more"])[1].argmax(-1)


CASES = {"dict": (OfDict, as_dict), "item": (OfItem, as_item), "pair": (OfPair, as_pair)}
WAYS = {
    "by default": {},
    "batches of the first rank": {"load_batches": "first"},
    "the loss of the whole batch": {"schedule": "gpipe", "loss_over": "batch"},
    "two stages of a rank": {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
}


def run(case, strategy):
    module_class, collate = CASES[case]
    module, finds = module_class(), Finds()
    L.seed_everything(3, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if strategy is None else 2,
        strategy="auto" if strategy is None else PfoPipelineStrategy(**strategy),
        **QUIET,
        max_epochs=1,
        callbacks=[finds],
    )
    loader = DataLoader(list(SAMPLES), 8, collate_fn=collate)
    try:
        trainer.fit(module, loader, loader)
        trainer.predict(module, loader)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return finds.found


def main(of_pipeline):
    found = {
        f"{case}, {way}": run(case, strategy if of_pipeline else None)
        for case in CASES
        for way, strategy in (WAYS if of_pipeline else {"one device": None}).items()
    }
    name = f"rank_{torch.distributed.get_rank()}" if of_pipeline else "one_0"
    (FOLDER / f"{name}.json").write_text(json.dumps(found))


run_ranks(main, 1, False)
run_ranks(main, 2, True)
