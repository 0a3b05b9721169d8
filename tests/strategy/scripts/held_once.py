"""Trains on two ranks what holds a module that the first batch does not use; writes OUTPUT/rank_N.json."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.loops import PipelinedModel
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


class Module(L.LightningModule):
    """Calls an encoder from the second batch on `before` or `behind` the layers, `nowhere`, or in a `hook`."""

    def __init__(self, where):
        super().__init__()
        torch.manual_seed(0)
        self.where = where
        self.encoder = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.prior = nn.Parameter(torch.ones(8))
        self.held = None

    def training_step(self, batch, batch_idx):
        where = self.where if batch_idx else "nowhere"
        x = self.encoder(batch) if where == "before" else batch
        x = self.layers(x)
        if where == "behind":
            x = self.encoder(x) * self.prior
        return x.square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.held = sorted(name for name, parameter in self.named_parameters() if not parameter.is_meta)
        if self.where == "hook":
            self.held = float(self.encoder(batch).sum())  # the rank that has it tells the others

    def on_train_end(self):
        self.trainer.save_checkpoint(FOLDER / f"{self.where}_{self.trainer.world_size}.ckpt")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(where, strategy, devices):
    module = Module(where)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, DataLoader(X, batch_size=2))
    except ConfigurationError as error:
        return str(error)
    return module.held


class Net(Module):
    def forward(self, batch):
        return self.training_step(batch, 0)


def held_by_loop():
    """What a loop of one's own holds."""
    model = PipelinedModel(Net("nowhere"), num_microbatches=2, example_batch=(X[:2],), hold_uncalled="once")
    model.step(X[:2])
    return sorted(name for name, parameter in model.module.named_parameters() if not parameter.is_meta)


def main():
    held = {
        where: train(where, PfoPipelineStrategy(num_microbatches=2, hold_uncalled="once"), 2)
        for where in ("nowhere", "behind", "before", "hook")
    }
    held["loop"] = held_by_loop()
    (FOLDER / f"rank_{dist.get_rank()}.json").write_text(json.dumps(held))


for case in ("nowhere", "behind"):
    train(case, "auto", 1)
run_ranks(main, 2)
