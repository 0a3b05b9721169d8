"""What steps leave behind of all kinds; usage: left_behind.py FOLDER PLACES [CASE ...].

The same runs by a plain Trainer, and by the pipeline on one and two ranks; each writes what it found afterwards.
"""

import collections
import csv
import gc
import io
import itertools
import json
import math
import pickle
import random
import sys
import types
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler, Subset, TensorDataset, default_collate
from torchmetrics.classification import BinaryF1Score

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks
from tests.strategy.scripts import another_file

FOLDER = Path(sys.argv[1])
DATA = torch.randn(22, 4, generator=torch.Generator().manual_seed(1))
HISTORY, COUNTED, NUMBER = [], {"batches": 0}, 0


def plain(value):
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [plain(item) for item in value]
    if isinstance(value, set):
        return sorted(value)
    if hasattr(value, "__slots__"):
        return {name: plain(getattr(value, name)) for name in value.__slots__}
    is_object = hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type))
    return {name: plain(item) for name, item in vars(value).items()} if is_object else value


class Base(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        output = self.layers(batch[0])
        self.note(batch[0], output, batch_idx)
        return output.square().mean()

    def note(self, x, output, batch_idx):
        """What a step leaves behind."""

    def found(self):
        """It."""


class Meter:
    """As in many projects."""

    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, value, number=1):
        self.val = value
        self.sum += value * number
        self.count += number
        self.avg = self.sum / self.count


class Smoothed:
    """As in torchvision's references."""

    def __init__(self):
        self.deque, self.total, self.count = deque(maxlen=3), 0.0, 0

    def update(self, value, number=1):
        self.deque.append(value)
        self.count += number
        self.total += value * number


class Evaluator:
    def __init__(self):
        self.predictions, self.by_sign, self.seen, self.names = [], defaultdict(list), 0, {"all": set()}
        self.child = Smoothed()
        self.parent, self.child.parent = None, self
        self.losses, self.kinds, self.last = [], Counter(), None

    def update(self, x, output):
        self.predictions.append(output.detach())
        self.by_sign["positive"].extend(output[:, 0].tolist())
        self.seen += len(x)
        self.names["all"].update(f"{value:.4f}" for value in output[:, 1].tolist())
        self.child.update(output.square().mean().item(), len(x))
        self.losses = [*self.losses, output.square().mean().item()]
        self.kinds["samples"] += len(x)
        self.last = output[:, 0].detach()


@dataclass
class Record:
    batch: int
    loss: float
    outputs: torch.Tensor


@dataclass(slots=True)
class State:
    steps: int = 0
    rows: list = field(default_factory=list)


class Objects(Base):
    """Objects of the user's, in attributes, in containers and in each other."""

    def __init__(self):
        super().__init__()
        self.evaluator, self.meters, self.state = Evaluator(), {"loss": Meter(), "once": Meter()}, State()
        self.evaluator.self_again = self.evaluator
        self.plain, self.progress = types.SimpleNamespace(rows=[], number=0), types.SimpleNamespace(step=0)
        self.smoothed, self.records = [Smoothed(), Smoothed()], []

    def note(self, x, output, batch_idx):
        loss = output.square().mean().item()
        self.evaluator.update(x, output)
        self.meters["loss"].update(loss, len(x))
        self.meters["once"].update(loss)
        self.state.steps += 1
        self.state.rows.append(output[:, 0].detach())
        self.plain.rows.append(loss)
        self.plain.number += 1
        self.progress.step += 1
        self.smoothed[0].update(loss)
        self.smoothed[1].update(loss, len(x))
        self.records.append(Record(batch_idx, loss, output.detach()))

    def found(self):
        del self.evaluator.self_again, self.evaluator.child.parent
        of_step = (self.evaluator, self.meters, self.state, self.plain, self.progress, self.smoothed, self.records)
        return plain(of_step)


class Part(nn.Module):
    """Runs layers, and keeps what it has seen."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        self.calls, self.lengths, self.last, self.seen = 0, [], None, []

    def forward(self, x):
        self.calls += 1
        self.lengths.append(len(x))
        x = self.layers(x)
        self.last = x.detach()
        self.seen.append(x.mean().item())
        return x


class Layer(nn.Module):
    """Counts calls and samples, on its own, and keeps means and sums, some from its class's on; once in a list."""

    turns, total = 0, 0.5

    def __init__(self, kept=None):
        super().__init__()
        self.linear, self.calls, self.samples, self.mean, self.sum = nn.Linear(4, 4), 0, 1, 0.0, 0.5
        self.kept = kept

    def forward(self, x):
        self.calls += 1
        self.samples += len(x)
        x = self.linear(x).tanh()
        self.mean += x.detach().mean().item()
        self.sum += x.detach().sum().item()
        self.turns += 1
        self.total += x.detach().sum().item()
        if self.kept is not None:
            self.kept.append(len(x))
        return x

    def counted(self):
        return [self.calls, self.samples, self.mean, self.sum, self.turns, self.total]


class Layers(Base):
    def __init__(self):
        super().__init__()
        self.layers, self.seen = nn.Sequential(Layer([]), Layer(), Layer(), Layer()), []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append([layer.counted() for layer in self.layers])

    def validation_step(self, batch, batch_idx):
        return self.layers(batch[0]).mean()

    def on_validation_epoch_end(self):
        self.seen.append([layer.counted() for layer in self.layers])

    def found(self):
        return self.seen


class Alternates(nn.Module):
    """Calls another layer each time."""

    def __init__(self):
        super().__init__()
        self.layers, self.calls = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), 0

    def forward(self, x):
        self.calls += 1
        return self.layers[self.calls % 2](x)


class CoolsDown(nn.Linear):
    """Has a temperature that falls with each call."""

    temperature = 1.0

    def forward(self, x):
        self.temperature = max(0.3, 0.9 * self.temperature)
        return (super().forward(x) / self.temperature).tanh()


class WarmsUp(nn.Linear):
    """Counts in training only, and uses it; has a number that is none before the first call."""

    def __init__(self, size):
        super().__init__(size, size)
        self.steps, self.samples, self.noise, self.scale = 0, 0, 1.0, None

    def forward(self, x):
        self.scale = self.scale or x.shape[-1] ** 0.5
        factor = self.noise
        if self.training:
            self.steps += 1
            self.samples += len(x)
            self.noise *= 0.9
            factor = factor * min(1.0, self.steps / 4)
        return super().forward(x) * factor * self.scale


class CountsInBuffers(nn.Linear):
    """Counts in buffers, one of which changes in training only, and uses them."""

    def __init__(self, size):
        super().__init__(size, size)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("factor", torch.ones(1))

    def forward(self, x):
        if self.training:
            self.steps += 1
        self.factor.mul_(0.9)
        return super().forward(x) * self.factor / (1 + self.steps)


class TakesFirstValues(nn.Linear):
    """Scales by what it saw first, and knows by a buffer that it has (ActNorm)."""

    def __init__(self, size):
        super().__init__(size, size)
        self.register_buffer("is_known", torch.tensor(0))

    def forward(self, x):
        if not self.is_known:
            self.is_known.fill_(1)
            with torch.no_grad():
                self.bias.fill_(0.1)
        return super().forward(x)


class UsesCounts(Base):
    """Layers that use what they count."""

    def __init__(self):
        super().__init__()
        kinds = CountsInBuffers, WarmsUp, TakesFirstValues
        parts = (nn.Sequential(Alternates(), CoolsDown(4, 4), *(kind(4) for kind in kinds)) for _ in range(3))
        self.layers, self.seen = nn.Sequential(*parts), []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        counted = [
            (alternates.calls, cools_down.temperature, warms_up.steps, warms_up.samples, warms_up.noise)
            for alternates, cools_down, _, warms_up, _ in self.layers
        ]
        self.seen.append([outputs["loss"].item(), counted])

    def found(self):
        return self.seen


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.history, self.samples = [], 0

    def forward(self, output):
        loss = output.square().mean()
        self.history.append(loss.item())
        self.samples += len(output)
        return loss


class Modules(Base):
    """Attributes of other modules."""

    def __init__(self):
        super().__init__()
        self.layers, self.criterion = Part(), Criterion()

    def training_step(self, batch, batch_idx):
        return self.criterion(self.layers(batch[0]))

    def found(self):
        part, criterion = self.layers, self.criterion
        return plain((part.calls, part.lengths, part.last, part.seen, criterion.history, criterion.samples))


class Read(TensorDataset):
    """A dataset that counts."""

    read = 0


class Data(L.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.used = []

    def train_dataloader(self):
        return DataLoader(Read(DATA), batch_size=6)

    def val_dataloader(self):  # those of modules do not count beside it
        return self.train_dataloader()


class Watching(L.Callback):
    def __init__(self):
        self.outputs, self.batches = [], 0


def make_closed(history):
    class Closed(Base):
        """Writes into what its functions know besides their arguments."""

        def note(self, x, output, batch_idx):
            global NUMBER
            NUMBER += 1
            HISTORY.append(output.mean().item())
            COUNTED["batches"] += 1
            history.append(output[:, 0].detach())
            self.trainer.datamodule.used.append(len(x))
            self.trainer.callbacks[0].outputs.append(output.detach())
            self.trainer.callbacks[0].batches += 1

        def found(self):
            watching = self.trainer.callbacks[0]
            kept = (HISTORY, COUNTED, NUMBER, history, watching.outputs, watching.batches)
            return plain(kept)

    return Closed()


class OfTrainer(Base):
    """Sets what its Trainer has: learning rates, schedulers, when to stop."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=torch.tensor(0.1), momentum=0.5)
        schedule = torch.optim.lr_scheduler
        in_turn = [schedule.ExponentialLR(optimizer, 0.9), schedule.ConstantLR(optimizer, 0.5, 2)]
        return [optimizer], [
            {"scheduler": schedule.SequentialLR(optimizer, in_turn, milestones=[2]), "interval": "epoch"}
        ]

    def note(self, x, output, batch_idx):
        group = self.optimizers().param_groups[0]
        group["momentum"] *= 0.9
        self.lr_schedulers().step()
        group["lr"].mul_(0.9)
        self.rates.append([float(group["lr"]), group["momentum"], *map(float, self.lr_schedulers().get_last_lr())])
        self.trainer.limit_val_batches += 1
        self.trainer.fit_loop.max_epochs += batch_idx == 1
        self.trainer.noted = getattr(self.trainer, "noted", 0) + 1
        self.trainer.train_dataloader.dataset.read += 1
        self.trainer.should_stop = self.current_epoch == 1 and batch_idx == 2
        self.trainer.callback_metrics["mean"] = output.mean().detach()

    def found(self):
        trainer = self.trainer
        states = [trainer.optimizers[0].param_groups[0]["lr"], trainer.lr_scheduler_configs[0].scheduler.last_epoch]
        limits = [trainer.limit_val_batches, trainer.fit_loop.max_epochs, trainer.noted, trainer.should_stop]
        metrics = float(trainer.callback_metrics["mean"])
        return plain([self.rates, *states, *limits, trainer.train_dataloader.dataset.read, self.global_step, metrics])


class Noting(L.Callback):
    """Is told something by a step."""

    def __init__(self):
        self.notes = {"batches": 0, "sums": []}


class Helper:
    """Sets what a Trainer has, which it knows by its module."""

    def __init__(self, module):
        self.owner = [module]  # in a list, so that it is no part of it

    def work(self, output):
        trainer = self.owner[0].trainer
        for group in trainer.optimizers[0].param_groups:
            group["momentum"] *= 0.9
        noting = next(each for each in trainer.callbacks if hasattr(each, "notes"))
        noting.notes["batches"] += 1
        noting.notes["sums"].append(output.mean().item())


class Halving:
    """A schedule that is none of torch's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= 0.5


class Counting(SequentialSampler):
    """Counts samples, and has weights of them."""

    def __init__(self, data):
        super().__init__(data)
        self.drawn, self.weights = 0, torch.ones(len(data))


class Collating:
    mean = 0.0

    def __call__(self, samples):
        return default_collate(samples)


class MarksData(Base):
    """Keeps something in datasets of torch, one of which holds its own, and in what an optimizer has by default.

    And in samplers, what collates samples, loaders, callbacks of Lightning, and datasets of several loaders.
    """

    def train_dataloader(self):
        data = Subset(Read(DATA), range(18))
        return DataLoader(data, batch_size=6, sampler=Counting(data), collate_fn=Collating())

    def note(self, x, output, batch_idx):
        data = self.trainer.train_dataloader.dataset
        data.dataset.read += 1
        data.hits = getattr(data, "hits", 0) + len(x)
        if not hasattr(data, "means"):
            data.means = []
        data.means.append(output.mean().item())
        defaults = self.trainer.optimizers[0].defaults
        defaults["steps"] = defaults.get("steps", 0) + 1
        loader = self.trainer.train_dataloader
        loader.sampler.drawn += len(x)
        loader.sampler.weights[:2] = output[:, 0].detach().mean()
        loader.collate_fn.mean = output.mean().item()
        loader.number = getattr(loader, "number", 0) + 1
        self.trainer.early_stopping_callback.wait_count = batch_idx

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.layers(batch[0])
        self.trainer.val_dataloaders[dataloader_idx].dataset.read += 1

    def val_dataloader(self):
        return [DataLoader(Read(DATA), batch_size=6) for _ in range(2)]

    def configure_callbacks(self):
        return [EarlyStopping("nothing", strict=False)]

    def found(self):
        data = self.trainer.train_dataloader.dataset
        loader, stopping = self.trainer.train_dataloader, self.trainer.early_stopping_callback
        marks = [loader.sampler.drawn, loader.sampler.weights, loader.collate_fn.mean, loader.number]
        validated = [each.dataset.read for each in self.trainer.val_dataloaders or ()]
        return [
            *map(plain, marks),
            stopping.wait_count,
            validated,
            data.dataset.read,
            data.hits,
            data.means,
            self.trainer.optimizers[0].defaults["steps"],
        ]


def limit(trainer, number):
    trainer.fit_loop.max_epochs = number


class ThroughHelpers(Base):
    """Changes what its Trainer has, by what it holds in attributes."""

    def __init__(self):
        super().__init__()
        self.helper = Helper(self)
        self.adjust = lambda trainer, index: trainer.optimizers[0].param_groups[0].update(dampening=0.1 * index)
        self.limit = partial(limit, number=2)
        self.rates = []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler
        in_turn = [schedule.ExponentialLR(optimizer, 0.9), schedule.ConstantLR(optimizer, 0.5, 2)]
        self.schedule = schedule.SequentialLR(optimizer, in_turn, milestones=[2])
        self.schedules = [Halving(optimizer), schedule.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]
        return optimizer

    def note(self, x, output, batch_idx):
        self.schedule.step()
        self.schedules[0].step()
        self.schedules[1].step()
        self.helper.work(output)
        self.adjust(self.trainer, batch_idx)
        self.limit(self.trainer)

    def on_train_batch_end(self, *args):
        group = self.trainer.optimizers[0].param_groups[0]
        names = ("lr", "momentum", "weight_decay", "dampening")
        self.rates.append([*(group[name] for name in names), *self.schedule.get_last_lr()])

    def found(self):
        noting = next(each for each in self.trainer.callbacks if hasattr(each, "notes"))
        epochs = [each.last_epoch for each in (self.schedule, *self.schedule._schedulers, self.schedules[1])]
        return plain([self.rates, epochs, noting.notes, self.current_epoch, self.global_step])


class KeepsSchedule(Base):
    """Optimizes by itself, with a schedule of which its Trainer does not know."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.rates = []

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return optimizer

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layers(batch[0]).square().mean())
        optimizer.step()
        self.schedule.step()

    def on_train_batch_end(self, *args):
        self.rates.append([self.trainer.optimizers[0].param_groups[0]["lr"], self.schedule.last_epoch])

    def found(self):
        return self.rates


def make_counter():
    means, calls = [], 0

    def count(output):
        nonlocal calls
        calls += 1
        means.append(output.mean().item())

    count.found = lambda: (means, calls)
    return count


class Calls(Base):
    """Calls functions and methods that are given to it, which keep what they are told; and sets others."""

    def __init__(self):
        super().__init__()
        self.counters = [make_counter(), make_counter()]
        self.table = []
        self.append = self.table.append
        self.meter = Meter().update  # nobody else has the object
        self.put = partial(put_into, {}, kept=[])

    def note(self, x, output, batch_idx):
        for counter in self.counters:
            counter(output)
        self.counters[0](x)
        self.counters[0](output + 1)
        self.append(output.square().mean().item())
        self.meter(output.mean().item(), len(x))
        self.put(output)
        self.chosen = self.twice if batch_idx % 2 else self.thrice
        self.methods = {"update": self.meter.__self__.update, "chosen": self.chosen}

    def twice(self, value):
        return 2 * value

    def thrice(self, value):
        return 3 * value

    def found(self):
        meter = self.meter.__self__
        given = (self.put.args, self.put.keywords)
        chosen = self.chosen(1), self.methods["chosen"](1), self.methods["update"].__self__ is meter
        return plain([[each.found() for each in self.counters], self.table, meter, given, chosen])


def put_into(largest, output, kept):
    largest["largest"] = max(largest.get("largest", 0.0), output.max().item())
    kept.append(output[:, :1].detach())


class Elsewhere(Base):
    """Writes into what is in another file."""

    def __init__(self):
        super().__init__()
        self.keeper = another_file.Keeper()

    def note(self, x, output, batch_idx):
        another_file.TOTAL += 1
        another_file.ROWS.append(output.mean().item())
        another_file.remember(output.square().mean().item())
        another_file.Totals.add(len(x))
        self.keeper.keep(output)

    def found(self):
        return plain(another_file.found())


def endless():
    number = 0.0
    while True:
        number += 1
        yield torch.full((2,), number)


GIVEN = iter("abcdefgh")


class Both(NamedTuple):
    first: Any
    second: Any


class Takes(Base):
    """Takes from iterators of all kinds, in steps and in a hook; one of them ends."""

    def __init__(self):
        super().__init__()
        self.count, self.several, self.endless = itertools.count(3), [iter(range(100)), iter("xyz")], endless()
        self.pairs, self.loaded = zip(range(9), map(str, range(9)), strict=True), None
        self.lines = (FOLDER / "lines.txt").open()
        self.source, self.taken, self.of_hook = types.SimpleNamespace(numbers=self.count), [], []
        self.fixed = (iter("pqrst"), Both(itertools.count(7), self.count), 5)
        self.told = (io.StringIO(), "in a tuple")

    def on_train_start(self):
        self.loaded = iter(DataLoader(TensorDataset(DATA), batch_size=2))

    def note(self, x, output, batch_idx):
        item = next(self.endless)
        item_again = next(self.loaded)[0]
        letters = [next(self.several[1], "none"), next(GIVEN), self.lines.readline(), next(self.lines)]
        numbers = [next(self.count), next(self.source.numbers), next(self.several[0]), next(self.pairs)]
        fixed = [next(self.fixed[0], "none"), next(self.fixed[1].second), next(self.fixed[1].first), self.fixed[2]]
        self.told[0].write(f"{batch_idx},")
        self.taken.append([str([numbers, letters, fixed]), item, item_again, self.endless.send(None)])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.of_hook.append(next(self.count))

    def validation_step(self, batch, batch_idx):
        output = self.layers(batch[0])
        self.taken.append([str(next(self.count)), next(self.endless), output.mean()])

    def found(self):
        left = [next(self.count), next(self.several[0]), next(self.endless), next(GIVEN), next(self.pairs)]
        fixed = [next(self.fixed[0], "none"), next(self.fixed[1].first), self.told[0].getvalue()]
        return plain([self.taken, self.of_hook, left, self.lines.readline(), next(self.loaded, None), fixed])


class Writes(Base):
    """Writes into files and with writers of rows; each rank has opened the same ones."""

    def __init__(self):
        super().__init__()
        self.file = (FOLDER / "told.txt").open("w")
        self.table = (FOLDER / "table.csv").open("w")
        self.rows = csv.writer(self.table)
        self.text, self.raw = io.StringIO(), (FOLDER / "raw.bin").open("wb")
        self.named = {"of sizes": (FOLDER / "sizes.txt").open("w"), "of losses": io.StringIO()}

    def note(self, x, output, batch_idx):
        print("batch", batch_idx, file=self.file, flush=True)
        self.rows.writerow([batch_idx, round(output.square().mean().item(), 9), len(x)])
        self.text.write(f"{batch_idx};")
        pickle.dump(batch_idx, self.raw)
        self.named["of sizes"].writelines([f"{len(x)}\n"])
        print(output.mean().item(), file=self.named["of losses"])

    def on_train_end(self):
        for file in (self.file, self.table, self.raw, self.named["of sizes"]):
            file.close()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()

    def found(self):
        rows = list(csv.reader((FOLDER / "table.csv").open()))
        raw = (FOLDER / "raw.bin").read_bytes().hex()
        numbers = [[float(number) for number in row] for row in rows]
        return [(FOLDER / "told.txt").read_text(), numbers, self.text.getvalue(), raw]


class Numbers(Base):
    """Whole numbers of all kinds; microbatches have two samples, as many as the batch that counts as number 2."""

    def __init__(self):
        super().__init__()
        self.index, self.epochs, self.indices, self.tokens, self.size, self.half = 0, 0, [], 0, 2, 0
        self.positive, self.columns, self.returned = 0, 0, []

    def training_step(self, batch, batch_idx):
        (x,) = batch
        output = self.layers(x)
        self.index = batch_idx
        self.indices.append(batch_idx)
        self.epochs = self.current_epoch + 2
        self.tokens += x.numel()
        self.columns += x.shape[1]
        self.half += self.size
        self.positive += int((output[:, 0] > output[:, 1]).sum())
        counts = {
            "positive": int((x[:, 0] > -9).sum()),
            "tokens": x.numel(),
            "two": 2,
            "index": torch.tensor(batch_idx),
        }
        return {"loss": output.square().mean(), "batch_idx": batch_idx, "size": len(x), **counts}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.returned.append(plain({key: value for key, value in outputs.items() if key != "loss"}))

    def found(self):
        names = ("index", "epochs", "indices", "tokens", "columns", "half", "positive", "returned")
        return {name: plain(getattr(self, name)) for name in names}


class Lengths(Base):
    """Tensors that are by chance as long as a microbatch."""

    def __init__(self):
        super().__init__()
        self.mean, self.means, self.rows, self.returned = None, [], [], []
        self.table = types.SimpleNamespace(mean=None)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        output = self.layers(x)
        self.mean = self.table.mean = output[:, :2].mean(0).detach()
        self.means.append(output[:, :2].mean(0).detach())
        self.rows.append(output.detach())
        pair = [float(output[:, 0].mean()), float(output[:, 1].mean())]
        return {"loss": output.square().mean(), "mean": self.mean, "pair": pair, "rows": output.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.returned.append(plain({key: value for key, value in outputs.items() if key != "loss"}))

    def found(self):
        return plain((self.mean, self.table.mean, self.means, self.rows, self.returned))


class ByClass(Base):
    """Entries that only some microbatches change: of classes, and of samples."""

    def __init__(self):
        super().__init__()
        self.counts, self.scores, self.predictions = Counter(), defaultdict(list), {}
        self.bank, self.times_seen, self.histogram = torch.zeros(22, 4), np.zeros(22), torch.zeros(3)
        self.totals, self.hits, self.confusion = [0] * 3, (0.0,) * 3, [[0, 0] for _ in range(3)]
        self.register_buffer("turns", torch.tensor([3, 2, 3, 2]))  # one more looks like two rows in front

    def note(self, x, output, batch_idx):
        self.turns[batch_idx] += 1
        hits = list(self.hits)
        for row, of_row in zip(x, output, strict=True):
            number = int(row[0] > 0) + int(row[1] > 1)
            self.totals[number] += 1
            hits[number] += float(of_row[0] > 0)
            self.confusion[number][int(of_row[1].item() > 0)] += 1
            self.counts[number] += 1
            self.scores[number].append(float(of_row[0]))
            index = int((row == DATA).all(1).nonzero()[0, 0])
            self.bank[index] = of_row.detach()
            self.times_seen[index] += 1
            self.predictions[index] = float(of_row[1])
            self.histogram[number] += 1
        self.hits = tuple(hits)

    def found(self):
        by_key = [dict(sorted(each.items())) for each in (self.counts, self.scores, self.predictions)]
        in_lists = self.totals, self.hits, self.confusion
        return plain([*by_key, self.bank, self.times_seen, self.histogram, *in_lists, self.turns])


class Idioms(Base):
    """What else one finds in steps."""

    def __init__(self):
        super().__init__()
        self.first, self.is_begun, self.ema, self.window, self.losses = None, False, None, deque(maxlen=4), ()
        self.matrix, self.record, self.by_epoch, self.names = np.zeros((2, 2)), None, {0: []}, []
        self.nested, self.correct, self.table = {"a": {"b": [1, {"c": 0}]}}, torch.tensor(0), None

    def note(self, x, output, batch_idx):
        loss = output.square().mean().item()
        if self.first is None:
            self.first = loss
        self.is_begun = True
        self.ema = loss if self.ema is None else 0.9 * self.ema + 0.1 * loss
        self.window.extend(output[:, 0].tolist())
        self.losses += (loss,)
        self.matrix += loss * np.ones((2, 2))
        self.record = Record(batch_idx, loss, output.detach())
        self.by_epoch[0].append(loss)
        self.names.append(f"batch {batch_idx}")
        self.nested["a"]["b"][0] += 1
        self.nested["a"]["b"][1]["c"] += len(x)
        self.sums, self.indices, self.size = x.sum(0), torch.tensor([batch_idx, batch_idx + 1]), len(x)
        self.both, self.pair = [len(x), batch_idx], (loss, len(x))
        self.correct = self.correct + (output[:, 0] > 0.15).sum()
        self.table = torch.zeros(2, 2, dtype=torch.long)
        for row, column in (output[:, :2] > 0.15).long():
            self.table[row, column] += 1

    def found(self):
        names = ("first", "is_begun", "ema", "window", "losses", "matrix", "record", "by_epoch", "names", "nested")
        return {
            name: plain(getattr(self, name))
            for name in (*names, "sums", "indices", "size", "both", "pair", "correct", "table")
        }


class Averages(Base):
    """Averages of weights that begin with the first step, and change in place from then on."""

    def __init__(self):
        super().__init__()
        self.shadow = {}

    def note(self, x, output, batch_idx):
        for name, parameter in self.layers.named_parameters():
            if batch_idx:
                self.shadow[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)
            else:
                self.shadow[name] = parameter.detach().clone()

    def found(self):
        return plain(self.shadow)


class RunningMeanStd:
    """As in reinforcement learning; the count may be of any kind."""

    def __init__(self, array, count, less=0):
        self.mean, self.var, self.count, self.less = array, array + 1, count, less

    def update(self, x):
        number, mean, var = len(x), x.mean(0), ((x - x.mean(0)) ** 2).sum(0) / (len(x) - self.less)
        delta, total = mean - self.mean, self.count + number
        squares = self.var * self.count + var * number + delta**2 * self.count * number / total
        self.mean, self.var, self.count = self.mean + delta * number / total, squares / total, total


class Running(Base):
    """Running means and variances of samples."""

    def __init__(self):
        super().__init__()
        self.of_arrays = RunningMeanStd(np.zeros(4), 1e-4)
        self.of_tensors = RunningMeanStd(torch.zeros(4, dtype=torch.double), 0)
        self.by_torch_var = RunningMeanStd(torch.zeros(4, dtype=torch.double), 1e-4, less=1)
        self.number, self.middle, self.squares, self.deviation = torch.tensor(0.0), *torch.zeros(3, 4)
        self.variance = torch.zeros(4)

    def note(self, x, output, batch_idx):
        self.of_arrays.update(x.double().numpy())
        self.of_tensors.update(output.detach().double())
        self.by_torch_var.update(output.detach().double())
        for row in x:  # Welford's
            self.number = self.number + 1
            delta = row - self.middle
            self.middle = self.middle + delta / self.number
            self.squares = self.squares + delta * (row - self.middle)
        self.deviation = (self.squares / self.number).sqrt()
        self.variance = self.squares / (self.number - 1)

    def found(self):
        kept = (self.number, self.middle, self.squares, self.deviation, self.variance)
        return [plain(each) for each in (self.of_arrays, self.of_tensors, self.by_torch_var, *kept)]


class Ratios(Base):
    """What is logged of counts that a step keeps, from one batch to the next; in the second each part has one hit."""

    HITS = [True, True, False, True, False, False, True, False, True, False, False, True, False, False, True, False]

    def __init__(self):
        super().__init__()
        self.hits = self.seen = self.counted = self.items = self.latest = 0
        self.kept = {"items": 0}
        self.total, self.of_hits, self.by_batch = 0.0, torch.tensor(0.0), []

    def note(self, x, output, batch_idx):
        is_hit = torch.tensor([self.HITS[int((row == DATA).all(1).nonzero()) % 16] for row in x])
        losses = output.square().mean(1).detach()
        self.hits += int((is_hit & (output[:, 0] > -9)).sum())
        # on zeros, as in a trace, the last of these are no hits
        known = (is_hit & ((output[:, 0].abs() > 1e-9) | (x[:, 0] > 0))).sum()
        self.counted += int(known)
        self.items += known.item()
        self.kept["items"] += known.item()
        self.latest = known.item()
        self.seen += len(x)
        self.total += losses.sum().item()
        self.of_hits = self.of_hits + losses[is_hit].sum()
        self.log("accuracy", self.hits / self.seen)
        self.log("error", 1 - self.hits / self.seen)
        self.log("percentage", 100 * self.hits / self.seen)
        self.log("average", self.total / self.seen)
        self.log("of_hits", self.of_hits / max(self.hits, 1))
        self.log("perplexity", math.exp(self.total / self.seen))
        self.log("total", self.total)
        self.log("of_batch", is_hit.float().mean())
        self.log("loss", losses.mean())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.by_batch.append([logged, self.hits, self.seen, self.total, float(self.of_hits)])
        self.by_batch.append([self.counted, self.items, self.kept["items"], self.latest])

    def found(self):
        return self.by_batch


class Texts(Base):
    """Texts and truth values, of samples and of all of them; of losses there are as many as on one device."""

    def __init__(self):
        super().__init__()
        self.lines, self.latest, self.earliest, self.line = [], "", "", ""
        self.any_large = self.all_small = self.ends_large = False
        self.of_loss, self.of_size = "", ""

    def note(self, x, output, batch_idx):
        loss = output.square().mean()
        self.earliest, self.latest = f"{x[0, 0]:.3f}", f"{x[-1, 0]:.3f}"
        self.lines.append(f"batch {batch_idx} begins with {x[0, 1].item():.3f}")
        self.any_large, self.all_small = bool((output > 0.7).any()), bool((output < 0.75).all())
        self.ends_large = (output[-1, 0] > 0.25).item()
        self.line = "low" if output.mean() < 10 else "high"
        self.of_loss, self.of_size = f"{loss:.3f}", f"{len(x)} samples"
        self.told.append(f"loss {loss}")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "first": f"{batch[0][0, 2]:.2f}", "is_large": bool(batch[0].max() > 2)}

    def on_fit_start(self):
        self.told, self.outs = [], []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.outs.append((outputs["first"], outputs["is_large"], self.any_large, self.all_small, self.ends_large))

    def found(self):
        return plain([self.outs, self.lines, self.latest, self.earliest, self.line, len(self.told)])


class ReadsLogged(Base):
    """What it has logged it finds in the Trainer's metrics at once."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def note(self, x, output, batch_idx):
        self.log("loss", output.square().mean(), on_epoch=True)
        self.log("index", batch_idx)
        self.log("of_epoch", output.mean(), on_step=False, on_epoch=True)
        metrics = self.trainer.callback_metrics
        self.seen.append([float(metrics["loss"]), float(metrics["index"]), float(metrics["loss_step"])])
        self.seen.append(self.trainer.logged_metrics["index"].item())

    def found(self):
        return plain([self.seen, {k: float(v) for k, v in self.trainer.callback_metrics.items()}])


class Evaluates(Base):
    """In validation, with everything that a step may return and log."""

    def __init__(self):
        super().__init__()
        self.kept, self.evaluator, self.meter, self.returned = [], Evaluator(), Meter(), []
        self.shares = []

    def note(self, x, output, batch_idx):
        self.shares.append(self.global_step / self.trainer.estimated_stepping_batches)

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        output = self.layers(x)
        self.kept.append({"output": output, "index": batch_idx, "size": len(output), "loss": output.mean()})
        self.evaluator.update(x, output)
        self.meter.update(output.mean().item(), len(output))
        positive = (output > 0).sum()
        for name, value in {"size": len(output), "positive": positive, "sum": x.sum(), "mean": output.mean()}.items():
            self.log(name, value)
        for name, value in {"tokens": output.numel(), "as_float": float(x.numel()), "positives": positive}.items():
            self.log(name, value, reduce_fx="sum")
        self.log("index", batch_idx, reduce_fx="max")
        return output.mean(0), batch_idx, len(output), output.T, [output[:, 0].tolist(), 3], output[:, :2].mean(0)

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.returned.append(plain(outputs))

    def found(self):
        del self.evaluator.child.parent
        logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        return plain([self.kept, self.evaluator, self.meter, self.returned, logged, self.shares])


class Queues(Base):
    """Banks of earlier outputs, in the forms in which steps keep them."""

    def __init__(self):
        super().__init__()
        noise = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))
        self.register_buffer("made", noise.clone())
        self.first, self.copied, self.written, self.array = (noise.clone() for _ in range(4))
        self.array, self.items, self.seen = self.array.numpy(), [], []
        self.pairs, self.latest, self.fields = [], [], ()

    def training_step(self, batch, batch_idx):
        output = self.layers(batch[0])
        loss = (output[:, None] - self.made[None]).square().mean()
        rows = output.detach()
        self.made = torch.cat([self.made, rows])[-9:]
        self.first = torch.cat([rows, self.first])[:9]
        self.copied.copy_(torch.cat([self.copied, rows])[-9:])
        self.written[: -len(rows)] = self.written[len(rows) :].clone()
        self.written[-len(rows) :] = rows
        self.array = np.concatenate([self.array, rows.numpy()])[-9:]
        self.items = [*self.items, *rows[:, 0].tolist()][-6:]
        self.pairs = self.pairs + [(row[0].item(), row.clone()) for row in rows]
        self.latest.extend((batch_idx, (number, [number])) for number in rows[:, 0].tolist())
        self.latest = self.latest[-6:]
        self.fields = (*self.fields, *(Both(number, batch_idx) for number in rows[:, 0].tolist()))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(plain((outputs["loss"], self.made, self.array, len(self.items))))

    def found(self):
        lists = [self.items, self.pairs, self.latest, self.fields]
        return plain([self.seen, self.made, self.first, self.copied, self.written, self.array, *lists])


class SetsData(Base):
    """Tensors of which the data is set, as published losses do with their centers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(4))
        self.register_buffer("written", torch.zeros(4))
        self.scale, self.held, self.rows = torch.ones(4), types.SimpleNamespace(top=torch.zeros(4)), torch.zeros(0, 4)
        self.other, self.seen = torch.zeros(4), []

    def training_step(self, batch, batch_idx):
        output = self.layers(batch[0])
        loss = (output - self.center - self.scale - self.held.top - self.written + self.other).square().mean()
        of_batch = output.detach().mean(0)
        self.center.data = 0.9 * self.center + 0.1 * of_batch
        self.scale.data = 0.9 * self.scale + 0.1 * batch[0].abs().mean(0)
        self.held.top.data = 0.5 * self.held.top + 0.1 * of_batch
        self.rows.data = output.detach()
        self.written.data.lerp_(of_batch, 0.1)
        self.other.data[:2] = of_batch[:2]
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(plain((outputs["loss"], *self.kept())))

    def kept(self):
        return [self.center, self.scale, self.held.top, self.rows, self.written, self.other]

    def found(self):
        return plain([self.seen, *self.kept()])


class MakesClass(Base):
    """A class and a function, once, as where libraries name their outputs."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        output = self.layers(batch[0])
        if not hasattr(self, "of_output"):
            self.of_output = collections.namedtuple("of_output", ["prediction"])

            class Output(self.of_output):
                pass

            self.kind, self.scaled = Output, lambda value: 2 * value
        made = self.kind(prediction=self.scaled(output))
        return made.prediction.square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(plain(outputs["loss"]))

    def found(self):
        return self.seen


class Extremes(Base):
    """Numbers that are no means over microbatches, but something else."""

    def __init__(self):
        super().__init__()
        self.total, self.most, self.least, self.peak, self.low = 0.0, 0.0, float("inf"), torch.tensor(-1e9), None
        self.losses, self.largest, self.latest, self.returned = 0.0, [], None, []
        self.sums, self.best, self.tops = torch.zeros(4), float("-inf"), {"all": None}
        self.arrays = np.zeros(2)
        self.seen, self.baseline = 0, 0.0

    def note(self, x, output, batch_idx):
        self.total += output.sum().item()
        self.most = max(self.most, output.max().item())
        self.least = min(self.least, output.min().item())
        self.peak = torch.maximum(self.peak, output.detach().max())
        self.low = output.min().item() if self.low is None else min(self.low, output.min().item())
        self.losses += output.square().mean().item()
        self.largest.append(output.abs().max().item())
        self.latest = output[-1, 0].item()
        self.sums += output.detach().sum(0)
        self.arrays += output.detach().sum(0)[:2].numpy()
        self.seen += len(x)  # beside which a sum would be expected
        self.baseline = 0.9 * self.baseline + 0.1 * output.mean().item()
        self.tops["all"] = output.detach().amax(0)
        self.log("sum", output.sum())
        self.log("largest", output.max())
        self.log("first", output[0, 1].item())
        self.log("mean", output.mean())

    def training_step(self, batch, batch_idx):
        output = self.layers(batch[0])
        self.note(batch[0], output, batch_idx)
        of_all = {"sum": output.sum(), "top": output.detach().max().item(), "rows": output.detach()}
        return {"loss": output.square().mean(), **of_all}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        outputs = {key: value for key, value in outputs.items() if key != "loss"}
        self.returned.append([plain(outputs), metrics, self.latest, plain(self.tops)])

    def found(self):
        names = (
            "total",
            "most",
            "least",
            "peak",
            "low",
            "losses",
            "largest",
            "returned",
            "sums",
            "arrays",
            "seen",
            "baseline",
        )
        return {name: plain(getattr(self, name)) for name in names}


class Unfit(Base):
    """Numbers of which no rule makes those of one device."""

    def __init__(self):
        super().__init__()
        self.lowest, self.fine, self.recall = float("inf"), 0.0, BinaryF1Score()

    def training_step(self, batch, batch_idx):
        output = self.layers(batch[0])
        loss = output.square().mean()
        self.lowest = min(self.lowest, loss.item())
        self.fine += loss.item()
        self.log("spread", output.std())
        self.log("noise", torch.rand(()))
        self.log("drawn", random.random())
        self.log("loss", loss)
        self.recall(output[:, 0] > 0.16, batch[0][:, 1] > 0)
        self.log("f1", self.recall)
        self.log("f1_of_epoch", self.recall, on_step=False, on_epoch=True)
        return {"loss": loss, "deviation": output.std().detach()}

    def validation_step(self, batch, batch_idx):
        output = self.layers(batch[0])
        self.log("quantile", output.quantile(0.8))
        self.log("val_sum", output.sum())
        self.log("val_loss", output.square().mean())

    def found(self):
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        return [math.isfinite(self.lowest), self.fine, metrics["val_sum"]]


class Large(Base):
    """Tensors and arrays of more than 64 KiB that are written into: rows of samples, and a mean over the batch."""

    def __init__(self):
        super().__init__()
        self.bank, self.array, self.late = torch.zeros(22, 1000), np.zeros((22, 1000)), torch.zeros(22, 1000)
        self.mean, self.untouched, self.rows = torch.ones(20000), torch.zeros(20000), []
        self.register_buffer("queue", torch.zeros(22, 1000))

    def note(self, x, output, batch_idx):
        for row, of_row in zip(x, output, strict=True):
            index = int((row == DATA).all(1).nonzero()[0, 0])
            self.bank[index, :4] = of_row.detach()
            self.queue[index, :4] = of_row.detach()
            self.array[index, 0] = of_row[0].item()
            if batch_idx > 1:
                self.late[index] = of_row[0].detach()
        self.mean.mul_(0.9).add_(output.detach().mean(), alpha=0.1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.rows.append(plain([self.bank.sum(1), self.array.sum(1), self.late[:, 0], self.mean[:2]]))

    def found(self):
        return [*self.rows, *plain([self.bank[:, :5], self.array[:, :2], self.late[:, 0], self.queue[:, :4]])]


class Draws(Base):
    """Has generators of its own; stages that end early draw less of them."""

    def __init__(self):
        super().__init__()
        self.numpy, self.python, self.torch = np.random.default_rng(0), random.Random(1), torch.Generator()
        self.states = []

    def training_step(self, batch, batch_idx):
        drawn = [self.numpy.random()]
        x = self.layers[:2](batch[0])
        drawn.append(self.python.random())
        x = self.layers[2:](x)
        self.drawn = [*drawn, float(torch.rand(1, generator=self.torch))]
        return x.square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        states = self.numpy.bit_generator.state["state"], self.python.getstate()[1], self.torch.get_state().tolist()
        self.states.append([str(state) for state in states])

    def found(self):
        return [*self.states, self.drawn]


class DrawsLate(L.LightningModule):
    """Draws from the global generators of the host from its third batch on, when nobody expects it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
        self.means = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def training_step(self, batch, batch_idx):
        factor = 1 + random.random() + np.random.rand() if batch_idx > 1 else 1.0
        output = self.layers(batch[0] * factor)
        self.means.append((output.detach() / factor).square().mean().item())  # the last stage knows its own only
        return output.square().mean()

    def found(self):
        return self.means


class Tidy(Base):
    """Looks, after the second batch, for what nothing but itself refers to: it stays until garbage is collected."""

    def __init__(self):
        super().__init__()
        self.outs, self.garbage = [], []

    def on_train_batch_start(self, batch, batch_idx):
        gc.collect()
        gc.disable()

    def note(self, x, output, batch_idx):
        self.outs.append(output.detach())
        self.last = {"mean": output.mean().item(), "size": len(x)}
        self.log("mean", output.mean())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = [type(found) for found in gc.garbage] if batch_idx == 1 else []  # none of a trace
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        self.garbage += [str(kind) for kind in kinds if kind is torch.Tensor or "lightning_pfo" in kind.__module__]

    def found(self):
        return self.garbage


class Decaying(nn.Module):
    """Writes into its weight in its forward, which its backward needs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) + 0.1)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.weight.mul_(0.9)
        return torch.tanh(x @ self.weight)


class Rewrites(Base):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Decaying() for _ in range(4)))
        self.losses, self.steps = [], 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return self.layers(batch[0]).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def found(self):
        return [self.steps, self.losses]


CASES = {
    "draws_late": DrawsLate,  # first: who has drawn once is expected to again
    "objects": Objects,
    "modules": Modules,
    "layers": Layers,
    "uses_counts": UsesCounts,
    "of_trainer": OfTrainer,
    "through_helpers": ThroughHelpers,
    "keeps_schedule": KeepsSchedule,
    "marks_data": MarksData,
    "closed": lambda: make_closed([]),
    "calls": Calls,
    "elsewhere": Elsewhere,
    "takes": Takes,
    "writes": Writes,
    "numbers": Numbers,
    "lengths": Lengths,
    "by_class": ByClass,
    "idioms": Idioms,
    "averages": Averages,
    "running": Running,
    "ratios": Ratios,
    "texts": Texts,
    "reads_logged": ReadsLogged,
    "evaluates": Evaluates,
    "draws": Draws,
    "extremes": Extremes,
    "queues": Queues,
    "sets_data": SetsData,
    "makes_class": MakesClass,
    "unfit": Unfit,
    "large": Large,
    "tidy": Tidy,
    "rewrites": Rewrites,
}


def fit(where, make, **options):
    L.seed_everything(3, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2 if where == "two" else 1,
        strategy="auto" if where == "plain" else PfoPipelineStrategy(num_microbatches=3, **options),
        callbacks=[Watching(), Noting()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=FOLDER,
        max_epochs=1,
    )
    module = make()
    trainer.fit(module, **({} if make is MarksData else {"datamodule": Data()}))
    return module.found()


def one(where, names):
    results = {name: fit(where, CASES[name]) for name in names}
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    (FOLDER / f"{where}_{rank}.json").write_text(json.dumps(results))


(FOLDER / "lines.txt").write_text("".join(f"line {index}\n" for index in range(20)))
for where in sys.argv[2].split(","):  # plain, one, two
    run_ranks(one, 2 if where == "two" else 1, where, sys.argv[3:] or list(CASES))
