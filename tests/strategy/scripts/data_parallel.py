"""Trains with Lightning's DDP and with replicas of a pipeline; usage: data_parallel.py FOLDER."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from plain_module import PlainModule, make_loaders

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


def main(kind, folder):
    folder = Path(folder)
    if kind == "ddp":
        options = {"strategy": "ddp", "devices": 2}
    else:
        strategy = PfoPipelineStrategy(data_parallel_size=2, mesh_order=kind, num_microbatches=4)
        options = {"strategy": strategy, "devices": 4}
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
    (folder / f"{kind}_{replica}_{stage}.json").write_text(json.dumps(result))
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        state = torch.load(folder / f"{kind}.ckpt", weights_only=False)
        weights = {key: value.flatten().tolist() for key, value in state["state_dict"].items()}
        (folder / f"{kind}_weights.json").write_text(json.dumps(weights))


for kind, num_processes in (("ddp", 2), ("dp_pp", 4), ("pp_dp", 4)):
    run_ranks(main, num_processes, kind, sys.argv[1])
