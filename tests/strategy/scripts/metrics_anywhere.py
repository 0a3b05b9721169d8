"""torchmetrics objects that are no attributes at the start: copied in hooks, in containers, own objects and variables.

On one rank and on two; each writes what hooks compute. Usage: metrics_anywhere.py FOLDER.
"""

import json
import os
import sys
from pathlib import Path

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
NOISE = torch.Generator().manual_seed(1)
SAMPLES, CLASSES = torch.randn(37, 8, generator=NOISE), torch.randint(3, (37,), generator=NOISE)


def accuracy():
    return torchmetrics.Accuracy(task="multiclass", num_classes=3)


class Measured(L.LightningModule):
    batch_size = 8

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 3))
        self.seen = []
        self.prepare()

    def prepare(self):
        pass

    def metric(self):
        return self.accuracy

    def training_step(self, batch, batch_idx):
        found = self.net(batch[0])
        self.metric().update(found.argmax(1), batch[1])
        return nn.functional.cross_entropy(found, batch[1])

    def validation_step(self, batch, batch_idx):
        self.metric().update(self.net(batch[0]).argmax(1), batch[1])

    def on_validation_epoch_end(self):
        self.note()  # after which training counts anew

    def on_train_epoch_end(self):
        self.note()

    def note(self):
        values = self.metric().compute()
        self.seen += [value.item() for value in (values.values() if isinstance(values, dict) else [values])]
        self.metric().reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Cloned(Measured):
    def prepare(self):
        self.base = accuracy()

    def on_fit_start(self):
        self.accuracy = self.base.clone()


class ClonedLate(Measured):
    def prepare(self):
        self.accuracy = self.base = accuracy()

    def on_train_epoch_start(self):
        self.accuracy = self.base.clone()


class ClonedCollection(Measured):
    def prepare(self):
        precision = torchmetrics.Precision(task="multiclass", num_classes=3, average="macro")
        self.base = torchmetrics.MetricCollection([accuracy(), precision])

    def on_fit_start(self):
        self.accuracy = self.base.clone(prefix="train_")


class Tracked(Measured):
    def prepare(self):
        self.tracker = torchmetrics.MetricTracker(accuracy())

    def metric(self):
        return self.tracker

    def on_validation_epoch_start(self):
        self.tracker.increment()

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def note(self):
        self.seen.append(self.tracker.best_metric())


class TrackedInStep(Tracked):
    """Each microbatch would add a metric of its own."""

    def on_validation_epoch_start(self):
        pass

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.tracker.increment()
        super().validation_step(batch, batch_idx)


class MadeInHook(Measured):
    def on_fit_start(self):
        self.accuracy = accuracy()

    def on_train_batch_end(self, outputs, batch, batch_idx):  # a rank may not remember what it computed before
        self.seen.append(self.accuracy.compute().item())


class InDict(Measured):
    def prepare(self):
        self.metrics = {"train": accuracy()}

    def metric(self):
        return self.metrics["train"]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(self.metric().compute().item())


class OnlyTrains:
    """Before one of the modules: it has nothing to say of validation."""

    def validation_step(self, batch, batch_idx):
        pass

    def on_validation_epoch_end(self):
        pass


class LoggedFromDict(OnlyTrains, InDict):
    """As an object, with the name that Lightning asks for then; it takes any."""

    metric_attribute = "metrics.train"

    def training_step(self, batch, batch_idx):
        found = self.net(batch[0])
        self.metric()(found.argmax(1), batch[1])
        self.log("accuracy", self.metric(), metric_attribute=self.metric_attribute, on_step=True, on_epoch=True)
        return nn.functional.cross_entropy(found, batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(self.trainer.callback_metrics["accuracy_step"].item())

    def on_train_epoch_end(self):
        self.seen.append(self.metric().compute().item())

    def on_train_end(self):
        self.seen.append(self.trainer.callback_metrics["accuracy_epoch"].item())


class LoggedFromVariable(LoggedFromDict):
    metric_attribute = "mine"

    def metric(self):
        return ACCURACY


class FromTwenty(torchmetrics.Metric):
    """Counts samples, and has something to say from 20 on."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, found, _):
        self.samples += len(found)

    def compute(self):
        if self.samples < 20:
            raise ValueError("too few samples yet")
        return self.samples.float()


class FailsToCompute(InDict):
    """What is computed raises, and a hook goes on."""

    def prepare(self):
        self.samples = FromTwenty()

    def metric(self):
        return self.samples

    def on_train_batch_end(self, outputs, batch, batch_idx):
        try:
            self.seen.append(self.samples.compute().item())
        except ValueError:
            self.seen.append(-1.0)

    def on_train_epoch_end(self):
        pass


class Median(torchmetrics.Metric):
    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("found", [], dist_reduce_fx="cat")

    def update(self, found):
        self.found.append(found.detach())

    def compute(self):
        return (torch.cat(self.found) if isinstance(self.found, list) else self.found).median()


class LoggedForEpochs(OnlyTrains, Measured):
    """A metric of the user's that keeps samples, is called in the step, and logged for epochs only."""

    def prepare(self):
        self.median = Median()

    def training_step(self, batch, batch_idx):
        found = self.net(batch[0])
        self.median(found[:, 0])
        self.log("median", self.median, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(found, batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += [self.median.compute().item(), *map(len, self.median.found)]

    def on_train_epoch_end(self):
        pass

    def on_train_end(self):
        self.seen.append(self.trainer.callback_metrics["median"].item())


class InLongEpochs(LoggedForEpochs):
    """Batch 16 is compared with one device too, and finds samples of batch 15 in a place that was new then."""

    batch_size = 2


class InList(InDict):
    def prepare(self):
        self.metrics = [accuracy()]

    def metric(self):
        return self.metrics[0]


class Holder:
    def __init__(self):
        self.metric = accuracy()


class InObject(InDict):
    def prepare(self):
        self.holder = Holder()

    def metric(self):
        return self.holder.metric


KEPT = {}


class InVariable(InDict):
    def prepare(self):
        KEPT["metric"] = accuracy()

    def metric(self):
        return KEPT["metric"]


ACCURACY = accuracy()


class Variable(InDict):
    def metric(self):
        return ACCURACY


class OfLayers(InDict):
    """In a dict that a layer holds."""

    def prepare(self):
        self.net.metrics = {"train": accuracy()}

    def metric(self):
        return self.net.metrics["train"]


class Counts(Measured):
    """Before the model, where all stages run the step, and as one that adds up."""

    def prepare(self):
        self.counts = {"samples": torchmetrics.SumMetric()}

    def metric(self):
        return self.counts["samples"]

    def training_step(self, batch, batch_idx):
        self.metric().update(float(len(batch[0])))
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    validation_step = training_step


class CountsInAttribute(Counts):
    def prepare(self):
        self.samples = torchmetrics.SumMetric()

    def metric(self):
        return self.samples


class OfEarlyLayer(Measured):
    """Told of what the first stage alone has computed; the validation calls no other."""

    def prepare(self):
        self.accuracy, self.error = accuracy(), torchmetrics.MeanSquaredError()

    def training_step(self, batch, batch_idx):
        early = self.net[0](batch[0])
        self.accuracy.update(early[:, :3], batch[1])
        self.log("error", self.error(early[:, 3], batch[0][:, 0]))
        return nn.functional.cross_entropy(self.net[1:](early), batch[1])

    def validation_step(self, batch, batch_idx):
        early = self.net[0](batch[0])
        self.accuracy(early[:, :3], batch[1])
        self.error.update(early[:, 3], batch[0][:, 0])

    def note(self):
        self.seen.append(self.error.compute().item())
        self.error.reset()
        super().note()

    def on_train_epoch_end(self):
        """The validation comes before, and notes all."""


class OfCallback(Measured):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.net(batch[0])

    def note(self):
        pass

    def configure_callbacks(self):
        return [Counting(self)]


class Counting(L.Callback):
    """Adds up in hooks, which all ranks run."""

    def __init__(self, module):
        self.samples, self.seen = torchmetrics.SumMetric(), module.seen
        self.alone = torchmetrics.SumMetric()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.samples.update(len(batch[0]))
        if trainer.is_global_zero:
            self.alone.update(len(batch[0]))

    def on_train_epoch_end(self, trainer, module):
        self.seen += [self.samples.compute().item(), self.alone.compute().item()]


CASES = [
    *(Cloned, ClonedLate, ClonedCollection, Tracked, MadeInHook),
    *(InDict, InList, InObject, InVariable, Variable, OfLayers, Counts, CountsInAttribute, OfEarlyLayer, OfCallback),
    *(LoggedFromDict, LoggedFromVariable, FailsToCompute, LoggedForEpochs, InLongEpochs),
]


def run(number, more, cases):
    for case in cases:
        L.seed_everything(3, verbose=False)
        ACCURACY.reset()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=number,
            strategy=PfoPipelineStrategy(num_microbatches=4, **more) if number > 1 else "auto",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=2,
            num_sanity_val_steps=0,
        )
        module, loader = case(), DataLoader(TensorDataset(SAMPLES, CLASSES), case.batch_size)
        trainer.fit(module, loader, loader)
        of_schedule = "_" + "_".join(map(str, more.values())) if more else ""
        path = FOLDER / f"{case.__name__}_{number}_{trainer.global_rank}{of_schedule}.json"
        path.write_text(json.dumps(module.seen))


def refused():
    try:
        run(2, {}, [TrackedInStep])
    except ConfigurationError as error:
        (FOLDER / f"refused_{os.environ['RANK']}.json").write_text(json.dumps(str(error)))


run_ranks(refused, 2)
run_ranks(run, 1, 1, {}, CASES)
run_ranks(run, 2, 2, {}, CASES)
for settings in ({"schedule": "interleaved_1f1b"}, {"schedule": "gpipe", "loss_over": "batch"}):
    run_ranks(run, 2, 2, settings, [InDict, Counts, CountsInAttribute])
