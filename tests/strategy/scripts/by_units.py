"""Evaluations that stages cannot run, and hooks that call the model, on two ranks beside one device.

Usage: by_units.py FOLDER
"""

import json
import logging
import os
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
WIDTH = 6


class Layer(nn.Module):
    """Does with its arguments all that one may do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.aux = None

    def forward(self, x, state=None, other=None, kind="plain"):
        y = torch.tanh(self.linear(x)) + x
        if other is not None:
            y = y + other(y)
        if state is not None:
            self.aux = y.square().mean()
            state.seen.append(y.mean())
            state.calls += 1
            state.sums["all"] = state.sums.get("all", 0.0) + y.sum(-1)
            state.total += y.sum(0)  # in place
            state.last = (state.calls, y[:, :1])
            if state.noisy:
                y = y + 0.1 * torch.rand(())
        return -y if kind == "turned" else y


class State:
    def __init__(self, noisy):
        self.seen, self.calls, self.sums, self.noisy = [], 0, {}, noisy
        self.total = torch.zeros(WIDTH)


class Averaged(nn.Module):
    """Averages of weights, which evaluations put in the place of these, as latent diffusion does; as large as these."""

    def __init__(self, of):
        super().__init__()
        for name, weight in of.named_parameters():
            self.register_buffer(name.replace(".", "_"), weight.detach().clone())

    def forward(self, of):
        averages = dict(self.named_buffers())
        with torch.no_grad():
            for name, weight in of.named_parameters():
                averages[name.replace(".", "_")].lerp_(weight, 0.5)

    @contextmanager
    def instead(self, of):
        averages, before = dict(self.named_buffers()), [weight.clone() for weight in of.parameters()]
        scale = sum(map(torch.norm, before)) / sum(map(torch.norm, averages.values()))
        for name, weight in of.named_parameters():
            weight.data.copy_(scale * averages[name.replace(".", "_")].data)
        yield
        for weight, own in zip(of.parameters(), before, strict=True):
            weight.data.copy_(own.data)


class Module(L.LightningModule):
    def __init__(self, case):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.lent = nn.Linear(WIDTH, WIDTH) if case == "lends" else None
        self.averaged = Averaged(self.layers) if case == "averages weights" else None
        self.case, self.mean, self.found, self.number = case, MeanMetric(), [], 0

    def forward(self, x, state=None):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, state, self.lent)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        loss = (self(batch[0]) - batch[0].roll(1, 1)).square().mean()
        self.log("loss", loss)
        return loss

    def decode(self, x):
        for _ in range(3):
            y = self(x)
            x = torch.where(y.mean() > 0, y, -y)
            if x.abs().max() > 3:  # as generation ends where a token says so
                break
        return x

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        if self.case == "fails" and batch_idx == 1:
            self(self(x))
            raise ValueError(f"batch {batch_idx}")
        if self.case in ("changes arguments", "noisy"):
            state = State(self.case == "noisy")
            x = self(self(x, state), state)
            numbers = [*map(float, state.seen), state.calls, *state.total.tolist(), state.last[0]]
            numbers += [float(state.last[1].sum()), *state.sums["all"].tolist()]
            self.found.append(numbers + [float(layer.aux) for layer in self.layers])
        elif self.case == "later" and batch_idx == 0:
            x = self(x)
        elif self.case == "decides":
            x = self(x)
            x = self.head(x) if x.mean() > 0.01 * batch_idx else self.first(x)
        elif self.case == "differentiates":  # for a force
            with torch.enable_grad():
                x.requires_grad_()
                (force,) = torch.autograd.grad(self(x).sum(), x)
            x = x.detach() * force
        elif self.averaged is not None:
            y = self.decode(x)
            with self.averaged.instead(self.layers):
                x = self.decode(x)
            x = x - self.decode(y)
        elif self.case == "apart":  # as where a set of texts is walked over, in an order of its own in each process
            kinds = sorted(("plain", "turned"), reverse=os.environ.get("RANK") == "1")
            x = self.decode(sum(self.layers[0](x, kind=kind) for kind in kinds))
        else:
            x = self.decode(x)
        value = x.square().mean()
        self.mean.update(value)
        self.log("value", value)
        self.log("mean", self.mean, on_epoch=True)
        self.number += 1
        self.kept = value

    def predict_step(self, batch, batch_idx):
        return {"x": self.decode(batch[0]), "number": batch_idx}

    def on_validation_epoch_end(self):
        if self.case == "in hooks":
            x = torch.ones(2, WIDTH, device=next(self.parameters()).device)
            if self.trainer.world_size > 1:
                with self.trainer.strategy.whole_parameters(self), torch.no_grad():
                    self.decode(x)  # where all ranks have all, they have not to tell each other, nor afterwards
            state = State(noisy=False)
            with torch.no_grad():
                self.found.append([*self.decode(self(x, state)).flatten().tolist(), state.calls, *state.total.tolist()])

    def on_train_batch_end(self, *args):
        if self.averaged is not None:
            strategy = self.trainer.strategy
            with strategy.whole_parameters(self.layers) if self.trainer.world_size > 1 else nullcontext():
                self.averaged(self.layers)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


CASES = {
    "decodes": {},
    "decides": {},
    "later": {},  # the first batch has nothing that stages could not run
    "changes arguments": {},
    "lends": {},  # a module, to all layers
    "averages weights": {},
    "differentiates": {},
    "noisy": {},
    "in hooks": {},
    "fails": {},
    "apart": {},
    "both ends on one rank": {"schedule": "zbv", "num_microbatches": 8},
    "evaluated first": {},  # which divides it
}


def run(case, strategy):
    module = Module(case)
    data = DataLoader(TensorDataset(torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1))), 8)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if strategy is None else dist.get_world_size(),
        strategy="auto" if strategy is None else PfoPipelineStrategy(**strategy),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=False,  # a metric that was updated in it cannot be in training
    )
    if case == "evaluated first":
        module.found += [output["x"].flatten().tolist() for output in trainer.predict(module, data)]
        module.found.append([*trainer.validate(module, data, verbose=False)[0].values()])
    try:
        trainer.fit(module, data, data)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    outputs = trainer.predict(module, data)
    return {
        "logged": logged,
        "found": module.found,
        "number": module.number,
        "kept": float(module.kept),
        "predicted": [[*output["x"].flatten().tolist(), output["number"]] for output in outputs],
    }


class Told(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def main():
    found, told = {}, Told()
    logging.getLogger("lightning_pfo").addHandler(told)
    for case, strategy in CASES.items():
        found[case] = run(case, strategy if dist.is_initialized() else None)
    found["told"] = told.messages
    name = f"rank_{dist.get_rank()}" if dist.is_initialized() else "one_device"
    (FOLDER / f"{name}.json").write_text(json.dumps(found))


run_ranks(main, 1)
run_ranks(main, 2)
