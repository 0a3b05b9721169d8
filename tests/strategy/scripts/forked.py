"""Processes that are forked from ranks call the module and the strategy; usage: forked.py FOLDER.

Runs on one and on two ranks; each writes FOLDER/DEVICES_RANK.json.
"""

import json
import multiprocessing
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.quiet import QUIET
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
ONES = torch.ones(2, 8)
ASKED = {
    "first layer": lambda module: float(module.net[0](ONES).detach().sum()),
    "last layer": lambda module: float(module.net[4](ONES).detach().sum()),
    "module": lambda module: float(module(ONES).detach().sum()),
    "barrier": lambda module: module.trainer.strategy.barrier(),
    "gather_module": lambda module: module.trainer.strategy.gather_module(),
    "whole_parameters": lambda module: module.trainer.strategy.whole_parameters(module).__enter__(),
    "save_checkpoint": lambda module: module.trainer.save_checkpoint(FOLDER / "forked.ckpt"),
    "clip": lambda module: float(nn.utils.clip_grad_norm_(module.parameters(), 1.0)),
    "run": lambda module: trainer_of(2).validate(module, DataLoader(Embedded(module), 8), verbose=False),
}


def trainer_of(devices, **options):
    return L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=PfoPipelineStrategy(num_microbatches=2, check_loss=False, hold_uncalled="everywhere"),
        max_epochs=1,
        **QUIET,
        **options,
    )


class Embedded(Dataset):
    """Samples of which a frozen layer of the module makes inputs, in the workers of a loader."""

    def __init__(self, module):
        self.module = module
        self.samples = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        with torch.no_grad():
            return self.module.encoder(self.samples[index])


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(8, 8).requires_grad_(False)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.losses, self.found = [], {}

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self(batch).square().mean()

    validation_step = training_step

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def on_train_start(self):
        if self.trainer.world_size > 1:
            self.found = {name: in_fork(ask, self) for name, ask in ASKED.items()}
        else:  # where there are no other ranks
            self.found = {name: in_fork(ASKED[name], self) for name in ("first layer", "last layer", "module")}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def in_fork(ask, module):
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def answer():
        try:
            answers.put(ask(module))
        except Exception as error:
            answers.put(f"{type(error).__name__}: {error}")

    process = context.Process(target=answer, daemon=True)
    process.start()
    process.join(30)
    if process.is_alive() or answers.empty():
        process.kill()
        return "no answer"
    return answers.get()


def ranks(devices):
    module = Module()
    here = {name: ASKED[name](module) for name in ("first layer", "last layer", "module")}
    trainer = trainer_of(devices)
    trainer.fit(module, DataLoader(Embedded(module), 8, num_workers=2))
    seen = {"here": here, "found": module.found, "losses": module.losses}
    (FOLDER / f"{devices}_{trainer.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for devices in (1, 2):
        run_ranks(ranks, devices, devices)
