"""Steps that return, log and keep other things in other batches, loaders and epochs; usage: other_forms.py FOLDER.

By a plain Trainer on one process (plain_0), and by pfo_pipeline on two (two_0, two_1); each writes FOLDER/NAME.json.
"""

import json
import sys
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torchmetrics
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
GENERATOR = torch.Generator().manual_seed(1)
X, Y = torch.randn(37, 8, generator=GENERATOR), torch.randint(3, (37,), generator=GENERATOR)


def loader(size=32, batch_size=8):
    return DataLoader(TensorDataset(X[:size], Y[:size]), batch_size=batch_size)


def plain(value):
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return [type(value).__name__, value.tolist()]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


FORMS = {
    "rows": lambda out: out,
    "arrays": lambda out: out.numpy(),
    "dict": lambda out: {"x": out},
    "lists": lambda out: out.tolist(),
    "a list": lambda out: [1, 2],
    "columns": lambda out: out.T,
    "means": lambda out: out.mean(0),
    "floats": lambda out: [1.0, 2.0, 3.0],
    "count": lambda out: int((out > 0).sum()),
    "index": lambda out: 7,
}
BY_BATCH = {
    "dict, arrays": ["dict", "arrays"],
    "a list, rows": ["a list", "rows"],
    "lists, arrays": ["lists", "arrays"],
    "floats, a list": ["floats", "a list", "lists"],
    "means, rows": ["means", "rows", "columns"],
    "rows, means": ["rows", "means"],
}
BY_LOADER = {
    "rows, columns": ["rows", "columns"],
    "count, index": ["count", "index"],
    "index, count": ["index", "count"],
    "lists, floats": ["lists", "floats"],
    "floats, lists": ["floats", "lists"],
}


class Model(L.LightningModule):
    def __init__(self, forms=()):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 3))
        self.forms = tuple(FORMS[name] for name in forms)
        self.seen = []

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByBatch(Model):
    def predict_step(self, batch, batch_idx):
        return self.forms[batch_idx % len(self.forms)](self.net(batch[0]))


class ByLoader(Model):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.forms[dataloader_idx](self.net(batch[0]))


class LogsByLoader(Model):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        out = self.net(batch[0])
        self.log("n", torch.tensor(7) if dataloader_idx else (out > 0).sum(), reduce_fx="sum")
        self.log("k", 7 if dataloader_idx else len(out))
        self.log("m", out.sum() if dataloader_idx else out.mean())  # only the comparison tells that these are added


class Trains(Model):
    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.last = out.detach() if batch_idx % 2 else out.detach().mean(0)
        self.info = out.detach() if batch_idx % 2 else {"out": out.detach()}
        return {"loss": nn.functional.cross_entropy(out, batch[1]), "out": self.last}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(plain([self.last, self.info, outputs["out"]]))

    def validation_step(self, batch, batch_idx):
        out = self.net(batch[0])
        return out if self.current_epoch else out.mean(0)

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(plain(outputs))


class SaysSizes(Model):
    """Says of all batches that they are as large, or of each what it has."""

    def __init__(self):
        super().__init__()
        self.largest = torchmetrics.MaxMetric()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("of_training", loss, on_step=False, on_epoch=True, batch_size=8)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        for name, size in {
            "ten": 10,
            "samples": len(batch[0]),
            "tokens": batch[0].numel(),
            "large": int((batch[0] > 0).sum()),
        }.items():
            self.log(name, loss, batch_size=size)
        for kind in batch[1].unique().tolist():
            of_kind = batch[1] == kind
            self.log(f"kind {kind}", self.loss([each[of_kind] for each in batch]), batch_size=int(of_kind.sum()))
        self.largest.update(torch.tensor(float(batch_idx)))
        self.log("largest", self.largest, batch_size=10)


class Notes(Logger):
    name = version = "notes"

    def __init__(self):
        super().__init__()
        self.said = []

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        pass

    def note(self, name, value):
        self.said.append([name, value])

    def tell(self, name, value):
        self.note(name, value)


class Says(Model):
    """Something else to its logger in each of three batches."""

    def training_step(self, batch, batch_idx):
        size = len(batch[0])
        say, *what = [
            (self.logger.note, "samples", size),
            (self.logger.note, "index", 7),
            (self.logger.tell, "samples", 2 * size),
        ][batch_idx % 3]
        say(*what)
        return self.loss(batch)


def trainer_of(where, logger=False):
    return L.Trainer(
        accelerator="cpu",
        devices=1 if where == "plain" else 2,
        strategy="auto" if where == "plain" else PfoPipelineStrategy(),
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        max_epochs=2,
    )


def run(where):
    found = {}
    for name, forms in BY_BATCH.items():
        found[f"by batch: {name}"] = trainer_of(where).predict(ByBatch(forms), loader())
    for name, forms in BY_LOADER.items():
        found[f"by loader: {name}"] = trainer_of(where).predict(ByLoader(forms), [loader(), loader()])
    found["logs"] = trainer_of(where).validate(LogsByLoader(), [loader(), loader()], verbose=False)
    module = Trains()
    trainer_of(where).fit(module, loader(), loader())
    found["trains"] = module.seen
    trainer = trainer_of(where)
    trainer.fit(SaysSizes(), loader(37), loader(25, 10))
    found["batch sizes"] = {name: value.item() for name, value in sorted(trainer.callback_metrics.items())}
    trainer = trainer_of(where, logger := Notes())
    trainer.fit(Says(), loader(37))
    found["says"] = logger.said if trainer.global_rank == 0 else [["nothing", 0]]
    (FOLDER / f"{where}_{trainer.global_rank}.json").write_text(json.dumps(plain(found)))


if __name__ == "__main__":
    for where, number in {"plain": 1, "two": 2}.items():
        run_ranks(run, number, where)
