"""torchmetrics objects that steps update and hooks compute, several times; usage: metrics.py FOLDER.

On one rank and on two; each writes values and warnings.
"""

import json
import logging
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
DATA = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))


class Computes(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.mean, self.of_validation, self.unused, self.shown = (torchmetrics.MeanMetric() for _ in range(4))
        self.both = torchmetrics.MetricCollection(  # two of these have the same state
            {
                "square": torchmetrics.MeanSquaredError(),
                "root": torchmetrics.MeanSquaredError(squared=False),
                "absolute": torchmetrics.MeanAbsoluteError(),
            }
        )
        self.seen = []

    def training_step(self, batch, batch_idx):
        found = self.net(batch[0])
        self.mean.update(found.square().mean())
        self.both.update(found, batch[0])
        self.shown.update(found.mean())
        self.log("shown", self.shown, on_step=False, on_epoch=True, prog_bar=True)  # by the bar of the first rank
        return found.square().mean()

    def validation_step(self, batch, batch_idx):
        self.of_validation.update(self.net(batch[0]).mean())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += [self.mean.compute().item(), self.mean.compute().item()]  # the second is what was computed

    def on_train_epoch_end(self):
        self.seen += [value.item() for value in self.both.compute().values()]
        self.mean.reset()
        self.both.reset()

    def on_validation_epoch_end(self):
        self.seen.append(self.of_validation.compute().item())
        self.of_validation.reset()

    def on_train_end(self):
        self.unused.compute()
        self.seen.append(self.trainer.callback_metrics["shown"].item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Aggregates(Computes):
    """Metrics that are told of the loss, once for a batch, and of what is counted, found or said of it."""

    def __init__(self):
        super().__init__()
        kinds = ("SumMetric", "MeanMetric", "MaxMetric", "CatMetric", "RunningMean")
        self.of_loss = nn.ModuleDict({name: getattr(torchmetrics, name)() for name in kinds})
        self.logged = nn.ModuleList(torchmetrics.MaxMetric() for _ in range(2))
        self.of_two_batches = torchmetrics.wrappers.Running(torchmetrics.MeanSquaredError(), window=2)
        self.in_window = torchmetrics.wrappers.Running(torchmetrics.MeanMetric(), window=2)
        self.largest, self.rows = torchmetrics.MaxMetric(), torchmetrics.CatMetric()
        self.positive, self.large = torchmetrics.SumMetric(), torchmetrics.SumMetric()
        self.weighted, self.so_far, self.latest = (torchmetrics.MeanMetric() for _ in range(3))
        self.collected = torchmetrics.MetricCollection(
            {"a": torchmetrics.SumMetric(), "b": torchmetrics.SumMetric(), "c": torchmetrics.MinMetric()}
        )

    def training_step(self, batch, batch_idx):
        (x,) = batch
        found = self.net(x)
        loss = found.square().mean()
        for metric in self.of_loss.values():
            metric.update(loss.detach())
        self.largest.update(found.max())
        self.of_two_batches.update(found[:, 0], x[:, 0])
        self.rows.update(found[:, 0])
        self.positive.update((x > 0).sum())
        self.large.update(int((found > 0.1).sum()))
        self.collected.update(loss.detach())
        self.weighted.update(loss.detach(), weight=len(x))
        if batch_idx == 2:
            self.latest.reset()
        self.latest(value=loss.detach())
        self.logged[0](loss.detach())
        self.log("logged", self.logged[0], on_step=True, on_epoch=True)
        self.log("has no value for a batch", self.of_loss["RunningMean"])
        self.log("only updated", self.of_loss["MaxMetric"], on_step=True)
        self.so_far.update(loss.detach())
        self.log("so far", self.so_far.compute())
        self.in_window.update(loss.detach())  # the last batch is traced anew, where the window is somewhere else
        self.log("in window", self.in_window.compute())
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.logged[1](loss)
        self.log("of validation", self.logged[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += [self.of_loss["SumMetric"].compute().item(), self.of_loss["RunningMean"].compute().item()]
        self.seen += [float(self.trainer.callback_metrics[name]) for name in ("logged_step", "so far", "in window")]
        self.seen += [
            name in self.trainer.callback_metrics for name in ("has no value for a batch", "was only updated")
        ]
        self.seen.append(float(self.of_two_batches.compute()))

    def on_train_epoch_end(self):
        metrics = (*self.of_loss.values(), self.largest, self.positive, self.large, self.weighted, self.latest)
        for metric in (*metrics, self.rows):
            self.seen += [*metric.compute().reshape(-1).tolist(), metric.update_count]
            metric.reset()
        self.seen += [value.item() for value in self.collected.compute().values()]
        self.collected.reset()

    def on_validation_epoch_end(self):
        pass

    def on_train_end(self):
        self.seen += [float(self.trainer.callback_metrics[name]) for name in ("logged_epoch", "of validation")]


class Own(torchmetrics.Metric):
    """A metric whose states are put together in two ways, and written into."""

    def __init__(self):
        super().__init__()
        self.add_state("largest", torch.tensor(-9.0), dist_reduce_fx="max")
        self.add_state("number", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, found):
        self.largest = torch.maximum(self.largest, found.max())
        self.number += len(found)

    def compute(self):
        return self.largest * self.number


class Says(Computes):
    """Metrics that say something of a batch, or of all so far, which the step logs."""

    def __init__(self):
        super().__init__()
        kinds = {
            "sum": torchmetrics.SumMetric(),
            "largest": torchmetrics.MaxMetric(),
            "least": torchmetrics.MinMetric(),
            "mean": torchmetrics.MeanMetric(),
            "own": Own(),
            "f1": torchmetrics.F1Score("binary"),
            "auroc": torchmetrics.AUROC("binary"),
            "twice": torchmetrics.MeanSquaredError(squared=False),
            "r2": torchmetrics.R2Score(),  # of a microbatch of one sample it says nothing
        }
        self.told, self.asked = nn.ModuleDict(kinds), nn.ModuleDict({name: kinds[name].clone() for name in kinds})
        self.all = nn.ModuleDict({name: kinds[name].clone() for name in ("sum", "largest", "mean")})
        self.f1s = torchmetrics.MetricCollection([torchmetrics.F1Score("binary"), torchmetrics.Recall("binary")])

    def training_step(self, batch, batch_idx):
        (x,) = batch
        found = self.net(x)
        loss, first = found.square().mean(), found[:, 0].detach()
        arguments = {
            "sum": ((first > 0).sum(),),
            "largest": (first,),
            "least": (loss.detach(),),
            "mean": (loss.detach(), len(x)),
            "own": (found.detach(),),
            "f1": (first.sigmoid(), (x[:, 0] > 0).int()),
            "auroc": (first.sigmoid(), (x[:, 0] > 0).int()),
            "twice": (first, x[:, 0]),
            "r2": (first, x[:, 0]),
        }
        for name, of_name in arguments.items():
            self.told[name](*of_name)
            self.log(name, self.told[name], on_step=True, on_epoch=True)
            self.log(f"{name} asked", self.asked[name](*of_name))
        self.told["twice"](first, x[:, 1])
        self.log("second", self.told["twice"])
        self.log_dict(self.f1s(*arguments["f1"]))
        self.log("before", self.all["sum"].compute())
        for name, metric in self.all.items():
            metric.update(*arguments[name])
            self.log(f"{name} of all", metric.compute())
        self.all["sum"].update(1)
        return loss

    def validation_step(self, batch, batch_idx):
        pass

    def on_train_batch_end(self, outputs, batch, batch_idx):
        shown = self.trainer.callback_metrics
        self.seen += [float(value) for name, value in sorted(shown.items()) if not name.endswith("_epoch")]

    def on_train_epoch_end(self):
        pass

    def on_train_end(self):
        self.seen += [float(self.trainer.callback_metrics[f"{name}_epoch"]) for name in self.told]


class MakesOf(Computes):
    """Numbers that the step makes of what metrics say, and logs, keeps in a list or sets."""

    def __init__(self):
        super().__init__()
        self.hits, self.number = torchmetrics.SumMetric(), torchmetrics.SumMetric()
        self.loss, self.f1 = torchmetrics.MeanMetric(), torchmetrics.F1Score("binary")
        self.kept, self.latest = [], 0.0

    def training_step(self, batch, batch_idx):
        (x,) = batch
        found = self.net(x)
        loss, first = found.square().mean(), found[:, 0].detach()
        self.hits.update((first > 0).sum())
        self.number.update(len(x))
        self.loss.update(loss.detach(), len(x))
        share = self.hits.compute() / self.number.compute()
        of_batch = self.f1(first.sigmoid(), (x[:, 0] > 0).int())
        self.log_dict({"share": share, "percent": 100 * share, "rest": 1 - share.item()})
        self.log("n", self.number.compute().item())
        self.log_dict({"perplexity": self.loss.compute().exp(), "f1": of_batch.item(), "in percent": 100 * of_batch})
        self.kept += [float(self.hits.compute()), share]
        self.latest = share
        return loss

    def validation_step(self, batch, batch_idx):
        pass

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += [float(value) for _, value in sorted(self.trainer.callback_metrics.items())]
        self.seen.append(float(self.latest))

    def on_train_epoch_end(self):
        self.hits.reset()

    def on_validation_epoch_end(self):
        pass

    def on_train_end(self):
        self.seen += map(float, self.kept)


class Criterion:
    """A loss that grows with the number of its calls."""

    def __init__(self):
        self.calls, self.weight = 0, 0.0

    def __call__(self, found):
        self.calls += 1
        self.weight = min(1.0, self.calls / 5)
        return found.square().mean() * (1 + self.weight)


class Keeps(Computes):
    """Counts that the step keeps in lists; the last batch has microbatches of one sample."""

    def __init__(self):
        super().__init__()
        self.hits, self.number, self.total, self.kept = 0, 0, 0.0, []
        self.criterion = Criterion()

    def training_step(self, batch, batch_idx):
        found = self.net(batch[0])
        loss = self.criterion(found)
        self.hits += int((found[:, 0] > 0.15).sum())  # of some batches there are none
        self.number += len(found)
        self.total += loss.item() * len(found)
        self.kept += [self.hits, self.total / self.number]
        return loss

    def validation_step(self, batch, batch_idx):
        pass

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass

    def on_train_epoch_end(self):
        pass

    def on_validation_epoch_end(self):
        pass

    def on_train_end(self):
        self.seen += [self.hits, self.number, self.total, *self.kept, self.criterion.calls, self.criterion.weight]


class Warned(logging.Handler):
    """Keeps what is said of numbers that are others than on one device."""

    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        if "neither their mean" in record.getMessage():
            self.said.append(record.getMessage())


def run(number, kind, rows):
    logging.getLogger("lightning_pfo").addHandler(warned := Warned())
    trainer = L.Trainer(
        accelerator="cpu",
        devices=number,
        strategy=PfoPipelineStrategy(num_microbatches=4) if number > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=kind is Computes,
        enable_model_summary=False,
        max_epochs=2,
    )
    module, loader = kind(), DataLoader(TensorDataset(DATA[:rows]), batch_size=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader, loader)
    told = [str(warning.message) for warning in caught if "``compute`` method" in str(warning.message)]
    found = json.dumps({"seen": module.seen, "told": told, "warned": warned.said})
    (FOLDER / f"{kind.__name__}_{number}_{trainer.global_rank}.json").write_text(found)


for number in (1, 2):
    run_ranks(run, number, number, Computes, 30)
    run_ranks(run, number, number, Aggregates, 28)
    run_ranks(run, number, number, Says, 28)
    run_ranks(run, number, number, MakesOf, 28)
    run_ranks(run, number, number, Keeps, 28)
