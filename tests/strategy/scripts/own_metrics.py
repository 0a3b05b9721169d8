"""Metrics of a user's own classes, with states of each kind of reduction; usage: own_metrics.py FOLDER.

The same run by a plain Trainer and by the pipeline on two ranks; each writes what hooks compute and what is logged.
"""

import json
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, Metric, SumMetric
from torchmetrics.wrappers import Running

from tests.ranks import run_ranks
from tests.strategy.two_ranks import WHERE, listen, make_trainer

FOLDER = Path(sys.argv[1])
INPUTS = torch.randn(45, 6, generator=torch.Generator().manual_seed(0))  # the last of three batches is short


def root_of_squares(states):
    return states.square().sum(0).sqrt()


REDUCTIONS = {
    "sum": "sum",
    "mean": "mean",
    "max": "max",
    "min": "min",
    "cat": "cat",
    "none": None,
    "own": root_of_squares,
}
COMPUTED = ("sum", "mean", "max", "min", "own")
"""Those that a step computes; with lists, each microbatch has those of its own samples only."""


class Of(Metric):
    """A state of a reduction, and an attribute beside."""

    full_state_update = False

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls = kind, 0
        default = [] if kind in ("cat", "none") else torch.tensor({"max": -9.0, "min": 9.0}.get(kind, 0.0))
        self.add_state("value", default, dist_reduce_fx=REDUCTIONS[kind])
        self.add_state("number", torch.tensor(0), dist_reduce_fx="sum")
        if kind == "mean":
            self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, values):
        self.calls += 1
        if self.kind == "sum":
            self.value = self.value + values.sum()
        elif self.kind == "mean":
            self.value = (self.value * self.number + values.sum()) / (self.number + len(values))
            self.rows.append(values)
        elif self.kind in ("max", "min"):
            self.value = getattr(torch.cat([self.value.reshape(1), values]), self.kind)()
        elif self.kind == "own":
            self.value = root_of_squares(torch.cat([self.value.reshape(1), values]))
        else:
            self.value.append(values)
        self.number = self.number + len(values)

    def compute(self):
        if self.kind in ("cat", "none"):
            self.items = len(self.value)
            values = torch.cat(self.value) if isinstance(self.value, list) else self.value
            return values.sum() / self.number + values.max()
        if self.kind == "mean":  # which has samples besides
            return self.value + (torch.cat(self.rows) if isinstance(self.rows, list) else self.rows).square().sum()
        return self.value / self.number if self.kind == "sum" else self.value


class Meters:
    """An object of the user's own with metrics, of torchmetrics too."""

    def __init__(self):
        self.mean, self.sums = Of("mean"), [SumMetric(), Running(SumMetric(), window=2)]


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
        self.updated = nn.ModuleDict({kind: Of(kind) for kind in REDUCTIONS})
        self.called = nn.ModuleDict({kind: Of(kind) for kind in REDUCTIONS})
        self.computed = nn.ModuleDict({kind: Of(kind) for kind in COMPUTED})
        self.apart = {"own": Of("own"), "sum": SumMetric()}
        self.listed = [Of("mean"), MaxMetric()]
        self.meters = Meters()
        self.by_name = {"mean": self.updated["mean"], "sum": SumMetric(), "again": self.called["own"]}
        self.counted = self.by_name["sum"]
        self.seen = []

    def apart_from_layers(self):
        """Metrics that are in none of the module's modules."""
        return [*self.apart.values(), *self.listed, self.meters.mean, *self.meters.sums]

    def training_step(self, batch, batch_idx):
        outputs = self.net(batch)
        values = outputs[:, 0].detach()
        for kind in REDUCTIONS:
            self.updated[kind].update(values)
            self.called[kind](values)
            self.log(f"called_{kind}", self.called[kind], on_step=True, on_epoch=True)
        for kind in COMPUTED:
            self.computed[kind].update(values)
            self.log(f"computed_{kind}", self.computed[kind].compute(), on_step=True, on_epoch=False)
        loss = outputs.square().mean()
        for index, metric in enumerate(self.apart_from_layers()):
            metric(values if isinstance(metric, Of) else loss.detach())
            self.log(f"apart_{index}", metric.compute(), on_step=True, on_epoch=False)
        self.counted.update(loss.detach())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        found = {name: float(value) for name, value in self.trainer.logged_metrics.items() if "epoch" not in name}
        self.seen.append(found)

    def on_train_epoch_end(self):
        for metrics in (self.updated, self.computed):
            self.seen.append({kind: float(metric.compute()) for kind, metric in metrics.items()})
            for metric in metrics.values():
                metric.reset()

        self.seen.append([float(metric.compute()) for metric in (*self.apart_from_layers(), self.counted)])
        self.seen.append({kind: metric.calls for kind, metric in self.updated.items()})
        self.seen.append({kind: metric.calls for kind, metric in self.called.items()})
        self.seen.append([metric.calls for metric in self.apart_from_layers() if isinstance(metric, Of)])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(where):
    said = listen()
    L.seed_everything(3, verbose=False)
    trainer = make_trainer(where, FOLDER)
    module = Module()
    trainer.fit(module, DataLoader(INPUTS, batch_size=20))
    epoch = {name: float(value) for name, value in trainer.callback_metrics.items() if name.endswith("epoch")}
    texts = [text for text in said if "than on one device" in text]
    found = {"seen": module.seen, "epoch": epoch, "said": texts}
    (FOLDER / f"{where}_{trainer.global_rank}.json").write_text(json.dumps(found))


for where, num_ranks in WHERE.items():
    run_ranks(run, num_ranks, where)
