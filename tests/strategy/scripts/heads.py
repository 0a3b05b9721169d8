"""Heads that are logged, and in the loss of some batches only; four ranks beside one device. Usage: heads.py FOLDER."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.compat.processes import OLDEST_FSDP
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
NEVER, LATER = {}, {1: range(2, 5)}
CASES = {
    # the batches in whose loss a head is; options of the strategy; of the training
    "never": (NEVER, {}, {"in_dict": True}),
    "later": (LATER, {}, {"accumulate_grad_batches": 2}),
    "not later": ({0: range(2), 2: range(1, 4)}, {}, {}),
    "split backwards": (LATER, {"schedule": "zbv", "num_microbatches": 8}, {}),
    "whole batch": (LATER, {"schedule": "gpipe", "loss_over": "batch"}, {}),
    "replicas": (LATER, {"data_parallel_size": 2}, {}),
    "changed in place": (NEVER, {}, {"in_place": True}),
    "cut later": (NEVER, {}, {"cut": (2, 3)}),
    "whole batch, more later": (NEVER, {"schedule": "gpipe", "loss_over": "batch"}, {"more": (2, 3)}),
}
if torch.__version__ >= OLDEST_FSDP["cpu"]:
    CASES["divided"] = (LATER, {"data_parallel_size": 2, "fully_shard": "zero2"}, {})


class Model(L.LightningModule):
    def __init__(self, counted, in_dict=False, in_place=False, cut=(), more=()):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(8))
        self.counted, self.in_dict, self.in_place = counted, in_dict, in_place
        self.cut, self.more = cut, more
        self.without = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        outputs = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            if layer is self.layers[-1] and batch_idx in self.cut:  # the last layers alone are trained
                x = x.detach()
            x = torch.tanh(layer(x))
            outputs.append(head(x))
        if self.in_place:  # the loss needs what is written into
            outputs[-1][:, :] += 0.1 * outputs[0]
        losses = [(output - y).square().mean() for output in outputs]
        for index, loss in enumerate(losses):
            self.log(f"loss_{index}", loss)
        loss = losses[-1] + sum(0.3 * losses[head] for head, when in self.counted.items() if batch_idx in when)
        if batch_idx in self.more:  # of the batch, by a value that other batches do not need
            loss = loss + 0.1 * x.std()
        return {"other": losses[0], "loss": loss} if self.in_dict else loss

    def on_before_optimizer_step(self, optimizer):
        held = {name: p for name, p in self.named_parameters() if not p.is_meta}
        self.without.append([name for name, parameter in held.items() if parameter.grad is None])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.3)


def train(counted, strategy=None, in_dict=False, in_place=False, cut=(), more=(), **options):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(40, 8, generator=generator), torch.randn(40, 1, generator=generator))
    module = Model(counted, in_dict, in_place, cut, more)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if strategy is None else dist.get_world_size(),
        strategy="auto" if strategy is None else PfoPipelineStrategy(**strategy),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # replicas read the same, so that their mean is one device's
        **options,
    )
    trainer.fit(module, DataLoader(data, batch_size=8))
    whole = module if strategy is None else trainer.strategy.gather_module()
    weights = {}
    if trainer.is_global_zero:
        weights = {name: parameter.detach().flatten().tolist() for name, parameter in whole.named_parameters()}
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    held = [name for name, parameter in module.named_parameters() if not parameter.is_meta]
    return {"weights": weights, "logged": logged, "without": module.without, "held": held}


def main():
    found = {}
    for name, (counted, strategy, options) in CASES.items():
        found[name] = train(counted, strategy, **options)
        if dist.get_rank() == 0:
            found[f"{name}, one device"] = train(counted, **options)
    (FOLDER / f"rank_{dist.get_rank()}.json").write_text(json.dumps(found))


run_ranks(main, 4)
