"""Copies of layers that hooks make, as teachers and averages of weights: on two ranks as on one device.

Usage: copies.py FOLDER.
"""

import copy
import io
import json
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.quiet import QUIET
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
NOISE = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(24, 8, generator=NOISE), torch.randint(3, (24,), generator=NOISE))


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 3))
        self.teacher, self.seen = None, []

    def copied(self):
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        output = self.net(batch[0])
        loss = nn.functional.cross_entropy(output, batch[1])
        if self.teacher is not None:
            with torch.no_grad():
                target = self.teacher(batch[0])
            distance = nn.functional.mse_loss(output, target)
            self.log("distance", distance)
            loss = loss + 10 * distance
        return loss

    def validation_step(self, batch, batch_idx):
        model = self.net if self.teacher is None else self.teacher
        self.log("validation", nn.functional.cross_entropy(model(batch[0]), batch[1]))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append([outputs["loss"].item(), *map(float, self.trainer.callback_metrics.values())])

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class AtFitStart(Module):
    def on_fit_start(self):
        self.copied()


class EachEpoch(Module):
    def on_train_epoch_start(self):
        self.copied()


class EachBatch(Module):
    """A target network that is the online one of the batch before."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx:
            self.teacher = self.latest
        self.latest = copy.deepcopy(self.net).requires_grad_(False)


class Average(Module):
    """Follows the weights, each rank those of its own stages."""

    def on_train_start(self):
        self.copied()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        with torch.no_grad():
            for averaged, parameter in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                averaged.lerp_(parameter, 0.3)


class Twice(Module):
    """A copy of a copy."""

    def on_train_start(self):
        self.copied()
        self.teacher = copy.deepcopy(self.teacher)


class LeadsBack(AtFitStart):
    """The end of the step is behind both, and stages run one after the other before it."""


class WholeModule(Module):
    """A callback's copy of all of it."""

    def on_train_start(self):
        teacher = copy.deepcopy(self)
        object.__setattr__(self, "held", [teacher])
        self.teacher = teacher.net.requires_grad_(False)


class Called(Module):
    """In hooks."""

    def on_train_start(self):
        self.copied()

    def on_train_epoch_end(self):
        self.seen.append(self.teacher(DATA[:5][0].to(self.device)).sum().item())


class Within(Module):
    """A step that copies is refused."""

    def training_step(self, batch, batch_idx):
        if batch_idx:
            self.copied()
        return super().training_step(batch, batch_idx)


class OlderNorms(Module):
    """Layers that make their weight before each call."""

    def __init__(self):
        super().__init__()
        for index, norm in enumerate([nn.utils.weight_norm, nn.utils.spectral_norm] * 2):
            norm(self.net[index][0])
        prune.l1_unstructured(self.net[4], "weight", 0.5)


CASES = (AtFitStart, EachEpoch, EachBatch, Average, Twice, LeadsBack, WholeModule, Called, Within, OlderNorms)
OPTIONS = {
    "AtFitStart": {"schedule": "zbv"},
    "LeadsBack": {"schedule": "gpipe", "loss_over": "batch"},
}


def run(case, number):
    L.seed_everything(3, verbose=False)
    options = OPTIONS.get(case.__name__, {})
    trainer = L.Trainer(
        accelerator="cpu",
        devices=number,
        strategy=PfoPipelineStrategy(**options) if number > 1 else "auto",
        **QUIET,
        num_sanity_val_steps=0,
        max_epochs=2,
    )
    module = case()
    loader = DataLoader(DATA, 8)
    try:
        trainer.fit(module, loader, loader)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    whole = trainer.strategy.gather_module() if number > 1 else module
    sums = {}
    if whole is not None:
        sums = {name: float(value.double().abs().sum()) for name, value in whole.state_dict().items()}
        if case is OlderNorms:  # the weights that code finds there; teachers of such layers cannot be copied
            weights = [layer[0].weight for layer in whole.net[:4]] + [whole.net[4].weight]
            return {"sums": [float(weight.double().abs().sum()) for weight in weights]}
        torch.save(whole, io.BytesIO())
        whole.teacher(DATA[:2][0])
    left = module.teacher is not None and "forward" in vars(module.teacher[0])
    return {"seen": module.seen, "sums": sums, "forward": left}


def main(number):
    found = {case.__name__: run(case, number) for case in CASES}
    rank = torch.distributed.get_rank() if number > 1 else 0
    (FOLDER / f"{number}_{rank}.json").write_text(json.dumps(found))


for size in (1, 2):
    run_ranks(main, size, size)
