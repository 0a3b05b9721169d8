"""A rank that raises alone where all ranks have the parameters of all; usage: alone_in_whole.py FOLDER."""

import json
import os
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])


class RaisesAlone(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with self.trainer.strategy.whole_parameters(self.net):
            if batch_idx == 1 and self.global_rank == 1:
                raise ValueError("a mistake of one rank")
            assert all(not p.is_meta for p in self.parameters())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PfoPipelineStrategy(num_microbatches=4),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
    )
    module = RaisesAlone()
    try:
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=8))
    except BaseException as error:
        absent = [p.is_meta for p in module.parameters()]
        own = any(absent) and not all(absent)
        (FOLDER / f"rank_{trainer.global_rank}.json").write_text(json.dumps([type(error).__name__, str(error), own]))
        os._exit(0)  # with another code, who has started both would end the other one, which may be writing


run_ranks(main, 2)
