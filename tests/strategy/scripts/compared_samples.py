"""Evaluations that compare samples of a batch with each other; usage: compared_samples.py FOLDER.

The same run by a plain Trainer and by the pipeline on two ranks; each writes what it found, and what it was told of.
"""

import json
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError
from torchmetrics.classification import BinaryAccuracy
from torchmetrics.retrieval import RetrievalMRR

from tests.ranks import run_ranks
from tests.strategy.two_ranks import WHERE, listen, make_trainer

FOLDER = Path(sys.argv[1])
INPUTS = torch.randn(27, 6, generator=torch.Generator().manual_seed(0))


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
        self.mrr, self.top, self.far, self.near = RetrievalMRR(), BinaryAccuracy(), MeanSquaredError(), BinaryAccuracy()
        self.names, self.files = [], []

    def training_step(self, batch, batch_idx):
        outputs = self.net(batch)
        score = outputs[:, 0].detach()
        self.near(score > score.median(), score > 0)  # which is told of
        self.files.extend(f"{batch_idx}_{row}.png" for row in range(len(batch)))  # which is, too
        return outputs.square().mean()

    def validation_step(self, batch, batch_idx):
        outputs = self.net(batch)
        similar = outputs @ (outputs + 0.3 * batch).T
        number = len(batch)
        places = torch.arange(number)
        self.mrr.update(
            similar.flatten(), torch.eye(number).long().flatten(), places.repeat_interleave(number) + 100 * batch_idx
        )
        self.top.update((similar.argmax(1) == places).float(), torch.ones(number).long())
        self.far(outputs[:, 0], batch[:, 0].sort().values)
        self.log_dict({"mrr": self.mrr, "top": self.top, "far": self.far})
        self.log("median", outputs.median())

    def test_step(self, batch, batch_idx):
        self.log("mean", self.net(batch).mean())
        self.names.extend(f"{batch_idx}_{row}" for row, _ in enumerate(batch))

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        outputs = self.net(batch)
        if dataloader_idx == 1:
            return [{"name": f"row{row}", "path": Path(f"{batch_idx}_{row}.png")} for row in range(len(batch))]
        if dataloader_idx == 2:  # which depends on each sample alone
            return [f"{'plus' if value > 0 else 'minus'} {value:.4f}" for value in outputs[:, 0].tolist()]
        first = outputs[:, 0]
        scores = (first - first.mean()) / first.std()
        return {"scores": scores, "ranks": first.argsort().argsort(), "similar": outputs @ outputs.T}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Decoder(Module):
    """Decodes a batch as one sequence; in the first batches of one state only, as untrained ones do."""

    def validation_step(self, batch, batch_idx):
        self.net(batch)
        state, self.names = 2, []
        for is_other in (batch[:, 0] > 5).tolist():
            state += is_other
            self.names.append(state)
        self.log("length", float(sum(self.names)))

    def on_validation_batch_end(self, *args):
        self.files.append(list(self.names))


def run(where):
    said = listen()
    L.seed_everything(3, verbose=False)
    trainer = make_trainer(where, FOLDER)
    module = Module()
    loader = DataLoader(INPUTS, batch_size=12)
    trainer.fit(module, loader, loader)
    found = {"validated": {name: float(value) for name, value in trainer.callback_metrics.items()}}
    found["tested"] = trainer.test(module, loader, verbose=False)
    found["named"] = module.names
    predicted, rows, signs = trainer.predict(module, [loader] * 3)
    found["predicted"] = [{name: value.tolist() for name, value in each.items()} for each in predicted]
    found["rows"] = [[{name: str(value) for name, value in row.items()} for row in each] for each in rows]
    found["signs"] = signs
    rows = torch.cat([torch.zeros(4 * 12, 6), 10 * INPUTS])
    module = Decoder()
    found["decoded"] = [make_trainer(where, FOLDER).validate(module, DataLoader(rows, 12), verbose=False), module.files]
    texts = [text for text in said if "are others than on one device" in text]
    (FOLDER / f"{where}_{trainer.global_rank}.json").write_text(json.dumps({"found": found, "said": texts}))


for where, num_ranks in WHERE.items():
    run_ranks(run, num_ranks, where)
