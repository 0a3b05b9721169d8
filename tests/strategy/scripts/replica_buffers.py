"""Buffers that a step and layers change, with Lightning's DDP and with two replicas of two stages.

Each rank writes FOLDER/NAME_RANK.json. Usage: replica_buffers.py FOLDER.
"""

import json
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.compat.processes import OLDEST_FSDP
from tests.quiet import QUIET
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
X = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))


class Peaks(nn.Module):
    """Scales by the largest values so far, of 64 bits, and counts in 32."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))

    def forward(self, x):
        if self.training:
            self.largest.copy_(torch.maximum(self.largest, x.detach().abs().amax(0)))
            self.calls += 1
        return x / (1 + self.largest).to(x.dtype)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 6), Peaks(), nn.Linear(6, 6), nn.Linear(6, 6), Peaks(), nn.Linear(6, 6))
        self.register_buffer("center", torch.zeros(6))
        self.losses, self.evaluated = [], []

    def training_step(self, batch, batch_idx):
        found = self.net(batch[0])
        loss = (found - self.center).square().mean()
        self.center = 0.5 * self.center + 0.5 * found.detach().mean(0)
        return loss

    def validation_step(self, batch, batch_idx):
        self.evaluated.append((self.net(batch[0]) - self.center).square().mean().item())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(number, name, strategy):
    trainer = L.Trainer(
        accelerator="cpu", devices=number, strategy=strategy, max_epochs=2, num_sanity_val_steps=0, **QUIET
    )
    module = Module()
    loader = DataLoader(TensorDataset(X), 4)
    trainer.fit(module, loader, loader)
    buffers = {key: value.tolist() for key, value in module.named_buffers() if not value.is_meta}
    found = {"losses": module.losses, "evaluated": module.evaluated, "buffers": buffers}
    (FOLDER / f"{name}_{trainer.global_rank}.json").write_text(json.dumps(found))


def main():
    kinds = [False, "zero3"] if torch.__version__ >= OLDEST_FSDP["cpu"] else [False]
    for kind in kinds:
        # in microbatches of one batch, layers that count them would be others: one is enough
        strategy = PfoPipelineStrategy(
            num_microbatches=1, schedule="gpipe", data_parallel_size=2, fully_shard=kind, check_loss=False
        )
        fit(4, str(kind), strategy)


run_ranks(main, 4)
run_ranks(fit, 2, 2, "ddp", "ddp")
