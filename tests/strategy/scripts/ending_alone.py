"""One of two ranks ends while the other is in a step, and a callback would save; usage: ending_alone.py FOLDER CASE."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.strategy import PfoPipelineStrategy

FOLDER, CASE = Path(sys.argv[1]), sys.argv[2]
DATA = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        y, end = self.net(batch[0]), time.monotonic() + 0.4
        while CASE == "interrupted" and time.monotonic() < end:  # computes: Python heeds signals
            pass
        return y.square().mean()

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == 1 and CASE in ("raises", "caught"):
            raise ValueError("of this rank")
        if batch_idx == 3 and self.global_rank == 1:
            threading.Thread(target=interrupt_twice).start()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def interrupt_twice():
    for _ in range(2):
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)


signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started this may ignore it


def train():
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PfoPipelineStrategy(check_loss=False),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[OnExceptionCheckpoint(FOLDER, filename="exception")],
    )
    try:
        trainer.fit(Module(), DataLoader(TensorDataset(DATA), batch_size=8))
    except BaseException as error:
        with (FOLDER / f"rank_{trainer.global_rank}.txt").open("a") as file:
            file.write(f"{type(error).__name__}: {error}")
        if CASE != "caught":
            raise


for _ in range(2 if CASE == "caught" else 1):
    train()
