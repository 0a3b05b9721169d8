"""Two replicas of two stages with other numbers of batches, and of samples in them; writes OUTPUT/rank_N.json."""

import json
import os
import signal
import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.compat.processes import OLDEST_FSDP
from tests.quiet import QUIET
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
X = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
NUM_BATCHES = (3, 1)
"""Of each replica, where the user distributes samples."""


class Module(L.LightningModule):
    def __init__(self, act=lambda batch_idx: None):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        self.act, self.seen = act, []

    def forward(self, x):
        return self.model(x).square().sum(1)

    def training_step(self, batch, batch_idx):
        return self(batch).mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("loss", self(batch).mean(), on_step=True, on_epoch=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def ended(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.act(batch_idx)
        self.seen.append(batch_idx)

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = ended

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.written = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.written.append(batch_indices)

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.written.append(batch_indices)


def trainer_of(fully_shard=False, **options):
    return L.Trainer(
        strategy=PfoPipelineStrategy(data_parallel_size=2, check_loss=False, fully_shard=fully_shard),
        accelerator="cpu",
        devices=4,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def replica():
    return dist.get_rank() // 2


def own_loader(of_replica=None):
    """What a user distributes who sets `use_distributed_sampler=False`."""
    return DataLoader(X[: 2 * NUM_BATCHES[replica() if of_replica is None else of_replica]], batch_size=2)


def predict():
    module, writer = Module(), Writer()
    trainer = trainer_of(callbacks=[writer])
    parts = [part.tolist() for part in trainer.predict(module, DataLoader(X, batch_size=3))]
    return {"parts": parts, "written": writer.written}


def evaluate(name):
    module = Module()
    trainer = trainer_of(use_distributed_sampler=False)
    if name == "two loaders":
        trainer.validate(module, [own_loader(), own_loader(1 - replica())])
        losses = {name: float(value) for name, value in trainer.callback_metrics.items() if "epoch" in name}
        return {"seen": module.seen, "losses": losses}
    if name == "fit":
        trainer.fit(module, DataLoader(X[:4], batch_size=2), own_loader())
    else:
        getattr(trainer, name)(module, own_loader())
    return {"seen": module.seen, "loss": float(trainer.callback_metrics["loss_epoch"])}


def divided():
    """Layers are gathered from replicas of which one has no batch."""
    if torch.__version__ < OLDEST_FSDP["cpu"]:
        return ""
    try:
        trainer_of(fully_shard=True, use_distributed_sampler=False).validate(Module(), own_loader())
    except ConfigurationError as error:
        return str(error)
    return "nothing"


class OfFirstReplica(IterableDataset):
    """Two samples; others turn out to have none."""

    def __iter__(self):
        return iter(X[:2] if replica() == 0 else [])


SIZES = ((1, 4, 4, 4, 4, 4), (4, 4, 4, 1, 3, 4))
"""Samples in batches of each replica, for four microbatches."""


class Learning(Module):
    """Logs a number that is 0: it is looked at again in later batches."""

    def training_step(self, batch, batch_idx):
        loss = self(batch).mean()
        self.log("zero", 0.0 * loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches_of(of_replica):
    generator = torch.Generator().manual_seed(of_replica)
    return [torch.randn(size, 6, generator=generator) for size in SIZES[of_replica]]


def trained_in_one_piece():
    """What the replicas' losses, averaged, make of the weights."""
    module = Learning()
    optimizer = module.configure_optimizers()
    for batches in zip(batches_of(0), batches_of(1), strict=True):
        optimizer.zero_grad()
        (sum(module(batch).mean() for batch in batches) / 2).backward()
        optimizer.step()
    return module


def trained(fully_shard):
    if fully_shard and torch.__version__ < OLDEST_FSDP["cpu"]:
        return []
    module = Learning()
    strategy = PfoPipelineStrategy(num_microbatches=4, data_parallel_size=2, fully_shard=fully_shard)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=4, max_epochs=1, use_distributed_sampler=False, **QUIET
    )
    own = DataLoader(batches_of(replica()), batch_size=None)
    trainer.fit(module, own)
    expected = trained_in_one_piece()
    found = strategy.gather_module()
    pairs = [] if found is None else zip(found.parameters(), expected.parameters(), strict=True)
    gaps = [(ours - one).abs().max() for ours, one in pairs]
    parts = trainer.predict(module, own)
    with torch.no_grad():
        gaps += [(part - expected(batch)).abs().max() for part, batch in zip(parts, batches_of(replica()), strict=True)]
    return [*map(float, gaps)]


class Late(Module):
    """Logs from the second batch on what is no mean, on the second replica."""

    def training_step(self, batch, batch_idx):
        found = self(batch)
        if batch_idx > 0 and dist.get_rank() == 1:  # in a step replicas are the processes
            self.log("largest", found.max())
        return found.mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx > 0 and replica() == 1:
            with torch.no_grad():
                self.seen.append([float(self.trainer.callback_metrics["largest"]), float(Module()(batch).max())])


def late(fully_shard):
    """What the second replica has logged, and what one device has."""
    if fully_shard and torch.__version__ < OLDEST_FSDP["cpu"]:
        return []
    strategy = PfoPipelineStrategy(num_microbatches=3, data_parallel_size=2, fully_shard=fully_shard)
    module = Late()
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=4, max_epochs=1, **QUIET)
    trainer.fit(module, DataLoader(torch.cat([X, X[:5]]), batch_size=3))
    return module.seen


def none(name, fully_shard=False):
    """One replica has no batch."""
    if fully_shard and torch.__version__ < OLDEST_FSDP["cpu"]:
        return ""
    try:
        found = getattr(trainer_of(fully_shard), name)(Module(), DataLoader(OfFirstReplica(), batch_size=2))
    except ConfigurationError as error:
        return str(error)
    return [part.tolist() for part in found]


def end(name, rank, at):
    """A rank is asked to end in a batch that one replica alone has."""

    def act(batch_idx):
        if dist.get_rank() == rank and batch_idx == at:
            os.kill(os.getpid(), signal.SIGTERM)

    module, raised = Module(act), False
    try:
        getattr(trainer_of(use_distributed_sampler=False), name)(module, own_loader())
    except SIGTERMException:
        raised = True
    return {"seen": module.seen, "raised": raised}


def main():
    expected = Module()
    with torch.no_grad():
        all_losses = expected(X)
    found = {
        "expected": all_losses.tolist(),
        "predict": predict(),
        "divided": divided(),
        "trained": {str(fully_shard): trained(fully_shard) for fully_shard in (False, "zero3")},
        "late": {str(fully_shard): late(fully_shard) for fully_shard in (False, "zero3")},
        "none": {"predict": none("predict"), "test": none("test"), "divided": none("predict", fully_shard=True)},
        **{name: evaluate(name) for name in ("validate", "test", "fit", "two loaders")},
        "ended": {f"{name} {rank} {at}": end(name, rank, at) for name in ("test", "predict") for rank, at in ENDED},
    }
    (FOLDER / f"rank_{dist.get_rank()}.json").write_text(json.dumps(found))


ENDED = ((0, 1), (3, 0), (1, 2))
"""Which rank is asked to end, and in which batch: the second of three, the only one, the last one."""
run_ranks(main, 4)
