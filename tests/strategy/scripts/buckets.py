"""Gradients of replicas are averaged in buckets while the pipeline goes on; sums of microbatches can be precise."""

import os
import weakref
from contextlib import nullcontext

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.core.events import InstructionListener
from lightning_pfo.loops import PipelinedModel
from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.parallel.buckets import ReplicaMeans
from lightning_pfo.strategy.parallel.groups import tell_each_other
from lightning_pfo.strategy.step.gradients import StepGradients
from tests.quiet import QUIET
from tests.ranks import run_ranks

NUM_MICROBATCHES, MICROBATCH, WIDTH = 4, 2, 6


class Net(nn.Module):
    """Some layers; one of no use to a few batches, and one of use to none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8))
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Parameter(torch.ones(3))
        self.layers[2].to(memory_format=torch.channels_last)

    def forward(self, x, flag):
        for layer in self.layers:
            x = layer(x)
        return self.rare(x) if flag[0] else x


def loss_fn(outputs, target):
    return nn.functional.mse_loss(outputs, target)


def batch_of(replica):
    generator = torch.Generator().manual_seed(replica)
    x, y = torch.randn(2, NUM_MICROBATCHES * MICROBATCH, WIDTH, generator=generator)
    return x, torch.full((len(x),), replica == 1), y


class Order(InstructionListener):
    """What one rank does, in order."""

    def __init__(self):
        self.done = []

    def on_instruction_end(self, event):
        self.done.append(str(event.instruction))


def replicas(schedule):
    model = PipelinedModel(
        Net(), loss_fn, num_microbatches=NUM_MICROBATCHES, schedule=schedule, data_parallel_size=2, check_loss=False
    )
    order, all_reduce = Order(), dist.all_reduce
    model.instruction_source.add_listener(order)

    def noting(tensor, *args, **kwargs):
        if kwargs.get("group") is model.replica_group and tensor.is_floating_point():
            order.done.append(f"reduce {tensor.numel()}")
            assert kwargs["async_op"], "the pipeline would wait for replicas"
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = noting
    try:
        for _ in range(2):  # the second is added to the first
            model.step(*batch_of(model.replica))
    finally:
        dist.all_reduce = all_reduce
    for parameter, expected in zip(model.module.parameters(), one_device(), strict=True):
        if not parameter.is_meta:
            assert (parameter.grad is None) == (expected is None)
            if expected is not None:
                torch.testing.assert_close(parameter.grad, 2 * expected)
    own, half = sorted(model.instruction_source.stages), len(order.done) // 2
    assert order.done[:half] == order.done[half:]
    reduced = [position for position, what in enumerate(order.done[:half]) if what.startswith("reduce")]
    assert len(reduced) == len(own)
    for stage, position in zip(reversed(own), reduced, strict=True):
        backwards = [what.startswith((f"{stage}B", f"{stage}W")) for what in order.done[:half]]
        assert position > max(i for i, is_backward in enumerate(backwards) if is_backward)
    assert reduced[0] < half - 2  # instructions of another stage follow


def one_device():
    net = Net()
    sum(loss_fn(net(x, flag), y) for x, flag, y in map(batch_of, range(2))).div(2).backward()
    return [parameter.grad for parameter in net.parameters()]


class Tied(nn.Module):
    """An embedding with sparse gradients that first and last layers use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, WIDTH, sparse=True)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, tokens):
        return self.layers(self.embedding(tokens)) - self.embedding(tokens + 1)


def sparse():
    """Optimizers of sparse gradients take no others: two steps on stages, and on replicas of fewer."""
    tokens, target = torch.arange(8)[:, None], torch.ones(8, 1, WIDTH)
    net = Tied()
    optimizer = torch.optim.SparseAdam(net.embedding.parameters(), lr=0.1)
    for _ in range(2):
        loss_fn(net(tokens), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    for num_replicas in (1, 2):
        split = Tied()
        options = {"data_parallel_size": num_replicas, "example_batch": (tokens, target)}
        model = PipelinedModel(split, loss_fn, num_microbatches=4, check_loss=False, **options)
        optimizer = torch.optim.SparseAdam(split.embedding.parameters(), lr=0.1)
        if num_replicas == 1:  # what is tied is reduced among those that use it
            found = [sorted(each.ranks) for each in model._pipeline.shared if each.names]
            is_user = dist.get_rank() in (0, 3)
            assert found == ([[0, 3]] if is_user else []), found
            assert split.embedding.weight.is_meta != is_user
        for _ in range(2):
            model.step(*(each.tensor_split(num_replicas)[model.replica] for each in (tokens, target)))
            if not split.embedding.weight.is_meta:
                assert split.embedding.weight.grad.is_sparse
                optimizer.step()
            model.zero_grad()
        if not split.embedding.weight.is_meta:
            torch.testing.assert_close(split.embedding.weight, net.embedding.weight)
        model.release()


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x + torch.randn_like(x)
        return x


def noise():
    """Each batch of an evaluation has noise of its own, the same on all ranks."""
    model = PipelinedModel(Noisy(), loss_fn, num_microbatches=4, check_loss=False).eval()
    found = [model.predict(torch.ones(4, WIDTH)) for _ in range(2)]
    assert not torch.allclose(*found)
    assert len({tuple(each.flatten().tolist()) for each in tell_each_other(found[1], None)}) == 1
    model.release()


def fails_in_the_middle():
    """What goes wrong on one rank while gradients are reduced is raised on all: nobody waits for its transfers."""
    model = PipelinedModel(Net(), loss_fn, num_microbatches=4, check_loss=False)
    after_backward = StepGradients.after_backward

    def fail(*args):
        raise MemoryError("no place for a bucket")

    if dist.get_rank() == 1:
        StepGradients.after_backward = fail
    try:
        with pytest.raises(MemoryError, match="no place"):
            model.step(*batch_of(0))
    finally:
        StepGradients.after_backward = after_backward
    model.release()


def check():
    for schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
        replicas(schedule)
    buckets()
    sparse()
    noise()
    fails_in_the_middle()


def buckets():
    """One gradient at a time is let go of; the means need no second copy of all."""
    group = dist.group.WORLD
    weights = [nn.Parameter(torch.zeros(5, 2)) for _ in range(6)]
    weights[3] = nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))
    gradients = {p: (p.detach() + dist.get_rank()).contiguous() for p in weights[:5]}
    gone = [weakref.ref(gradient) for gradient in gradients.values()]
    alive, all_reduce = [], dist.all_reduce

    def noting(tensor, *args, **kwargs):
        alive.append(sum(each() is not None for each in gone))
        return all_reduce(tensor, *args, **kwargs)

    means = ReplicaMeans(group, group, bucket_bytes=2 * weights[0].nbytes)
    dist.all_reduce = noting
    try:
        means.start(weights, gradients)
        assert not gradients
        means.finish(gradients)
    finally:
        dist.all_reduce = all_reduce
    assert alive[::2] == [5, 3, 3, 2]  # a gradient that fills a bucket is one
    assert set(gradients) == set(weights[:5])
    for parameter, gradient in gradients.items():
        assert gradient.stride() == parameter.stride()
        assert torch.equal(gradient, torch.full_like(parameter, 1.5))


class Sums(L.LightningModule):
    """The gradients of later microbatches are so small beside the first one's that sums in 16 bits lose them."""

    def __init__(self, samples_of_replicas=()):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.samples_of_replicas, self.gradients = samples_of_replicas, []

    def train_dataloader(self):
        samples = self.samples_of_replicas[self.trainer.strategy.mesh.replica]
        return DataLoader(TensorDataset(torch.tensor([[sample, 0.0] for sample in samples])), batch_size=8)

    def training_step(self, batch, batch_idx):
        return (self.layers(batch[0]).sum(1) * batch[0][:, 0]).mean()

    def on_before_optimizer_step(self, optimizer):
        self.gradients = [parameter.grad.clone() for parameter in self.parameters() if not parameter.is_meta]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def sum_in_16_bits(samples_of_replicas, expected):
    """Without precise gradients, and with them."""
    num_replicas = len(samples_of_replicas)
    found = []
    for precise_gradients in (False, True):
        module = Sums(samples_of_replicas)
        options = {"num_microbatches": 8 // num_replicas, "check_loss": False, "data_parallel_size": num_replicas}
        strategy = PfoPipelineStrategy(precise_gradients=precise_gradients, **options)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2 * num_replicas,
            strategy=strategy,
            precision="bf16-true",
            max_epochs=1,
            use_distributed_sampler=False,
            **QUIET,
        )
        trainer.fit(module)
        found.append(module.gradients[1])
        assert all(gradient.dtype == torch.bfloat16 for gradient in module.gradients)
    if strategy.mesh.rank == 1:
        assert [gradient.tolist() for gradient in found] == [[each] * 2 for each in expected], found


class RunsOutOfMemory(Sums):
    """On one rank of one replica, with more than four samples."""

    def training_step(self, batch, batch_idx):
        if os.environ["RANK"] == "2" and len(batch[0]) > 2:
            raise MemoryError("too large")
        return self.layers(batch[0]).mean()


def error_of_a_replica():
    """It is everybody's; gradients that were under way are forgotten."""
    strategy = PfoPipelineStrategy(num_microbatches=2, data_parallel_size=2)
    trainer = L.Trainer(accelerator="cpu", devices=4, strategy=strategy, max_epochs=1, **QUIET)
    module = RunsOutOfMemory()
    for batch_size in (8, 4):
        loader = DataLoader(TensorDataset(torch.ones(32, 2)), batch_size=batch_size)
        with pytest.raises(MemoryError, match="too large") if batch_size > 4 else nullcontext():
            trainer.fit(module, loader)
    assert trainer.global_step == 4


run_ranks(check, 4)
run_ranks(error_of_a_replica, 4)
run_ranks(sum_in_16_bits, 2, [[512.0, *[1.0] * 7]], [64.0, 65.0])  # 519 / 8
# 129.4 of one replica and 0.2 of the other: it would be 64.5 if their mean were that of sums in 16 bits
run_ranks(sum_in_16_bits, 4, [[512.0, *[1.9] * 3], [0.2] * 4], [64.0, 65.0])
