"""Training is interrupted, by a signal, by the step itself or by the time to validate; usage: interrupted.py FOLDER.

Two processes; each writes FOLDER/rank_N.json.
"""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
torch.manual_seed(0)
DATA = DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 1)), batch_size=4)


class Module(L.LightningModule):
    def __init__(self, **acts):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.acts = acts
        self.trained, self.validated = [], []

    def loss(self, batch):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def act(self, where, batch_idx):
        self.acts.get(where, lambda batch_idx: None)(batch_idx)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.act("step", batch_idx)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validated", self.loss(batch))

    def on_train_batch_start(self, batch, batch_idx):
        self.act("batch", batch_idx)
        self.trained.append(batch_idx)

    def on_validation_batch_start(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.act("validation", batch_idx)
            self.validated.append(batch_idx)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def trainer_of(callbacks=(), **options):
    of_strategy = {name: options.pop(name) for name in ("data_parallel_size",) if name in options}
    return L.Trainer(
        accelerator="cpu",
        devices=options.pop("devices", 2),
        strategy=options.pop("strategy", None) or PfoPipelineStrategy(check_loss=False, **of_strategy),
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        **options,
    )


def interrupted(name, *, resumes=False, **acts_and_options):
    """Train until something interrupts; what ended it, what was saved, and what training comes to that goes on."""
    names = ("data_parallel_size", "devices", "strategy")
    options = {key: acts_and_options.pop(key) for key in names if key in acts_and_options}
    module, before = Module(**acts_and_options), signal.getsignal(signal.SIGINT)
    folder = FOLDER / name
    savers = [
        ModelCheckpoint(folder, filename="model", save_on_exception=True),
        OnExceptionCheckpoint(folder, filename="exception"),
    ]
    trainer, ended = trainer_of(savers, **options), None
    try:
        trainer.fit(module, DATA, DATA)
    except BaseException as error:
        ended = [type(error).__name__, getattr(error, "code", None)]
    found = {
        "ended": ended,
        "trained": module.trained,
        "validated": module.validated,
        "status": trainer.state.status,
        "saved": sorted(path.name for path in folder.iterdir()) if folder.is_dir() else [],
        "handler is back": signal.getsignal(signal.SIGINT) is before,
    }
    if resumes:
        checkpoint = torch.load(folder / "exception.ckpt", weights_only=True)
        found["steps"] = checkpoint["global_step"]
        resumed, trainer = Module(), trainer_of(**options)
        trainer.fit(resumed, DATA, DATA, ckpt_path=folder / "exception.ckpt")
        found["resumed"] = resumed.trained
        gather = getattr(trainer.strategy, "gather_module", lambda: resumed)
        found["weights"] = weights_of(gather(), trainer.is_global_zero)
    dist.barrier()
    return found


def weights_of(module, has_them=True):
    return {name: value.tolist() for name, value in module.state_dict().items()} if has_them else None


def at(number, act):
    return lambda batch_idx: act() if batch_idx == number else None


def ctrl_c(*ranks, times=1):
    def send():
        if dist.get_rank() in ranks:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    return send


def leave(ending):
    def act():
        raise ending

    return act


def of_second():
    if dist.get_rank() == 1:
        raise KeyboardInterrupt


def own_handler():
    """Somebody who has a handler of his own keeps it."""
    heard = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: heard.append(signum))
    found = interrupted("own", batch=at(3, ctrl_c(0, 1)))
    signal.signal(signal.SIGINT, before)
    return {**found, "heard": len(heard)}


def timed():
    """By the clock of the first rank it is always time to validate, by the other's never."""
    seconds = 0.0 if dist.get_rank() == 0 else 1e6
    module = Module()
    try:
        trainer = trainer_of(val_check_interval=timedelta(seconds=seconds), check_val_every_n_epoch=None)
    except (TypeError, MisconfigurationException):  # a Lightning that takes numbers only
        return None
    trainer.fit(module, DATA, DATA)
    return {"trained": module.trained, "validated": module.validated}


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started this may ignore it
    alone = {"devices": 1, "strategy": "auto"}
    one, name = Module(), f"alone {dist.get_rank()}"
    trainer_of(**alone).fit(one, DATA, DATA)
    found = {
        "whole": {"weights": weights_of(one), "trained": one.trained},
        "alone": interrupted(name, batch=at(4, leave(KeyboardInterrupt)), resumes=True, **alone),
        "all": interrupted("all", batch=at(3, ctrl_c(0, 1)), resumes=True),
        "one": interrupted("one", batch=at(3, ctrl_c(1)), resumes=True),
        "last": interrupted("last", batch=at(7, ctrl_c(1)), resumes=True),
        "validation": interrupted("validation", validation=at(2, ctrl_c(0))),
        "twice": interrupted("twice", batch=at(3, ctrl_c(0, 1, times=2))),
        "step": interrupted("step", step=at(3, leave(KeyboardInterrupt))),
        "exit": interrupted("exit", step=at(3, leave(SystemExit(7)))),
        "exit at once": interrupted("at once", step=at(0, leave(SystemExit(7)))),  # where the first batch is looked at
        "replica": interrupted("replica", step=at(3, of_second), data_parallel_size=2),
        "own": own_handler(),
        "timed": timed(),
    }
    (FOLDER / f"rank_{dist.get_rank()}.json").write_text(json.dumps(found))


run_ranks(main, 2)
