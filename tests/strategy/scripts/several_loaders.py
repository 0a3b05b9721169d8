"""Loaders in a dict whose batches have other sizes, and ones that alone know how many samples lists have.

Usage: several_loaders.py FOLDER. On one rank and on two; each writes the losses.
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


class Both(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 3))
        self.losses = []

    def training_step(self, batch, batch_idx):
        (samples, classes), (others, other_classes) = batch["few"], batch["many"]
        found, of_others = self.net(torch.cat([samples, others])).tensor_split([len(samples)])
        loss = nn.functional.cross_entropy(found, classes)
        return loss + 0.5 * nn.functional.cross_entropy(of_others, other_classes)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Pictures(Both):
    """Of lists of pictures with three rows each."""

    def training_step(self, batch, batch_idx):
        assert batch[0].shape == (3, 8), "a microbatch has whole pictures"
        loss = self.net(torch.stack(batch)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.losses.append(float(self.training_step(batch, batch_idx)))


def loader(number, batch_size):
    return DataLoader(TensorDataset(SAMPLES[:number], CLASSES[:number]), batch_size=batch_size)


def trainer_of(number):
    return L.Trainer(
        accelerator="cpu",
        devices=number,
        strategy=PfoPipelineStrategy() if number > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2,
        use_distributed_sampler=False,
    )


def fitted(module, data, number):
    trainer_of(number).fit(module, data, data)
    return module.losses


def run(number):
    trainer = trainer_of(number)
    module = Both()
    trainer.fit(module, {"few": loader(13, 4), "many": loader(37, 8)})  # their last batches have 1 and 5 samples
    pictures = DataLoader(torch.arange(240.0).sin().view(10, 3, 8).unbind(), batch_size=4, collate_fn=list)
    found = {"both": module.losses, "pictures": fitted(Pictures(), pictures, number)}
    (FOLDER / f"{number}_{trainer.global_rank}.json").write_text(json.dumps(found))


for size in (1, 2):
    run_ranks(run, size, size)
