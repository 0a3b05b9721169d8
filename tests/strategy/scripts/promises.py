"""What Lightning promises of steps, hooks, loggers and predictions; usage: promises.py FOLDER first|further.

The same runs by a plain Trainer, and by the pipeline on one and two ranks; each writes what it saw.
"""

import io
import json
import os
import pickle
import sys
import threading
import traceback
import types
import warnings
from collections import UserDict
from functools import partial, wraps
from pathlib import Path
from unittest import mock

import lightning as L
import lightning.pytorch.loops.utilities as lightning_loops
import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BasePredictionWriter,
    Checkpoint,
    LambdaCallback,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_pfo.core.errors import PfoError
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
DATA = torch.randn(22, 4, generator=torch.Generator().manual_seed(1))


class Experiment:
    def __init__(self, calls):
        self.calls = calls

    def add_scalar(self, name, value, global_step=None):
        self.calls.append(["add_scalar", name, plain(value), global_step])

    def add_histogram(self, name, values):
        self.calls.append(["add_histogram", name, plain(values)])


class Recording(Logger):
    """Notes what it is told, as loggers do: on the first rank."""

    name, version = "recording", 0

    def __init__(self):
        super().__init__()
        self.calls = []

    @property
    @L.pytorch.loggers.logger.rank_zero_experiment
    def experiment(self):
        return Experiment(self.calls)

    def log_hyperparams(self, *args, **kwargs):
        pass

    @L.pytorch.utilities.rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.calls.append(["log_metrics", plain(metrics), step])


def plain(value):
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0


class Module(L.LightningModule):
    """Lightning 2's idioms."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("running", torch.zeros(3))
        self.hooks, self.outs, self.losses, self.steps, self.total, self.correct = [], [], [], 0, 0.0, torch.tensor(0)
        self.before, self.samples, self.last, self.texts, self.meter = 0, 0, None, [], Meter()
        self.zeros = self.firsts = 0
        self.stats, self.everything, self.lines = {"max": -1.0}, [], []

    def forward(self, x):
        self.before += 1
        return self.head(self.layers(x))

    def loss(self, x):
        return self(x).square().mean()

    def training_step(self, batch, batch_idx):
        (x,) = batch
        self.steps += 1
        output = self(x)
        loss = output.square().mean()
        self.total += float(loss)
        self.samples += len(x)
        self.seen += len(x)
        self.running.mul_(0.9).add_(0.1 * output.detach().mean(0))
        self.losses.append(loss)
        self.last = output
        self.zeros += self.trainer.is_global_zero
        self.firsts += (self.global_rank == 0) + (self.local_rank == 0) + (self.trainer.global_rank == 0)
        self.firsts += not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        self.only_on_first()
        self.texts.append(f"batch {batch_idx}")
        self.meter.sum += float(loss) * len(x)
        self.meter.count += len(x)
        self.stats["batch"] = batch_idx
        self.correct = self.correct + (output[:, 0] > output[:, 1]).sum()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("batch_idx", 10 + batch_idx, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("sum", loss, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("max", loss, reduce_fx=max, on_step=False, on_epoch=True)
        self.log("count", (output > 0).sum(), reduce_fx=torch.sum, on_step=False, on_epoch=True)
        self.logger.experiment.add_scalar("train", loss, global_step=self.global_step)
        self.logger.experiment.add_histogram("outputs", output)
        self.logger.log_metrics({"direct": loss.detach()}, step=self.global_step)
        self.print(f"training {batch_idx}")
        return {"loss": loss, "output": output.detach(), "name": f"batch {batch_idx}", "n": len(x)}

    @rank_zero_only
    def only_on_first(self):
        self.firsts += 1

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.hooks.append(["train", plain(outputs), batch_idx])

    def on_after_backward(self):
        self.hooks.append(["gradients", self.trainer.strategy.grad_norm().item() if self.pipelined else self.norm()])

    def norm(self):
        return torch.cat([p.grad.flatten() for p in self.parameters()]).norm().item()

    @property
    def pipelined(self):
        return hasattr(self.trainer.strategy, "grad_norm")

    def on_train_epoch_end(self):
        everything = torch.stack(self.losses)
        self.hooks.append(["epoch", plain(everything), self.everything_left()])
        self.losses.clear()

    def everything_left(self):
        return plain(
            {
                "counts": [self.steps, self.before, self.samples, self.seen, self.correct, self.zeros, self.firsts],
                "total": self.total,
                "last": self.last,
                "running": self.running,
                "texts": self.texts,
                "meter": vars(self.meter),
                "stats": self.stats,
            }
        )

    def validation_step(self, batch, batch_idx):
        output = self(batch[0])
        loss = output.square().mean()
        self.outs.append(loss)
        self.everything.append(output)
        self.log("val", loss)
        return {"loss": loss, "outputs": [output, {"x": batch[0]}], "first": output[:, 0]}

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.hooks.append(["validation", plain(outputs), batch_idx])

    def on_validation_epoch_end(self):
        self.hooks.append(["outs", plain(torch.stack(self.outs)), list(torch.cat(self.everything).shape)])
        self.log("mean_of_outs", torch.stack(self.outs).mean())
        self.outs.clear()
        self.everything.clear()

    def test_step(self, batch, batch_idx):
        return self.loss(batch[0])

    def on_test_batch_end(self, outputs, batch, batch_idx):
        self.hooks.append(["test", plain(outputs), batch_idx])

    def predict_step(self, batch, batch_idx):
        output = self(batch[0])
        kinds = {
            "tensor": output,
            "list": [f"sample {value:.3f}" for value in output[:, 0].tolist()],
            "same": ["a"] * len(output),
            "arrays": output.numpy(),
            "mean": output.mean(),
            "float": output.mean().item(),
            "one": 1,
            "count": len(output),
            "text": "b",
            "none": None,
            "pair": (output[:, :1], output[:, 0].long()),
            "dicts": [{"id": float(value)} for value in output[:, 0]],
            "parts": [row for row in output],
        }
        return kinds if batch_idx % 2 else list(kinds["list"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.written = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.written.append([batch_idx, batch_indices, plain(prediction)])

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.written.append(["epoch", batch_indices, plain(predictions)])


def trainer_of(where, callbacks=(), **options):
    logger = Recording()
    strategy_options = options.pop("strategy_options", {})
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2 if where == "two" else 1,
        strategy="auto" if where == "plain" else PfoPipelineStrategy(**{"num_microbatches": 3} | strategy_options),
        logger=logger,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        default_root_dir=FOLDER,
        **options,
    )
    return trainer, logger


def train(where):
    L.seed_everything(3, verbose=False)
    module = Module()
    trainer, logger = trainer_of(where, max_epochs=2, num_sanity_val_steps=1)
    callbacks = list(trainer.callbacks)
    loader = DataLoader(TensorDataset(DATA), batch_size=6)
    trainer.fit(module, loader, loader)
    metrics = plain(dict(trainer.callback_metrics))
    assert trainer.callbacks == callbacks
    trainer.test(module, loader, verbose=False)
    return {"hooks": module.hooks, "calls": logger.calls, "metrics": metrics}


def predict(where, gather="all"):
    L.seed_everything(3, verbose=False)
    writer = Writer()
    trainer, _ = trainer_of(where, [writer], strategy_options={"gather": gather})
    predictions = trainer.predict(Module(), DataLoader(TensorDataset(DATA), batch_size=6))
    return {"predictions": plain(predictions), "written": writer.written}


def predict_rank0(where):
    return predict(where, "rank0")


def predict_none(where):
    return predict(where, "none")


class Noisy(Module):
    def predict_step(self, batch, batch_idx):
        noisy = batch[0] + torch.randn_like(batch[0])
        return self(noisy), noisy


def noise(where):
    L.seed_everything(3, verbose=False)
    trainer, _ = trainer_of(where)
    same = DataLoader(TensorDataset(torch.zeros(12, 4)), batch_size=4)
    runs = [[plain(noisy) for _, noisy in trainer.predict(Noisy(), same)] for _ in range(2)]
    return {"runs": runs}


class Handle:
    """What an experiment returns: handles, contexts, series, names."""

    def __init__(self, calls, name="run"):
        vars(self).update(calls=calls, id=name, made=0)

    def create(self, *what):
        self.calls.append(["create", self.id, plain(what)])
        vars(self)["made"] += 1
        return Handle(self.calls, f"{self.id}/{self.made}")

    def write(self, *what, **more):
        self.calls.append(["write", self.id, plain(what), plain(more)])

    def __getitem__(self, key):
        return Handle(self.calls, f"{self.id}[{key}]")

    def __iter__(self):
        return iter(())

    def __setitem__(self, key, value):
        self.calls.append(["item", self.id, key, plain(value)])

    def __setattr__(self, name, value):
        self.calls.append(["attribute", self.id, name, plain(value)])

    def __delitem__(self, key):
        self.calls.append(["gone", self.id, key])

    def __enter__(self):
        self.calls.append(["enter", self.id])
        return self[self.made]

    def __exit__(self, kind, error, traceback):
        self.calls.append(["exit", self.id, str(kind), str(error)])


class Handing(Recording):
    def __init__(self):
        super().__init__()
        self.run = Handle(self.calls)

    @property
    @L.pytorch.loggers.logger.rank_zero_experiment
    def experiment(self):
        return self.run

    @rank_zero_only
    def start(self, name):
        return Handle(self.calls, name)


class Handles(Module):
    """What calls of a logger return is given to others, asked for more, and entered."""

    def on_train_epoch_end(self):
        pass

    def training_step(self, batch, batch_idx):
        run = self.logger.experiment
        made = run.create("first", batch_idx)
        with run.create() as context:
            output = self(batch[0])
            context.write("mean", output.mean())
            loss = output.square().mean()
            made.write({"of": made.id, "loss": loss}, [made.create(made.id).id], (run.id, 1), id=made.id)
        made["losses"].write(loss)
        made["last"] = loss
        made.loss = loss
        del made["last"]
        run.part.write(loss) if batch_idx < 0 else run[made.id].write(made["x"].create(loss).id)
        try:
            with made, made.create() as inner:
                inner.write("before")
                raise KeyError("in the middle")
        except KeyError:
            made.write("after")
        self.started = self.logger.start("started")  # a new one for each batch
        self.started.create().write(loss)
        run.write(self.started.id, loss)
        self.logger.log_metrics({"loss": loss.detach()}, step=batch_idx)
        return loss


class HandlesApart(Handles):
    """What microbatches say otherwise is said for each, and what that returns is used by each; then some say more."""

    def training_step(self, batch, batch_idx):
        (x,), run = batch, self.logger.experiment
        own = run.create(f"{x.sum():.6f}")
        own.write(own.create().id)
        with run.create():
            loss = self.loss(x)
        try:
            with run["of all"]:
                raise ValueError(f"{x.sum():.6f}")
        except ValueError:
            pass
        if (x == DATA[-1]).all(1).any():
            run.create("more").write(loss)
        return loss


class WantsBool(Handles):
    def want(self, run):
        return 1 if run.create() else 0

    def training_step(self, batch, batch_idx):
        self.want(self.logger.experiment)
        return self.loss(batch[0])


class WantsInt(WantsBool):
    def want(self, run):
        return int(run.id)


class WantsText(WantsBool):
    def want(self, run):
        return f"{run.create()}"


class WantsItems(WantsBool):
    def want(self, run):
        return [item for item in run["items"]]


class WantsEqual(WantsBool):
    def want(self, run):
        return run.create().id == "run/1"


class WantsSum(WantsBool):
    def want(self, run):
        return run.made + 1


class WantsMore(WantsBool):
    def want(self, run):
        self.text = torch.zeros(2) * run.made


class WantsLogged(WantsBool):
    def want(self, run):
        self.log("made", run.made)


class WantsLater(WantsBool):
    """Keeps a handle for the next batch."""

    kept = None

    def want(self, run):
        if self.kept is None:
            self.kept = run.create()
        self.kept.write("later")


def handles(where):
    found = {}
    wanting = (WantsBool, WantsInt, WantsText, WantsItems, WantsEqual, WantsSum, WantsMore, WantsLogged, WantsLater)
    for make in (Handles, HandlesApart, *wanting):
        L.seed_everything(3, verbose=False)
        trainer, _ = trainer_of(where, max_epochs=1, limit_val_batches=0)
        trainer.logger = logger = Handing()
        try:
            trainer.fit(make(), DataLoader(TensorDataset(DATA), batch_size=6))
            found[make.__name__] = logger.calls
        except Exception as error:
            found[make.__name__] = [type(error).__name__, str(error)]
    return found


# ---- no hang, no foreign error ----


class InSteps(Module):
    """Calls in a step what all ranks would have to take part in, if they all ran it to its end."""

    def __init__(self):
        super().__init__()
        self.metric = MeanMetric(dist_sync_on_step=True)
        self.found = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        self.trainer.strategy.barrier()
        gathered = self.all_gather(loss.detach())
        self.metric(gathered)
        self.found.append(MeanMetric().forward(gathered))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.hooks.append([plain(outputs["loss"]), plain(self.all_gather(outputs["loss"]))])

    def on_train_epoch_end(self):
        with torch.no_grad():
            self.hooks.append(plain(self(DATA[:2])))


def in_steps(where):
    module = fit(where, InSteps)
    return {"hooks": module.hooks, "found": plain(module.found)}


class Skips(Module):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        return None if batch_idx == 1 else loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.hooks.append([plain(outputs), self.trainer.global_step])

    def on_train_epoch_end(self):
        pass


def skips(where):
    return fit(where, Skips).hooks


class SavesNowhere(Skips):
    """A place that only the first rank finds that it cannot write; whoever calls goes on."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        (FOLDER / "file").write_text("no folder")
        try:
            self.trainer.save_checkpoint(FOLDER / "file" / "some.ckpt")
        except OSError as error:
            self.hooks.append([type(error).__name__, self.trainer.global_step])


def saves_nowhere(where):
    trainer, _ = trainer_of(where, max_epochs=1, limit_val_batches=0)
    trainer.fit(module := SavesNowhere(), DataLoader(TensorDataset(DATA), batch_size=6))
    return [each for each in module.hooks if each[0] != "gradients"]


class Fetches(Skips):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx + 2)


def fetches(where):
    return fit(where, Fetches).hooks


class StopsInTheStep(Skips):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        if batch_idx == 1:
            self.trainer.should_stop = True
        return loss


class StopsOnOneRank(Skips):
    def training_step(self, batch, batch_idx):
        return self.loss(batch[0])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 1 and self.global_rank == self.trainer.world_size - 1:
            self.trainer.should_stop = True


def stops(where):
    return {cls.__name__: fit(where, cls).hooks for cls in (StopsInTheStep, StopsOnOneRank)}


class FailsBeforeTheModel(Skips):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            raise ValueError("the user's own mistake")
        return self.loss(batch[0])


class FailsInTheTrace(Skips):
    """On one rank, before the model is called for the first time: where a step of a new form is traced."""

    def fail(self, *args):
        if int(os.environ.get("RANK", 0)) == self.failing:
            raise OSError("a file that this node does not have")
        return self.loss(args[0][0])

    training_step = validation_step = predict_step = fail


class Failing(nn.Linear):
    def forward(self, x):
        raise KeyError("a layer's own mistake")


class FailsInLayers(FailsInTheTrace):
    """So that nobody knows what layers return, and the trace of the step ends at the first of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Failing(4, 4) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        (x,), total = batch, 0.0
        for layer in self.layers:
            x, loss = layer(x)
            total = total + loss
        return x.square().mean() + total


def fails_in_the_trace(where):
    found = []
    try:
        trainer_of(where, max_epochs=1)[0].fit(FailsInLayers(), DataLoader(TensorDataset(DATA), batch_size=6))
    except KeyError as error:
        found.append(error.args[0])
    for kind in ("fit", "validate", "predict"):
        for rank in (0, 1):
            module = FailsInTheTrace()
            module.failing = rank
            try:
                getattr(trainer_of(where, max_epochs=1)[0], kind)(module, DataLoader(TensorDataset(DATA), batch_size=6))
            except OSError as error:
                found.append(f"{kind} {rank} {error}")
    return found


class LogsTwice(Skips):
    def training_step(self, batch, batch_idx):
        self.log("twice", 1.0)
        self.log("twice", 2.0, prog_bar=True)
        return self.loss(batch[0])


class LogsNone(Skips):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        self.log("foo", {"a": 1})
        return loss


class LogsForeignMetric(Skips):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        self.log("foo", MeanMetric())
        return loss


class NotSendableError(Exception):
    def __init__(self, reason, number):
        super().__init__(reason)


class FailsAtTheEnd(Skips):
    def training_step(self, batch, batch_idx):
        self.loss(batch[0])
        raise NotSendableError("at the end", 1)


class LogsInPrediction(Skips):
    def predict_step(self, batch, batch_idx):
        self.log("foo", 1.0)


class Leaves(Skips):
    """One rank alone ends its epoch."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch[0])

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 1 and self.global_rank == 0 else None


class CallsAlone(Skips):
    """One rank alone calls the model in a hook."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch[0])

    @rank_zero_only
    def on_train_epoch_end(self):
        self.loss(DATA[:2])


class OneLayer(Skips):
    """Too few for two stages."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.Sequential(nn.Linear(4, 3)), nn.Identity()


class InTransform(Skips):
    """All layers inside of one."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), nn.Identity()

    def training_step(self, batch, batch_idx):
        y, slope = torch.func.jvp(self.layers, (batch[0],), (torch.ones_like(batch[0]),))
        return (y - slope.detach()).square().mean()


def errors(where):
    found = {}
    kinds = (FailsBeforeTheModel, LogsTwice, LogsNone, LogsForeignMetric, FailsAtTheEnd)
    for cls in (*kinds, *([Leaves, CallsAlone, OneLayer, InTransform] if where == "two" else [])):
        folder = FOLDER / where / cls.__name__
        try:
            fit(where, cls, callbacks=[OnExceptionCheckpoint(folder)])
        except Exception as error:
            found[cls.__name__] = [type(error).__name__, str(error), (folder / "on_exception.ckpt").exists()]
    trainer, _ = trainer_of(where)
    try:
        trainer.predict(LogsInPrediction(), DataLoader(TensorDataset(DATA), batch_size=6))
    except Exception as error:
        at_its_line = "predict_step" in {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        found["LogsInPrediction"] = [type(error).__name__, str(error), at_its_line]
    return found


class Returns(Skips):
    """What holds no loss."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def training_step(self, batch, batch_idx):
        self.loss(batch[0])
        return self.value


def returns_no_loss(where):
    found = []
    for value in (5.0, {"a": 5}):
        try:
            fit(where, partial(Returns, value))
        except MisconfigurationException as error:
            found.append(str(error))
    return found


def saves_watched(where):
    """What a user has put in the place of `torch.save` is called for checkpoints, and for nothing else."""
    saved, original = [], torch.save
    torch.save = lambda content, file: saved.append(sorted(content))
    try:
        fit(where, Skips, callbacks=[ModelCheckpoint(FOLDER / where / "watched")], max_epochs=2)
    finally:
        torch.save = original
    return [[key for key in keys if key != "pfo_pipeline"] for keys in saved]


class Restored(Module):
    """Renames what it saves, and looks at what was restored."""

    def __init__(self, optimizer=True):
        super().__init__()
        self.optimizer = optimizer
        self.loads = 0
        self._register_load_state_dict_pre_hook(self.rename)

    def rename(self, state, prefix, *args):
        for key in [key for key in state if key.startswith("old_")]:
            state[key.removeprefix("old_")] = state.pop(key)

    def load_state_dict(self, *args, **kwargs):
        self.loads += 1
        return super().load_state_dict(*args, **kwargs)

    def on_load_checkpoint(self, checkpoint):
        self.given = sorted(checkpoint)

    def on_save_checkpoint(self, checkpoint):
        self.kept = checkpoint
        checkpoint["state_dict"] = {f"old_{key}": value for key, value in checkpoint["state_dict"].items()}

    def on_fit_start(self):
        own = [p.detach().sum().item() for p in self.parameters() if not p.is_meta]
        counted = [callback.count for callback in self.trainer.callbacks if isinstance(callback, Counts)]
        self.hooks.append([sum(own), counted, [type(callback).__name__ for callback in self.trainer.callbacks]])

    def configure_optimizers(self):
        return super().configure_optimizers() if self.optimizer else None


class Counts(L.Callback):
    def __init__(self):
        self.count = 0

    def on_train_batch_end(self, *args, **kwargs):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def restores(where):
    path = FOLDER / where / "restored.ckpt"
    module = fit(where, Restored, callbacks=[Counts()], save=path)
    seen = [module.hooks[0][1:]]
    trained = sum(p.detach().sum().item() for p in module.parameters() if not p.is_meta)
    again = fit(where, Restored, callbacks=[Counts()], ckpt_path=path, max_epochs=2)
    assert abs(again.hooks[0][0] - trained) < 1e-6, (again.hooks[0], trained)
    seen += [again.hooks[0][1:], again.loads, len(again.hooks), sorted(module.kept), again.given]
    without = fit(where, partial(Restored, optimizer=False), save=path)
    again = fit(where, partial(Restored, optimizer=False), ckpt_path=path, max_epochs=2)
    return [*seen, len(without.hooks), len(again.hooks), again.loads]


class RunsOutOfMemory(Skips):
    """Where the first layer is."""

    def __init__(self):
        super().__init__()
        self.batch_size = 2
        self.layers[0].register_forward_hook(self.fail)

    def fail(self, layer, args, output):
        if self.batch_size > 4 and not self.layers[0][0].weight.is_meta:
            raise RuntimeError("CUDA out of memory. Tried to allocate a lot.")

    def train_dataloader(self):
        return DataLoader(TensorDataset(DATA), batch_size=self.batch_size)

    val_dataloader = train_dataloader

    def training_step(self, batch, batch_idx):
        return self.loss(batch[0])


class RunsOutInAHook(RunsOutOfMemory):
    """On one rank alone, as where its optimizer makes its states."""

    def fail(self, layer, args, output):
        pass

    def on_before_optimizer_step(self, optimizer):
        if self.batch_size > 4 and self.trainer.global_rank == self.trainer.world_size - 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate a lot.")


def scales(where):
    return [scale(where, RunsOutOfMemory()), scale(where, RunsOutInAHook())]


def scale(where, module):
    chosen = {} if where == "plain" else {"strategy_options": {"num_microbatches": None}}
    trainer, _ = trainer_of(where, max_epochs=1, limit_val_batches=0, **chosen)
    found = Tuner(trainer).scale_batch_size(module, init_val=2, max_trials=4, steps_per_trial=1)
    trainer.fit(module)
    if where == "two":  # and not the two of the first trial
        assert trainer.strategy.instruction_source.schedule.num_microbatches == found == 4
    return found


HOOKS = (
    *(name for name in dir(L.LightningModule) if name.startswith(("on_", "optimizer_")) and name != "on_gpu"),
    *("configure_model", "configure_optimizers", "configure_callbacks", "configure_gradient_clipping"),
    *("setup", "teardown", "backward", "lr_scheduler_step", "transfer_batch_to_device"),
    *("training_step", "validation_step", "test_step", "predict_step"),
)
DATA_HOOKS = (
    *("prepare_data", "setup", "teardown", "train_dataloader", "val_dataloader", "test_dataloader"),
    *("predict_dataloader", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
    *("state_dict", "load_state_dict", "on_exception"),
)
CALLBACK_HOOKS = (*(name for name in dir(L.Callback) if name.startswith("on_")), "setup", "teardown", "state_dict")


def noting(base, names, prefix):
    """A subclass that notes when its hooks are called."""

    def noted(name):
        def hook(self, *args, **kwargs):
            self.called.append(prefix + name)
            return getattr(super(cls, self), name)(*args, **kwargs)

        return hook

    cls = type(f"Noting{base.__name__}", (base,), {name: noted(name) for name in names})
    return cls


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(DATA), batch_size=6)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def state_dict(self):
        return {"seen": len(self.called)}


class Quiet(Module):
    def training_step(self, batch, batch_idx):
        return self.loss(batch[0])

    fails = False

    def validation_step(self, batch, batch_idx):
        return self.loss(batch[0])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.fails and batch_idx == 2:
            raise ValueError("the user's own mistake")

    on_after_backward = on_train_epoch_end = on_validation_epoch_end = lambda self: None

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        pass

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]


def hooks(where):
    path = FOLDER / where / "hooks.ckpt"
    called = []
    options = {
        "num_sanity_val_steps": 1,
        "gradient_clip_val": 1.0,
        "accumulate_grad_batches": 2,
        "limit_val_batches": 2,
    }
    for resumed in (False, True):
        L.seed_everything(3, verbose=False)
        module, callback = noting(Quiet, HOOKS, "")(), noting(L.Callback, CALLBACK_HOOKS, "callback.")()
        data = noting(Data, DATA_HOOKS, "data.")()
        module.called = callback.called = data.called = []
        trainer, _ = trainer_of(where, [callback], max_epochs=2 if resumed else 1, **options)
        trainer.fit(module, data, ckpt_path=path if resumed else None)
        if not resumed:
            trainer.save_checkpoint(path)
        trainer.validate(module, data, verbose=False)
        trainer.test(module, data, verbose=False)
        trainer.predict(module, data)
        called.append(module.called)
    module.called = callback.called = data.called = []
    module.fails, trainer.fit_loop.max_epochs = True, 3
    try:
        trainer.fit(module, data)
    except ValueError:
        called.append(module.called)
    return called


class Unhooked(Module):
    """Nobody looks at what its steps return, but those to whom hooks are given."""

    on_train_batch_end = L.LightningModule.on_train_batch_end
    on_validation_batch_end = L.LightningModule.on_validation_batch_end


def given_hooks(where):
    seen = []
    L.seed_everything(3, verbose=False)
    given = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, *_: seen.append(plain(outputs)))
    callback = L.Callback()
    ordinary = callback.on_validation_batch_end
    callback.on_validation_batch_end = wraps(ordinary)(lambda *args: (seen.append(plain(args[2])), ordinary(*args)))
    loader = DataLoader(TensorDataset(DATA), batch_size=6)
    trainer, _ = trainer_of(where, [given, callback], max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(Unhooked(), loader, loader)
    return seen


class Flops(ThroughputMonitor):
    """Knows what devices can do; on one device all that is said is of the device."""

    def setup(self, trainer, module, stage):
        with mock.patch("lightning.pytorch.callbacks.throughput_monitor.get_available_flops", return_value=100):
            super().setup(trainer, module, stage)


def throughput(where):
    """A pipeline says of itself what one device says, and its devices can do as much together."""
    L.seed_everything(3, verbose=False)
    monitor = Flops(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    module = Skips()
    module.flops_per_batch = 10
    trainer, logger = trainer_of(where, [monitor], max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0)
    trainer.fit(module, DataLoader(TensorDataset(DATA), batch_size=6))
    said = [call[1] for call in logger.calls if call[0] == "log_metrics" and "train/device/mfu" in call[1]]
    ratios = [each["train/device/flops_per_sec"] / each["train/device/mfu"] for each in said]
    return [[sorted(each) for each in said], [round(ratio, 3) for ratio in ratios]]


def evaluates_checkpoints(where):
    """Of weights that were trained, in a module that has others; what was trained on one device too."""
    path = FOLDER / where / "trained.ckpt"
    fit(where, Skips, save=path)
    seen = []
    for source in (path, FOLDER / "plain" / "trained.ckpt"):
        L.seed_everything(5, verbose=False)
        loader, module, writer = DataLoader(TensorDataset(DATA), batch_size=6), Module(), Writer()
        trainer, _ = trainer_of(where, [writer])
        seen += trainer.validate(module, loader, ckpt_path=source, verbose=False)
        seen += trainer.test(module, loader, ckpt_path=source, verbose=False)
        predictions = trainer.predict(module, loader, ckpt_path=source)
        seen += [plain(predictions[0]), module.hooks]
    return seen


def saves_state_dicts(where):
    """A rank of a pipeline has placeholders, and does not write them; a state dict of all does."""
    found = []

    class Saves(Skips):
        def on_train_end(self):
            found.append(attempt(self))

    def attempt(module):
        try:
            torch.save({"model": module.state_dict()}, io.BytesIO())
            torch.save(module.layers.state_dict(), io.BytesIO())
        except PfoError as error:
            return [type(error).__name__, str(error)]
        return "written"

    module = fit(where, Saves)
    found.append(attempt(module))
    return found


class Splits(Quiet):
    """Makes its loader with random numbers."""

    def train_dataloader(self):
        return DataLoader(TensorDataset(DATA[torch.randperm(len(DATA))]), batch_size=6)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.hooks.append([plain(batch[0].sum()), plain(outputs["loss"])])


def splits(where):
    L.seed_everything(3, verbose=False)
    trainer, _ = trainer_of(where, max_epochs=1, limit_val_batches=0)
    trainer.fit(module := Splits())
    return module.hooks


class Plain(Quiet):
    """Its batches have no samples."""

    def predict_step(self, batch, batch_idx):
        return self.loss(DATA[batch["index"]])

    validation_step = test_step = predict_step


def without_samples(where):
    trainer, _ = trainer_of(where)
    L.seed_everything(3, verbose=False)
    batches, module = DataLoader([{"index": 0}, {"index": 1}], batch_size=None), Plain()
    trainer.validate(module, batches, verbose=False)
    return [plain(trainer.predict(module, batches)), module.hooks[:2]]


class OfClass(Skips):
    """Keeps what it has seen in its class, prints to another stream, and returns a mapping of what nobody can send."""

    of_all = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        self.of_all.append(loss)
        self.print("to stderr", file=sys.stderr)
        return UserDict(loss=loss, function=(lambda: batch_idx) if self.trainer.world_size == 1 else None)

    def print(self, *texts, file):
        self.hooks.append([*texts, file is sys.stderr])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.hooks.append([plain(self.of_all), outputs["function"] is not None or self.trainer.world_size > 1])


def of_class(where):
    OfClass.of_all.clear()
    return fit(where, OfClass).hooks


def after_fit(where):
    """Module and Trainer can be copied and sent to other processes, and no thread is left but the watch of ranks."""
    module = fit(where, Skips)
    trainer = module.trainer
    threads = {thread.name for thread in threading.enumerate()} - {"MainThread", "pfo-rank-watch"}
    copied = pickle.loads(pickle.dumps(module))
    trainer_of_copy = pickle.loads(pickle.dumps(trainer))
    same = [
        bool((a == b).all()) for a, b in zip(copied.parameters(), module.parameters(), strict=True) if not a.is_meta
    ]
    trainer_of_copy.fit_loop.max_epochs = 2
    trainer_of_copy.fit(copied, DataLoader(TensorDataset(DATA), batch_size=6))
    return [sorted(threads), all(same), trainer_of_copy.current_epoch, copied.hooks[-1]]


def saved_before(where):
    """Without any run, as users turn weights into a checkpoint."""
    L.seed_everything(3, verbose=False)
    trainer, _ = trainer_of(where)
    trainer.strategy.connect(Skips())
    trainer.save_checkpoint(path := FOLDER / f"{where}_before.ckpt")
    state = torch.load(path, weights_only=True)
    return [sorted(state), [value.sum().item() for value in state["state_dict"].values()]]


class Saves(Skips):
    """Saves a checkpoint in its steps, and asks there for what needs all ranks."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        if batch_idx == 1:
            self.trainer.save_checkpoint(FOLDER / f"{self.where}_in_step.ckpt")
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        if batch_idx == 0:
            self.trainer.save_checkpoint(FOLDER / f"{self.where}_in_validation.ckpt", weights_only=True)
        return loss

    def test_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        self.trainer.strategy.lightning_module_state_dict()
        return loss

    def on_validation_epoch_end(self):
        """Nothing was kept."""

    on_test_epoch_end = on_validation_epoch_end


def saves_in_steps(where):
    L.seed_everything(3, verbose=False)
    module = Saves()
    module.where = where
    trainer, _ = trainer_of(where, max_epochs=1)
    loader = DataLoader(TensorDataset(DATA), batch_size=6)
    trainer.fit(module, loader, loader)
    found = []
    for name in ("step", "validation"):
        saved = torch.load(FOLDER / f"{where}_in_{name}.ckpt", weights_only=True)
        weights = [value.double().sum().item() for value in saved["state_dict"].values()]
        found.append([saved["epoch"], saved["global_step"], sorted(saved.keys() - {"pfo_pipeline"}), weights])
    try:
        trainer.test(module, loader, verbose=False)
        found.append("has come to an end")
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


class Inverted(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x):
        a, b = x.chunk(2, 1)
        return torch.cat([b - self.net(a), a], 1)

    def inverse(self, x):
        a, b = x.chunk(2, 1)
        return torch.cat([b, a + self.net(b)], 1)


class Flow(Skips):
    """Its layers run backward in training, where parts of them are divided, and forward in a prediction after it."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Inverted() for _ in range(6)), nn.Identity()

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in reversed(self.layers):
            x = layer.inverse(x)
        return x.square().mean()

    def predict_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return x


def predicts_forward(where):
    module = fit(where, Flow)
    return plain(torch.cat(module.trainer.predict(module, DataLoader(TensorDataset(DATA), batch_size=6))))


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.layers[0])

    def finetune_function(self, module, epoch, optimizer):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            self.unfreeze_and_add_param_group(module.layers[0], optimizer)
        module.hooks.append(["Did you init your optimizer" in str(warning.message) for warning in found])


def unfreezes(where):
    return fit(where, Skips, callbacks=[Unfreezes()]).hooks


class Normed(Skips):
    def __init__(self):
        super().__init__()
        self.layers[1].append(nn.BatchNorm1d(4))


def whole(where):
    """What needs the whole module runs where one rank has it."""
    pruned = fit(where, Skips, callbacks=[ModelPruning("l1_unstructured", amount=0.5, apply_pruning=True)])
    averaged = fit(
        where, Normed, callbacks=[StochasticWeightAveraging(0.05, swa_epoch_start=1)], max_epochs=3, num_microbatches=1
    )
    tensors = [*pruned.state_dict().values(), *averaged.state_dict().values()]
    return [[tensor.double().sum().item(), int((tensor == 0).sum())] for tensor in tensors]


class Totals(L.LightningModule):
    """Writes into what a hook has made, which in inference mode could be written into nowhere else."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

    def on_validation_epoch_start(self):
        self.total = torch.zeros(())

    def validation_step(self, batch, batch_idx):
        batch[0].mul_(2)
        output = self.layers(batch[0])
        self.total += output.sum()
        self.log("loss", output.square().mean(), batch_size=len(output))

    def predict_step(self, batch, batch_idx):
        return self.layers(batch[0])


def evaluates_on_gpus(where):
    """Lightning evaluates in inference mode where the backend is not gloo."""
    L.seed_everything(3, verbose=False)
    module, loader = Totals(), DataLoader(TensorDataset(DATA), batch_size=6)
    told = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_backend=lambda *_: "nccl")
    before, lightning_loops.dist = lightning_loops.dist, told
    try:
        metrics = trainer_of(where)[0].validate(module, loader, verbose=False)
        predictions = trainer_of(where)[0].predict(module, loader)
    finally:
        lightning_loops.dist = before
    return [metrics, float(module.total), plain(torch.cat(predictions))]


class WithoutLayers(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.outs = []

    def training_step(self, batch, batch_idx):
        return (batch[0] @ self.weight - 1).square().mean()

    def validation_step(self, batch, batch_idx):
        self.outs.append(plain(batch[0].sum()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithoutParameters(L.LightningModule):
    def predict_step(self, batch, batch_idx):
        return batch[0].sum(1)


def without_layers(where):
    """One rank runs a baseline too: a parameter alone, or nothing to learn at all."""
    loader = DataLoader(TensorDataset(DATA), batch_size=6)
    learns = WithoutLayers()
    trainer_of(where, max_epochs=1)[0].fit(learns, loader, loader)
    predictions = trainer_of(where)[0].predict(WithoutParameters(), loader)
    return [plain(learns.weight.detach()), learns.outs, plain(torch.cat(predictions))]


def fit(where, make, callbacks=(), save=None, ckpt_path=None, max_epochs=1, **strategy_options):
    L.seed_everything(3, verbose=False)
    module = make()
    options = {"max_epochs": max_epochs, "limit_val_batches": 0, "strategy_options": strategy_options}
    trainer, _ = trainer_of(where, callbacks, **options)
    trainer.fit(module, DataLoader(TensorDataset(DATA), batch_size=6), ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    return module


PARTS = {
    "first": (train, handles, predict, noise, in_steps, skips, stops, hooks, errors),
    "further": (
        *(fetches, restores, scales, saves_nowhere, evaluates_checkpoints, saves_state_dicts, saves_watched),
        *(returns_no_loss, given_hooks, throughput, splits, without_samples, saved_before, of_class, after_fit),
        *(unfreezes, evaluates_on_gpus, predicts_forward, saves_in_steps),
    ),
}
ON_ONE_RANK = {"first": (), "further": (whole, without_layers)}
ON_TWO_RANKS = {"first": (fails_in_the_trace, predict_rank0, predict_none), "further": ()}


def one(where, which):
    parts = (*PARTS[which], *(ON_TWO_RANKS if where == "two" else ON_ONE_RANK)[which])
    results = {part.__name__: part(where) for part in parts}
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    (FOLDER / f"{where}_{rank}.json").write_text(json.dumps(results))


for place in ("plain", "one", "two"):
    run_ranks(one, 2 if place == "two" else 1, place, sys.argv[2])
