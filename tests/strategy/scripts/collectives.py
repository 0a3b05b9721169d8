"""Steps that call torch.distributed by themselves, as published ones do. Usage: collectives.py FOLDER"""

import json
import sys
from functools import partial
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.nn
from accelerate import PartialState
from accelerate.utils import gather, reduce
from torch import nn
from torch.distributed import all_gather, get_rank
from torch.distributed.nn import all_reduce as sum_with_gradients
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.quiet import QUIET
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])


class Gathers(torch.autograd.Function):
    """Rows of all processes, whose gradients are added up in backward, as in published contrastive losses."""

    @staticmethod
    def forward(ctx, x):
        rows = [torch.zeros_like(x) for _ in range(dist.get_world_size())] if dist.is_initialized() else [x.clone()]
        if dist.is_initialized():
            all_gather(rows, x)
        return tuple(rows)

    @staticmethod
    def backward(ctx, *gradients):
        stacked = torch.stack(gradients)
        if not dist.is_initialized():
            return stacked[0]
        dist.all_reduce(stacked)
        return stacked[get_rank()]


class Module(L.LightningModule):
    """Averages a centre over all processes, if there are several."""

    def __init__(self, gathers):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        self.register_buffer("center", torch.zeros(6))
        self.gathers, self.seen = gathers, []
        self.sum_over_all = partial(dist.all_reduce, op=dist.ReduceOp.SUM)

    def mean_of_all(self, value):
        if not (dist.is_available() and dist.is_initialized()):
            return value
        number = dist.get_world_size()
        if self.gathers == "kept":  # as codebooks of vector-quantize-pytorch do
            self.sum_over_all(value)
            return value / number
        if self.gathers == "Accelerate's":  # as losses of transformers count boxes
            assert PartialState().num_processes == number
            rows = gather(value[None])
            assert rows.shape == (number, len(value))
            return (reduce(value) + reduce(value, "sum") / number + rows.mean(0)) / 3
        if self.gathers == "refused":
            dist.reduce_scatter_tensor(torch.zeros(1), value)
        if self.gathers == "with gradients":
            summed = sum_with_gradients(value.clone())
            return (summed + sum(torch.distributed.nn.functional.all_gather(value))) / (2 * number)
        if self.gathers:
            values = [torch.zeros_like(value) for _ in range(number)]
            dist.all_gather(values, value)
            objects = [None] * number
            dist.all_gather_object(objects, number)
            assert objects == [number] * number
            if number == 1:  # not all of torch's gloo can do more
                rows = torch.zeros(1, len(value))
                dist.all_gather_into_tensor(rows, value)
                values = [rows[0]]
            return sum(values) / number
        work = dist.all_reduce(value, async_op=True)
        work.wait()
        dist.barrier()
        dist.broadcast(value, src=0)
        return value / number

    def training_step(self, batch, batch_idx):
        output = self.net(batch[0])
        loss = (output - self.center).square().mean()
        if self.gathers == "backward":  # rows of replicas are the same, and so are the gradients of their means
            loss = (torch.stack(Gathers.apply(output)) - self.center).square().mean()
        with torch.no_grad():
            self.center = 0.9 * self.center + 0.1 * self.mean_of_all(output.mean(0))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append([float(outputs["loss"]), *self.center.tolist()])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train(gathers, **strategy):
    module = Module(gathers)
    data = DataLoader(TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(1))), 8)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if strategy else 1,
        strategy=PfoPipelineStrategy(schedule="gpipe", loss_over="batch", **strategy) if strategy else "auto",
        max_epochs=1,
        **QUIET,
        use_distributed_sampler=False,  # replicas read the same, so that their mean is one device's
    )
    try:
        trainer.fit(module, data)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return module.seen


class Contrasts(L.LightningModule):
    """Tells rows from those of all processes, in the middle too, where it counts on one of them what it does once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.said = []

    def training_step(self, batch, batch_idx):
        number = get_rank() if dist.is_initialized() else 0
        assert not dist.is_initialized() or 0 <= number < dist.get_world_size()
        first = self.net[1](self.net[0](batch[0]))
        loss = nn.functional.cross_entropy(first, (batch[0][:, 0] > 0).long() + number)
        output = nn.functional.normalize(self.net[3](self.net[2](first)))
        if number == 0:
            self.said.append(float(output.detach().mean()))
        own = torch.arange(len(output)) + self.global_rank * len(output)
        return loss + nn.functional.cross_entropy(output @ torch.cat(Gathers.apply(output)).T / 0.2, own)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def contrast(strategy, devices=1):
    module = Contrasts()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        **QUIET,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(1))), 8))
    said = len(module.said)
    if devices == 4:
        module = trainer.strategy.gather_module()
    return [said, None if module is None else [p.detach().flatten().tolist() for p in module.parameters()]]


class Classifies(L.LightningModule):
    """Meets the other replicas in each step; of some batches one replica finds that their labels may tell something."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 3))
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        everyone = self.all_gather(loss.detach())
        dist.all_reduce(everyone)
        self.trainer.strategy.barrier()
        return {"loss": loss, "everyone": everyone}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(outputs["everyone"].tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def classify(strategy, devices):
    module, draws = Classifies(), torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 8, generator=draws), torch.randint(0, 3, (32,), generator=draws))
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, **QUIET)
    trainer.fit(module, DataLoader(data, 4))
    return module.seen


def main():
    found = {}
    if not dist.is_initialized():
        found = {"one device": train(gathers=False), "contrasts": contrast("auto")}
    elif dist.get_world_size() == 2:
        found = {"contrasts": contrast("ddp", 2), "classifies": classify("ddp", 2)}
    else:
        for number in (1, 2):
            strategy = PfoPipelineStrategy(schedule="gpipe", loss_over="batch", data_parallel_size=number)
            found[f"contrasts, {number}"] = contrast(strategy, 4)
        PartialState(cpu=True)
        for gathers in (False, True, "with gradients", "backward", "kept", "Accelerate's"):
            found[f"one pipeline, {gathers}"] = train(gathers, num_microbatches=4)
            found[f"replicas, {gathers}"] = train(gathers, num_microbatches=4, data_parallel_size=2)
        found["classifies"] = classify(PfoPipelineStrategy(num_microbatches=4, data_parallel_size=2), 4)
        found["refused"] = train("refused", num_microbatches=4)
        assert PartialState().num_processes == 4
    name = f"rank_{dist.get_rank()}" if dist.is_initialized() else "one_device"
    name = f"ddp_{name}" if "contrasts" in found and dist.is_initialized() else name
    (FOLDER / f"{name}.json").write_text(json.dumps(found))


run_ranks(main, 1)
run_ranks(main, 2)
run_ranks(main, 4)
