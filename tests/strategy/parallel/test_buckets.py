"""Gradients are averaged over replicas in buckets, while the pipeline goes on, and are those of one device."""

import weakref

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.core.events import InstructionListener
from lightning_pfo.loops import PipelinedModel
from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.parallel.buckets import ReplicaMeans
from lightning_pfo.strategy.parallel.reductions import hand_out
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


def check():
    for schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
        replicas(schedule)
    buckets()


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


def test_gradients_of_replicas_are_averaged_in_buckets_beside_the_pipeline():
    run_ranks(check, 4)


class Sums(L.LightningModule):
    """The gradients of later microbatches are so small beside the first one's that sums in 16 bits lose them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.gradients = []

    def training_step(self, batch, batch_idx):
        return (self.layers(batch[0]).sum(1) * batch[0][:, 0]).mean()

    def on_before_optimizer_step(self, optimizer):
        self.gradients = [parameter.grad.clone() for parameter in self.parameters() if not parameter.is_meta]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def sum_in_16_bits():
    found = []
    for precise_gradients in (False, True):
        module = Sums()
        strategy = PfoPipelineStrategy(num_microbatches=8, check_loss=False, precise_gradients=precise_gradients)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            precision="bf16-true",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        x = torch.tensor([[512.0, 0.0], *[[1.0, 0.0]] * 7])
        trainer.fit(module, DataLoader(TensorDataset(x), batch_size=8))
        found.append(module.gradients[1])
        assert all(gradient.dtype == torch.bfloat16 for gradient in module.gradients)
    if strategy.mesh.rank == 1:
        assert [gradient.tolist() for gradient in found] == [[64.0, 64.0], [65.0, 65.0]]  # 519 / 8


def test_sums_of_microbatches_can_be_precise():
    run_ranks(sum_in_16_bits, 2)


def test_sums_in_32_bits_are_let_go_of_as_those_in_16_are_handed_out():
    weights = [nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for _ in range(4)]
    weights[0].grad = torch.ones(3, dtype=torch.bfloat16)
    gradients = {weight: torch.full((3,), 2.0) for weight in weights}
    sums, alive = [weakref.ref(gradient) for gradient in gradients.values()], []

    class Watched(dict):
        def popitem(self):
            alive.append((sum(each() is not None for each in sums), sum(w.grad is not None for w in weights[1:])))
            return super().popitem()

    watched = Watched(gradients)
    gradients.clear()
    hand_out(watched)
    # beside those that are handed out, and the one that was last
    assert [of_sums + handed_out for of_sums, handed_out in alive] == [4, 5, 5, 5]
    assert [weight.grad.tolist() for weight in weights] == [[3.0] * 3] + [[2.0] * 3] * 3
