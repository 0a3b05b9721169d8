"""What users are told of norms in hooks, and of what steps write into; usage: told.py FOLDER [CASE ...].

On one rank and on two; each writes what was said.
"""

import configparser
import csv
import decimal
import json
import logging
import math
import os
import string
import sys
import types
from array import array
from collections import UserList
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.core.errors import PfoError
from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.step.batches import notices
from tests.ranks import run_ranks
from tests.saying import Said

FOLDER = Path(sys.argv[1])
DATA = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))


class Plain(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class OfLightning(Plain):
    def on_before_optimizer_step(self, optimizer):
        grad_norm(self, norm_type=2)


class Centred(nn.Linear):
    """Moves a buffer by what it sees."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("centre", torch.zeros(sizes[0]))

    def forward(self, x):
        self.centre.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x)


class Iterates(Plain):
    """Its first layer changes a buffer in each call, another one makes a weight with one; a hook changes a third."""

    def __init__(self):
        super().__init__()
        first = self.layers[0][0]
        self.layers[0][0] = Centred(first.in_features, first.out_features)
        nn.utils.parametrizations.spectral_norm(self.layers[1][0])
        self.average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.n_averaged.add_(1)


class Codebook(Plain):
    """Moves a buffer between layers, in training only, and sets another one to the same in each run."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sums", torch.zeros(4))
        self.register_buffer("same", torch.zeros(4))

    def training_step(self, batch, batch_idx):
        rows = self.layers[0](batch[0])
        if self.training:
            with torch.no_grad():
                self.sums.mul_(0.9).add_(rows.sum(0), alpha=0.1)
                self.same.copy_(torch.zeros_like(rows[0]))
        for layer in self.layers[1:]:
            rows = layer(rows + 1e-5 * self.sums + self.same)
        return rows.square().mean()


class FarCodebook(Codebook):
    """Its loss on the batch is none between those of microbatches, since a buffer moves."""

    def training_step(self, batch, batch_idx):
        rows = self.layers[0](batch[0])
        if self.training:
            self.sums.mul_(0.5).add_(rows.detach().abs().sum(0))
        for layer in self.layers[1:]:
            rows = layer(rows)
        return rows.square().mean() + self.sums.mean()


class Ticking(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("ticks", torch.zeros((), dtype=torch.long))

    def tick(self):
        self.ticks += 1


class TicksInValidation(Plain):
    """Calls in each evaluation what changes a buffer of a layer."""

    def __init__(self):
        super().__init__()
        self.layers[0][0] = Ticking()

    def validation_step(self, batch, batch_idx):
        self.layers[0][0].tick()
        self.log("loss", self.layers(batch[0]).square().mean())

    def val_dataloader(self):
        return DataLoader(TensorDataset(DATA), batch_size=6)


class SumsAtTheEnd(Codebook):
    """Moves a buffer where only the last stage comes to, in training only."""

    def training_step(self, batch, batch_idx):
        rows = self.layers(batch[0])
        if self.training:
            with torch.no_grad():
                self.sums.mul_(0.9).add_(rows.sum(0), alpha=0.1)
        return rows.square().mean()


class ZeroAtFirst(Plain):
    """Logs what no rule over microbatches gives, where the first batches come to 0 in any case."""

    def training_step(self, batch, batch_idx):
        rows = self.layers(batch[0])
        self.log("spread", (1 + rows.sum()).square() if self.trainer.global_step > 1 else 0.0 * rows.sum())
        return rows.square().mean()


class NoneInSome(Plain):
    """Logs a mean over samples of which a microbatch has none: it is NaN there, and a number on one device."""

    def training_step(self, batch, batch_idx):
        rows = self.layers(batch[0])
        few = torch.arange(len(rows)) > 3  # as many as a microbatch has not
        self.log("few", rows[few].mean())
        return rows.square().mean()


class CodebookInAHook(Codebook):
    """The same as one device has it."""

    def training_step(self, batch, batch_idx):
        rows = self.layers[0](batch[0])
        self.rows = rows.detach()
        for layer in self.layers[1:]:
            rows = layer(rows + 1e-3 * self.sums)
        return rows.square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert len(self.rows) == len(batch[0])
        self.sums.mul_(0.9).add_(self.rows.sum(0), alpha=0.1)


class OfTorch(Plain):
    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 100.0)


class InStep(Plain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 100.0)
        return loss


class Alone(Plain):
    def on_before_optimizer_step(self, optimizer):
        if self.trainer.global_rank:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 100.0)


class ByHand(Plain):
    def on_after_backward(self):
        sum(float(p.grad.square().sum()) for p in self.parameters() if p.grad is not None)


class OwnOptimizer(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure()
        for group in self.param_groups:
            for parameter in [p for p in group["params"] if p.grad is not None]:
                parameter.sub_(0.1 * parameter.grad)
        return loss


class ByItself(Plain):
    """With an optimizer of the user's, clipping by the Trainer and the norm over all stages."""

    def configure_optimizers(self):
        return OwnOptimizer(self.parameters())

    def on_before_optimizer_step(self, optimizer):
        self.trainer.strategy.grad_norm()
        torch.nn.utils.clip_grad_value_(self.parameters(), 100.0)
        for parameter in self.parameters():
            del parameter.grad  # as for others
        self.zero_grad()


class OfLibraries(Plain):
    """Changes objects of libraries in a step; others, which it only uses or fills once, are not named."""

    def __init__(self):
        super().__init__()
        self.table, self.numbers, self.template = configparser.ConfigParser(), array("d"), string.Template("$x")
        self.table["all"] = {}
        self.lazy, self.kept = decimal.Context(), UserList()
        self.opaque = types.SimpleNamespace(index=ConfigParserWithCache())
        self.file = (FOLDER / f"early_{os.environ.get('RANK', 0)}.csv").open("w")
        self.early = csv.writer(self.file).writerow

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.numbers.append(batch_idx)
        self.table["all"][str(len(self.table["all"]))] = "seen"
        self.template.substitute(x=self.opaque.index.words())
        self.kept.append(loss.item())
        self.early([batch_idx])
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.opaque.index["DEFAULT"][f"batch {batch_idx}"] = "seen"  # in hooks it is done once

    def on_train_end(self):
        assert len(self.kept) == 4


class ConfigParserWithCache(configparser.ConfigParser):
    cached = None

    def words(self):
        self.cached = self.cached or list(self["DEFAULT"])
        return self.cached


ConfigParserWithCache.__module__ = "configparser"  # for a library


class Opens(Plain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        folder = FOLDER / str(self.trainer.strategy.mesh.num_ranks)
        folder.mkdir(exist_ok=True)
        with (folder / "added.txt").open("a") as file:
            file.write(f"{batch_idx}\n")
        np.save(folder / "array.npy", np.zeros(3))
        torch.save(loss, str(folder / "loss.pt"))
        assert Path(__file__).read_text()
        return loss


def echoing():
    while True:
        yield


class Sends(Plain):
    def __init__(self):
        super().__init__()
        self.echo = echoing()
        next(self.echo)

    def training_step(self, batch, batch_idx):
        self.echo.send(batch_idx)
        return super().training_step(batch, batch_idx)


class Reads(Plain):
    def __init__(self):
        super().__init__()
        self.files = (Path(__file__).open(),)  # noqa: SIM115

    def training_step(self, batch, batch_idx):
        self.files[0].read(10)
        return super().training_step(batch, batch_idx)


class Prints(Plain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.print(f"batch {batch_idx}")
        self.print(f"{len(batch[0])} samples", end=".\n")
        return loss


class Keeps(Plain):
    """Keeps what its layers return, which by microbatches is another one by what rounding leaves.

    What it collects in a list is gone when the step ends, and the list as well.
    """

    def __init__(self):
        super().__init__()
        self.tracker = types.SimpleNamespace(losses=[])

    def training_step(self, batch, batch_idx):
        output = self.layers(batch[0]) * (1 + 1e-7 * len(batch[0]))
        self.tracker.losses.append(output.detach().flatten().median() ** 3)
        self.tracker.losses = []
        self.kept = output.detach()
        self.largest = output.abs().detach().amin()
        return output.square().mean()


class Counts(Plain):
    """Reads how many processes there are, in several ways and more than once."""

    def setup(self, stage):
        self.queue = torch.zeros(64 // self.trainer.world_size)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / dist.get_world_size()  # which counts replicas there

    def configure_optimizers(self):
        rates = [0.1 * math.sqrt(self.trainer.num_devices) for _ in range(2)]
        rates.append(rates[0] * self.trainer.strategy.world_size if dist.get_world_size() > 1 else 0.1)
        return torch.optim.SGD(self.parameters(), rates[0])

    def on_train_epoch_start(self):
        assert self.trainer.strategy.data_parallel_size == 1
        self.log("several", float(self.trainer.world_size > 1), sync_dist=self.trainer.num_devices != 1)
        self.shares = [None] * dist.get_world_size()


class LooksAtState(Plain):
    """Logs in the step what an optimizer has gathered, and its rate, which all have."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.log("rate", optimizer.param_groups[0]["lr"])
        self.log("gathered", float(len(optimizer.state)))
        return super().training_step(batch, batch_idx)


CASES = (
    Keeps,
    Codebook,
    FarCodebook,
    TicksInValidation,
    SumsAtTheEnd,
    CodebookInAHook,
    NoneInSome,
    ZeroAtFirst,
    Iterates,
    Prints,
    Sends,
    Reads,
    OfLightning,
    OfTorch,
    InStep,
    Alone,
    ByHand,
    ByItself,
    OfLibraries,
    Opens,
    Counts,
    LooksAtState,
)


def run(number):
    said = Said()
    logging.getLogger("lightning_pfo").addHandler(said)
    found = {}
    for case in [case for case in CASES if not sys.argv[2:] or case.__name__ in sys.argv[2:]]:
        said.texts.clear()
        notices._said.clear()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=number,
            strategy=PfoPipelineStrategy(num_microbatches=2),
            gradient_clip_val=0.5,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=2,
        )
        try:
            trainer.fit(case(), DataLoader(TensorDataset(DATA), batch_size=6))
        except PfoError as error:
            said.texts.append(f"error: {error}")
        found[case.__name__] = list(said.texts)
    (FOLDER / f"{number}_{trainer.global_rank}.json").write_text(json.dumps(found))


for number in (1, 2):
    run_ranks(run, number, number)
