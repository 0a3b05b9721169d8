"""Two replicas of two stages, whose batches log other names; usage: replica_names.py FOLDER."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import BinaryAccuracy

from lightning_pfo.core.errors import PfoError
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.quiet import QUIET
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])


class Data(Dataset):
    """Replica 0 has even samples, replica 1 odd ones."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.ones(8) * index / 32, index


class Module(L.LightningModule):
    def __init__(self, case):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        self.case, self.losses, self.accuracy = case, [], BinaryAccuracy()

    def training_step(self, batch, batch_idx):
        x, numbers = batch
        loss = self.layers(x).square().mean()
        is_odd = bool(numbers[0] % 2)
        if self.case == "other names":
            self.log("odd" if is_odd else "even", 1000.0 if is_odd else 1.0, on_step=True, on_epoch=True)
            self.log("most of odd" if is_odd else "sum of even", 1.0 + batch_idx, reduce_fx="max" if is_odd else "sum")
        elif self.case == "missing" and is_odd:
            self.log("odd", 1000.0, on_step=False, on_epoch=True)
        elif self.case == "once" and 5 in numbers:
            self.log("five", 5.0, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, numbers = batch
        is_odd = bool(numbers[0] % 2)
        self.log("of odd" if is_odd else "of even", 1000.0 if is_odd else 1.0)
        self.log("both", 1.0 + is_odd)
        if batch_idx == 1 or not is_odd:
            self.log("most", 1.0 + batch_idx, reduce_fx="max")
        if is_odd:
            self.accuracy.update(torch.ones(len(x)), torch.ones(len(x)))
            self.log("accuracy", self.accuracy)
            self.log("count", 1, on_step=True, on_epoch=True, reduce_fx="sum")
        else:
            self.log("least", 3.0 - batch_idx, reduce_fx="min")
        self.layers(x)

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        if batch[1][0] % 2:
            self.log("alone", 2.0)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


class Reads(Module):
    """Reads what replicas have the mean of when the batch is done."""

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch[0]).square().mean()
        self.log("read", loss, sync_dist=batch_idx > 0)
        self.losses.append(float(self.trainer.callback_metrics["read"]))
        return loss


def run():
    found = {}
    for case in ("other names", "missing", "once"):
        module = Module(case)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=4,
            strategy=PfoPipelineStrategy(num_microbatches=2, data_parallel_size=2),
            max_epochs=1,
            **QUIET,
        )
        trainer.fit(module, DataLoader(Data(), batch_size=4))
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found[case] = metrics | {"mean": float(sum(module.losses)) / len(module.losses)}
    try:
        read = Reads("")
        trainer.fit_loop.max_epochs = 2
        trainer.fit(read, DataLoader(Data(), batch_size=4))
    except PfoError as error:
        found["read"] = [len(read.losses), str(error)]
    trainer.validate(module, DataLoader(Data(), batch_size=4), verbose=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.validate(module, DataLoader(Data(), batch_size=4), verbose=False)
    found["validation"] = [metrics, {name: float(value) for name, value in trainer.callback_metrics.items()}]
    (FOLDER / f"rank_{dist.get_rank()}.json").write_text(json.dumps(found))


run_ranks(run, 4)
