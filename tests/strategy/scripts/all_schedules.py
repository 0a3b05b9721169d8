"""Trains on one process, and with every schedule on 2; writes FOLDER/single.json and FOLDER/rank_N.json."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
from plain_module import PlainModule, make_loaders
from torch.distributed import distributed_c10d

from lightning_pfo.core.events import InstructionListener
from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.engine import channels
from tests.ranks import run_ranks

SCHEDULES = {
    "1f1b": None,
    "gpipe": None,
    "interleaved_1f1b": None,
    "interleaved_1f1b x 3": 3,
    "looped_bfs": None,
    "interleaved_zero_bubble": None,
    "zbv": None,
    "dualpipev": None,
    "envpipe": None,
    "envpipe:1,0": None,
    "file": None,
}
IN_CHANNELS = ("interleaved_1f1b x 3", "zbv")
"""Their transfers go through groups by direction, as with nccl."""


class Recorder(L.Callback, InstructionListener):
    def __init__(self):
        self.begun, self.ended = [], []

    def on_train_start(self, trainer, pl_module):
        self.source = trainer.strategy.instruction_source
        self.source.add_listener(self)

    def on_instruction_begin(self, event):
        self.begun.append(str(event.instruction))

    def on_instruction_end(self, event):
        self.ended.append(str(event.instruction))


def train(strategy, devices):
    L.seed_everything(3)
    module = PlainModule(num_layers=7)
    loader, val = make_loaders(num_samples=48, batch_size=12)
    recorder = Recorder()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=0.3,
        callbacks=[recorder] if devices > 1 else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, val)
    predictions = trainer.predict(module, val)
    seen = {**module.history, "predictions": torch.cat(predictions).flatten().tolist()}
    if devices > 1:
        schedule = recorder.source.schedule
        seen |= {
            "planned": [str(inst) for inst in schedule.orders[recorder.source.rank]],
            "begun": recorder.begun,
            "ended": recorder.ended,
            "num_stages": schedule.num_stages,
        }
    return seen


def single(folder):
    Path(folder, "single.json").write_text(json.dumps(train("auto", devices=1)))


def pipeline(folder):
    order = Path(folder, "order.txt")
    results = {}
    for name, stages_per_rank in SCHEDULES.items():
        schedule = f"file:{order}" if name == "file" else name.split()[0]
        num_microbatches = 4 if name != "file" else None  # the file has 2
        strategy = PfoPipelineStrategy(
            check_loss=False, num_microbatches=num_microbatches, schedule=schedule, stages_per_rank=stages_per_rank
        )
        channels.WITHOUT_QUEUES = frozenset() if name in IN_CHANNELS else frozenset({"gloo"})
        results[name] = train(strategy, devices=2)
        results[name]["num_groups"] = len(distributed_c10d._world.pg_map)
    rank = torch.distributed.get_rank()
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(results))


run_ranks(single, 1, sys.argv[1])
run_ranks(pipeline, 2, sys.argv[1])
