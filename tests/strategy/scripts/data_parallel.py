"""Trains with Lightning's DDP and with replicas of a pipeline; usage: data_parallel.py FOLDER."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from plain_module import PlainModule, make_loaders
from torchmetrics import MeanMetric

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks


class Synchronised(PlainModule):
    def log(self, name, value, **kwargs):
        super().log(name, value, **{**kwargs, "sync_dist": True})


class Barriers(L.Callback):
    """Counts the barriers of training batches."""

    def __init__(self):
        self.number = 0

    def on_train_batch_start(self, *_):
        self.barrier = dist.barrier
        dist.barrier = self.count

    def on_train_batch_end(self, *_):
        dist.barrier = self.barrier

    def count(self, *args, **kwargs):
        self.number += 1
        self.barrier(*args, **kwargs)


class Collective(PlainModule):
    """Talks to the other replicas in steps and in hooks."""

    def __init__(self):
        super().__init__()
        self.metric, self.seen = MeanMetric(dist_sync_on_step=True), []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)[0]
        self.trainer.strategy.barrier()
        gathered = self.all_gather(loss.detach())
        self.metric(loss.detach(), weight=len(batch[0]))
        self.log("train_loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("most", loss, sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        self.log_dict({"alone": loss, "number": float(batch_idx)}, rank_zero_only=False)
        return {"loss": loss, "gathered": gathered.mean(), "reduced": self.trainer.strategy.reduce(loss.detach())}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.strategy.barrier("in a hook")
        values = [outputs["gathered"], outputs["reduced"], *self.all_gather({"loss": outputs["loss"]})["loss"]]
        decision = self.trainer.strategy.reduce_boolean_decision(batch_idx == 1, all=False)
        self.seen.append([*(value.tolist() for value in values), decision])
        self.log("hook", outputs["loss"], sync_dist=True, on_epoch=True)

    def on_train_epoch_end(self):
        self.seen.append(self.metric.compute().item())
        self.log("ended", self.seen[0][1], sync_dist=True)

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)[0]
        self.log("val_loss", loss, sync_dist=True)
        return self.all_gather(loss).mean()

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(outputs.tolist())


def options_of(kind, **strategy_options):
    if kind == "ddp":
        return {"strategy": "ddp", "devices": 2}
    strategy = PfoPipelineStrategy(data_parallel_size=2, mesh_order=kind, num_microbatches=4, **strategy_options)
    return {"strategy": strategy, "devices": 4}


def talk(kind):
    L.seed_everything(3)
    module, loaders = Collective(), make_loaders(num_samples=96, batch_size=16)
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, num_sanity_val_steps=0, **silent, **options_of(kind))
    trainer.fit(module, *loaders)
    return {"seen": module.seen, "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()}}


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.written = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.written.append([batch_idx, batch_indices, prediction.tolist()])

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.written.append(["epoch", batch_indices, [prediction.tolist() for prediction in predictions]])


def predict(kind, gather):
    """Of a number of samples that cannot be divided."""
    L.seed_everything(3)
    module, (_, loader), writer = PlainModule(), make_loaders(), Writer()
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = options_of(kind) if kind == "ddp" else options_of(kind, gather=gather)
    trainer = L.Trainer(accelerator="cpu", callbacks=[writer], **silent, **options)
    predictions = trainer.predict(module, loader)
    return {"predictions": [None if part is None else part.tolist() for part in predictions], "written": writer.written}


def main(kind, folder):
    folder = Path(folder)
    options = options_of(kind)
    strategy = options["strategy"]
    L.seed_everything(3)
    module = Synchronised(metrics=True)
    train, val = make_loaders(num_samples=96, batch_size=16)
    barriers = Barriers()
    trainer = L.Trainer(
        callbacks=[barriers],
        accelerator="cpu",
        max_epochs=2,
        gradient_clip_val=0.3,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, train, val)
    trainer.save_checkpoint(folder / f"{kind}.ckpt")
    result = {**module.history, "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()}}
    result["barriers"] = barriers.number
    replica = trainer.global_rank if kind == "ddp" else strategy.mesh.replica
    stage = 0 if kind == "ddp" else strategy.mesh.rank
    result["place"] = [trainer.global_rank, replica, stage]
    result["talked"] = talk(kind)
    result["predicted"] = {gather: predict(kind, gather) for gather in ("all", "rank0", "none")}
    (folder / f"{kind}_{replica}_{stage}.json").write_text(json.dumps(result))
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        state = torch.load(folder / f"{kind}.ckpt", weights_only=False)
        weights = {key: value.flatten().tolist() for key, value in state["state_dict"].items()}
        (folder / f"{kind}_weights.json").write_text(json.dumps(weights))


for kind, num_processes in (("ddp", 2), ("dp_pp", 4), ("pp_dp", 4)):
    run_ranks(main, num_processes, kind, sys.argv[1])
