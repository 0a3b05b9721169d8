"""First and last rows of batches that steps keep, return and give to a logger; usage: taken_rows.py FOLDER.

The same run by a plain Trainer and by the pipeline on two ranks; each writes what it found after every batch. The last
batch is short: its microbatches have one sample or two, fewer than the steps take, and all of it has as many samples
as a microbatch of the others.
"""

import json
import sys
from collections import deque
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.utils.data import DataLoader

from tests.ranks import run_ranks
from tests.strategy.two_ranks import WHERE, make_trainer

FOLDER = Path(sys.argv[1])
GENERATOR = torch.Generator().manual_seed(0)
INPUTS, LABELS = torch.randn(45, 6, generator=GENERATOR), torch.randint(0, 5, (45,), generator=GENERATOR)
SAMPLES = [(*pair, f"sample {index}") for index, pair in enumerate(zip(INPUTS, LABELS, strict=True))]


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple, deque)) else value


class Pictures(DummyLogger):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.shown = []

    @property
    def experiment(self):
        return self

    def add(self, *what):
        self.shown.append(plain(what))


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
        self.replayed = deque(maxlen=3)
        self.kept, self.first, self.last, self.largest, self.found = {}, None, None, None, []

    def training_step(self, batch, batch_idx):
        inputs, labels, texts = batch
        again, their_labels = self.replayed[0] if self.replayed else (inputs[:0], labels[:0])
        outputs, of_again = self.net(torch.cat([inputs, again])).split([len(inputs), len(again)])
        self.kept = {
            "first rows": inputs[:2].clone(),
            "last rows": outputs[-2:].detach(),
            "more than a microbatch has": inputs[:9],
            "of layers": outputs[:9].argmax(1),
            "last of many": labels[-9:],
            "texts": (texts[:2], texts[-3:], texts[:9]),
            "pairs": list(zip(texts[:2], outputs[:2].argmax(1).tolist(), strict=True)),
            "numbers": labels[:2].tolist(),
            "tensors": list(inputs[:2]),
            "samples": [inputs[0], labels[-1], float(inputs[0, 0]), int(labels.max()), int(labels[-1])],
        }
        self.latest = deque([inputs[:1]], maxlen=2)
        self.rows, self.targets = outputs.detach()[:, :3], labels
        self.first, self.last, self.largest = int(labels[0]), int(labels[-1]), int(labels.max())
        loss = nn.functional.cross_entropy(outputs, labels)
        if self.replayed:
            loss = loss + nn.functional.cross_entropy(of_again, their_labels)
        self.replayed.append((inputs[:2].clone(), labels[:2].clone()))
        self.logger.experiment.add("inputs", inputs[:2], self.global_step)
        self.logger.experiment.add("outputs", outputs[:3].detach(), texts[:3])
        return {"loss": loss, "shown": outputs[:2].detach(), "texts": texts[:2]}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        state = self.rows, self.targets, self.kept, self.latest, self.first, self.last, self.largest, self.replayed
        self.found.append(plain((outputs["loss"].item(), outputs["shown"], outputs["texts"], *state)))

    def validation_step(self, batch, batch_idx):
        outputs = self.net(batch[0])
        self.seen = outputs[:3].argmax(1)
        return outputs[:2], batch[2][:3]

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.found.append(plain((outputs, self.seen)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(where):
    L.seed_everything(3, verbose=False)
    logger = Pictures()
    trainer = make_trainer(where, FOLDER, logger=logger)
    module = Module()
    trainer.fit(module, DataLoader(SAMPLES, batch_size=20), DataLoader(SAMPLES[:25], batch_size=20))
    found = {"batches": module.found, "shown": logger.shown if trainer.is_global_zero else None}
    (FOLDER / f"{where}_{trainer.global_rank}.json").write_text(json.dumps(found))


for where, num_ranks in WHERE.items():
    run_ranks(fit, num_ranks, where)
