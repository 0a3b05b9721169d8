"""Steps that return None before they call the model, on two ranks and on one device; writes OUTPUT/rank_N.json."""

import json
import logging
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])


class Module(L.LightningModule):
    num_samples, collate = 48, None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 4))
        self.losses, self.logged, self.count = [], [], 0

    def skips(self, batch, batch_idx):
        return False

    def training_step(self, batch, batch_idx):
        self.count += 1
        self.log("number", float(batch_idx))
        if self.skips(batch, batch_idx):
            return None
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            return None
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]) if outputs else None)
        self.logged.append(float(self.trainer.callback_metrics.get("number", -1)))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


class EverySecond(Module):
    def skips(self, batch, batch_idx):
        return bool(batch_idx % 2)


class First(Module):
    def skips(self, batch, batch_idx):
        return batch_idx == 0


class All(Module):
    def skips(self, batch, batch_idx):
        return True


class NoneBatches(Module):
    """The loader leaves out batches, the first too."""

    @staticmethod
    def collate(items):
        return default_collate(items) if int(items[0][2]) % 24 else None


class NoBatches(Module):
    num_samples = 0


class SomeMicrobatches(Module):
    def skips(self, batch, batch_idx):
        return bool(batch[0].sum() > 0)


class OfOneRank(Module):
    def skips(self, batch, batch_idx):
        return OfOneRank.rank == 0 and batch_idx == 1


class Counting(DataLoader):
    """Counts how often it is begun, each of which would start workers."""

    def __iter__(self):
        Counting.begun += 1
        return super().__iter__()


OPTIONS = {
    "1f1b": {"memory_report": True},
    "interleaved": {"schedule": "interleaved_1f1b"},
    "whole": {"schedule": "gpipe", "loss_over": "batch"},
}


def fit(module, strategy, devices):
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(48, 8, generator=generator), torch.randint(4, (48,), generator=generator)
    samples = TensorDataset(*(each[: module.num_samples] for each in (inputs, labels, torch.arange(48))))
    train_loader, loader = (kind(samples, batch_size=12, collate_fn=module.collate) for kind in (Counting, DataLoader))
    Counting.begun = 0
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    error = ""
    try:
        trainer.fit(module, train_loader, loader)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {
        "losses": module.losses,
        "logged": module.logged,
        "count": module.count,
        "begun": Counting.begun,
        "val_loss": float(trainer.callback_metrics.get("val_loss", 0)),
        "error": error,
    }


def main():
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results = {}
    OfOneRank.rank = dist.get_rank()  # in a step it is told by what the rank does there
    for kind in (EverySecond, First, All, NoneBatches, NoBatches):
        for name in json.loads(sys.argv[2]).get(kind.__name__, []):
            strategy = PfoPipelineStrategy(num_microbatches=4, **OPTIONS[name])
            results[f"{kind.__name__}, {name}"] = fit(kind(), strategy, 2)
        results[f"{kind.__name__}, plain"] = fit(kind(), "auto", 1) if dist.get_rank() == 0 else None
    split = EverySecond()
    fit(split, PfoPipelineStrategy(num_microbatches=4), 2)
    results["split before"] = fit(split, "auto", 1) if dist.get_rank() == 0 else None
    for kind in (SomeMicrobatches, OfOneRank):  # with the latter the other rank is ended
        results[kind.__name__] = fit(kind(), PfoPipelineStrategy(num_microbatches=4), 2)
        (FOLDER / f"rank_{dist.get_rank()}.json").write_text(json.dumps(results))


run_ranks(main, 2)
