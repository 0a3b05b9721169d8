"""Layers that log or tell metrics something by themselves, and hooks that keep what layers return.

Writes FOLDER/*.json, on one rank and on two.
"""

import json
import sys
from functools import partial
from pathlib import Path

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
DATA = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.linear, self.number = nn.Linear(8, 8), number
        self.log, self.metric = None, None

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        if self.log is not None:
            self.log(f"mean of {self.number}", y.mean())
            self.log(f"size of {self.number}", float(len(y)), reduce_fx="max")
        if self.metric is not None:
            self.metric.update(y.detach(), x.detach())
        return y


class Layers(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Layer(number) for number in range(4)))
        self.found = []

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.found.append(outputs["loss"].item())

    def on_train_epoch_end(self):
        self.found += [float(self.trainer.callback_metrics[name]) for name in sorted(self.trainer.callback_metrics)]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


class Logs(Layers):
    """Layers have kept the method that logs, before a step runs."""

    def on_fit_start(self):
        for layer in self.layers:
            layer.log = self.log


class Measures(Layers):
    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.metric = torchmetrics.MeanSquaredError()

    def on_train_epoch_end(self):
        self.found += [layer.metric.compute().item() for layer in self.layers]


class Listens(L.Callback):
    """Keeps what layers return as statistics: tensors by name, in a list, and numbers."""

    def __init__(self):
        self.by_name, self.means, self.numbers, self.calls = {}, [], {}, 0

    def on_fit_start(self, trainer, pl_module):
        for name, layer in pl_module.layers.named_children():
            self.hook(name, layer)

    def hook(self, name, layer):
        layer.register_forward_hook(lambda layer, given, y, name=name: self.note(name, y.detach()))

    def note(self, name, y):
        self.by_name[name] = y
        self.means.append(y.mean())
        self.numbers[name] = y.mean().item()
        self.calls += 1

    def on_train_batch_end(self, trainer, pl_module, *_):
        pl_module.found += [y.mean().item() for y in self.by_name.values()]
        pl_module.found += [float(sum(self.means)), len(self.means), *self.numbers.values(), self.calls]
        self.means.clear()


class ListensWithin(Listens):
    """A method of the callback is the hook, and of parts of layers."""

    def hook(self, name, layer):
        layer.linear.register_forward_hook(self.after)
        layer.linear.register_forward_pre_hook(partial(self.before, name))

    def before(self, name, layer, given):
        self.note(f"before {name}", given[0].detach())

    def after(self, layer, given, y):
        self.note(f"after {self.calls % 8}", y.detach())


GLOBAL = {}


def keep_globally(name, layer, given, y):
    GLOBAL[name] = y.detach()


class ListensGlobally(L.Callback):
    def on_fit_start(self, trainer, pl_module):
        for name, layer in pl_module.layers.named_children():
            layer.register_forward_hook(partial(keep_globally, name))

    def on_train_batch_end(self, trainer, pl_module, *_):
        pl_module.found += [y.std().item() for y in GLOBAL.values()]


class ListensAround(L.Callback):
    """As forums have it: `activations[name] = output.detach()` in a function within one."""

    def __init__(self):
        self.activations = {}

    def on_fit_start(self, trainer, pl_module):
        activations, norms = self.activations, []

        def get_activation(name):
            def hook(model, input, output):
                activations[name] = output.detach()
                norms.append(output.detach().norm(dim=1))

            return hook

        pl_module.layers[0].register_forward_hook(get_activation("first"))
        pl_module.layers[3].register_forward_hook(get_activation("last"))
        self.norms = norms

    def on_train_batch_end(self, trainer, pl_module, *_):
        pl_module.found += [y.amax().item() for y in self.activations.values()]
        pl_module.found += [len(self.norms), torch.cat(self.norms).sum().item()]


class ListensInLayers(L.Callback):
    """What layers return is kept in attributes of theirs."""

    def on_fit_start(self, trainer, pl_module):
        for layer in pl_module.layers:
            layer.seen = layer.trained_on = 0
            layer.register_forward_hook(self.keep)

    def keep(self, layer, given, y):
        layer.latest = y.detach()
        layer.seen += len(y)
        if layer.training:
            layer.trained_on += len(y)

    def on_train_batch_end(self, trainer, pl_module, *_):
        pl_module.found += [layer.latest.std().item() for layer in pl_module.layers]
        pl_module.found += [number for layer in pl_module.layers for number in (layer.seen, layer.trained_on)]


CASES = {
    "logs": (Logs, ()),
    "measures": (Measures, ()),
    "listens": (Layers, (Listens,)),
    "listens within": (Layers, (ListensWithin,)),
    "listens globally": (Layers, (ListensGlobally,)),
    "listens around": (Layers, (ListensAround,)),
    "listens in layers": (Layers, (ListensInLayers,)),
}


def run(number):
    found = {}
    for name, (kind, callbacks) in CASES.items():
        GLOBAL.clear()
        module = kind()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=number,
            strategy=PfoPipelineStrategy(num_microbatches=4) if number > 1 else "auto",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=1,
            callbacks=[callback() for callback in callbacks],
        )
        try:
            trainer.fit(module, DataLoader(TensorDataset(DATA), batch_size=8))
        except Exception as error:  # the other cases go on
            module.found.append(f"{type(error).__name__}: {error}")
        found[name] = module.found
    (FOLDER / f"{number}_{trainer.global_rank}.json").write_text(json.dumps(found))


for number in (1, 2):
    run_ranks(run, number, number)
