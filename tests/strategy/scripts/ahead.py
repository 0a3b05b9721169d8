"""Datasets and loaders that keep count of what is read, on two ranks beside one device. Usage: ahead.py FOLDER."""

import json
import sys
import threading
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
WIDTH = 6


class Augmented(Dataset):
    """Draws from a generator of its own, as transforms do, and counts what it is asked for."""

    def __init__(self):
        self.random, self.calls = np.random.default_rng(0), 0

    def __len__(self):
        return 32

    def __getitem__(self, index):
        self.calls += 1
        return torch.tensor(self.random.normal(size=WIDTH) + 0.02 * self.calls, dtype=torch.float32)


class Cache(Augmented):
    """Cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


DRAWN = {"random": None, "calls": 0}
CALLS = 0


class OfClass(Augmented):
    """What it draws from and counts is its class's and the script's; so it is of what its samples are made by."""

    random, calls, seen = None, 0, torch.zeros(1)

    def __init__(self):
        global CALLS
        cls = type(self)
        cls.random, cls.calls, CALLS = np.random.default_rng(0), 0, 0
        DRAWN.update(random=np.random.default_rng(1), calls=0)
        cls.seen.zero_()

    def __getitem__(self, index):
        global CALLS
        CALLS += 1
        self.seen += 1
        OfClass.calls += 1
        DRAWN["calls"] += 1
        count = CALLS + OfClass.calls + DRAWN["calls"] + float(self.seen)
        return torch.tensor(self.random.normal(size=WIDTH) + 0.005 * count, dtype=torch.float32)


class OfClassCache(OfClass):
    """Cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def stacked(samples):
    return torch.stack(samples) + torch.tensor(DRAWN["random"].normal(size=WIDTH), dtype=torch.float32)


class Drawn(IterableDataset):
    """Takes its samples from an iterator of its class."""

    def __init__(self):
        Drawn.samples = (torch.sin(torch.arange(WIDTH) * float(number)) for number in range(48))

    def __iter__(self):
        for _ in range(24):
            yield next(self.samples)


class Stream(IterableDataset):
    """Goes on in the next epoch where it was, as those that are read once do."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        for _ in range(32):
            self.position += 1
            yield torch.sin(torch.arange(WIDTH) * float(self.position))


class Generated(IterableDataset):
    """Has what nobody can copy."""

    def __init__(self):
        self.samples = (torch.sin(torch.arange(WIDTH) * float(number)) for number in range(48))

    def __iter__(self):
        for sample, _ in zip(self.samples, range(24), strict=False):
            yield sample


class OfModel(IterableDataset):
    """Samples made by the model, as in reinforcement learning."""

    def __init__(self, module):
        self.module = module

    def __iter__(self):
        return self.module.make_samples()


class Batches:
    """No DataLoader at all."""

    def __init__(self):
        self.epochs = 0

    def __iter__(self):
        self.epochs += 1
        for number in range(4):
            yield torch.sin(torch.arange(8 * WIDTH).view(8, WIDTH) * float(1 + number + self.epochs))


class Module(L.LightningModule):
    def __init__(self, make_loader, uses_weights):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.make_loader, self.uses_weights = make_loader, uses_weights
        self.made = self.collated = self.calls = 0
        self.drawing, self.dataset = np.random.default_rng(0), None

    def train_dataloader(self):
        return self.make_loader(self)

    def collate(self, samples):
        self.collated += 1
        return torch.stack(samples) + 0.02 * self.collated

    def make_samples(self):
        for _ in range(32):
            self.made += 1
            yield torch.sin(torch.arange(WIDTH) * float(self.made))

    def training_step(self, batch, batch_idx):
        loss = (self.model(batch).square().mean(-1) - batch.sum(-1)).square().mean()
        if self.uses_weights:  # of the first stage, where the last one computes the loss
            loss = loss + 0.1 * self.model[0].weight.square().sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Losses(L.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))


def shuffled(_):
    return DataLoader(torch.randn(32, WIDTH), 8, shuffle=True, generator=torch.Generator().manual_seed(3))


def next_shard(module):
    """Another one for each call, drawn by a generator of the module's; the dataset is made once."""
    module.calls += 1
    module.dataset = module.dataset or Augmented()
    chosen = module.drawing.permutation(32)[: 16 + 8 * module.calls]
    return DataLoader(Subset(module.dataset, chosen.tolist()), 8)


def of(make, within=False, **options):
    dataset = make()  # the same for each call of `train_dataloader`
    dataset = Subset(dataset, range(32)) if within else dataset
    return lambda _: DataLoader(dataset, 8, **options)


def cases():
    batches, shuffling = Batches(), shuffled(None)
    return {
        # what makes the loader, whether the loss uses weights of another stage, options of the strategy
        "augmented": (of(Augmented), True, {}),
        "cannot be copied, but read again": (of(Cache), True, {}),
        "of its class": (of(OfClass, collate_fn=stacked), True, {}),
        "of its class, within another": (of(OfClass, within=True), True, {}),
        "of its class, read again": (of(OfClassCache, collate_fn=stacked), True, {}),
        "iterator of its class": (of(Drawn), False, {}),
        "own order": (lambda _: shuffling, True, {}),
        "stream": (of(Stream), True, {}),
        "stream with workers": (of(Stream, num_workers=1), True, {}),
        "stream read by the first rank": (of(Stream), True, {"load_batches": "first"}),
        "measured": (of(Stream), True, {"partition": "profile"}),
        "generator": (of(Generated), False, {}),
        "made by the model": (lambda module: DataLoader(OfModel(module), 8), False, {}),
        "collated by the model": (lambda m: DataLoader(Stream(), 8, collate_fn=m.collate), True, {}),
        "batches": (lambda _: batches, True, {}),
        "next shard": (next_shard, True, {}),
        "two streams": (lambda _: {"a": DataLoader(Stream(), 8), "b": DataLoader(Augmented(), 8)}, True, {}),
    }


class OfTwo(Module):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch["a"] + batch["b"], batch_idx)


def train(name, on_pipeline):
    torch.manual_seed(1)
    make, uses_weights, strategy = cases()[name]
    module, losses = (OfTwo if name == "two streams" else Module)(make, uses_weights), Losses()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if on_pipeline else 1,
        strategy=PfoPipelineStrategy(**strategy, check_loss=False) if on_pipeline else "auto",
        max_epochs=2,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return losses.seen


def main():
    found = {}
    for name in cases():
        found[name] = {"ranks": train(name, on_pipeline=True)}
        if dist.get_rank() == 0:
            found[name]["one device"] = train(name, on_pipeline=False)
    (FOLDER / f"rank_{dist.get_rank()}.json").write_text(json.dumps(found))


run_ranks(main, 2)
