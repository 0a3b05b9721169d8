"""Trains on batches of any size and weight, in three stages and in one process; prints what was compared."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.loops.plain import PipelinedModel
from tests.ranks import run_ranks


class WithLoss(nn.Module):
    """A model that computes its own loss."""

    def __init__(self, **options):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)), nn.Linear(6, 4))
        self.loss = nn.CrossEntropyLoss(**options)

    def forward(self, x, labels):
        return self.loss(self.layers(x).flatten(0, -2), labels.flatten())


def with_gaps(size, length=5):
    """Sequences with other numbers of labels; the first has none."""
    labels = torch.randint(0, 4, (size, length))
    for index in range(size):
        labels[index, : index % (length + 1)] = -100
    labels[0] = -100
    return torch.randn(size, length, 6), labels


def time_first(size):
    return torch.randn(5, size, 6), torch.randint(0, 4, (5, size))


def plain(size):
    return torch.randn(size, 6), torch.randint(0, 4, (size,))


def labels_of(microbatch):
    _, named = microbatch
    return (named["labels"] != -100).sum()


def halves(batch, num_microbatches):
    (), named = batch
    middle = (len(named["x"]) + 1) // 2
    return [((), {name: value[part] for name, value in named.items()}) for part in (slice(middle), slice(middle, None))]


CASES = {
    "samples": (plain, {}, {}, (8, 7, 4, 2, 1, 8)),
    "tokens": (with_gaps, {}, {"microbatch_weight": "tokens"}, (8, 7, 3)),
    "function": (with_gaps, {}, {"microbatch_weight": labels_of}, (8, 7, 3)),
    "sum": (plain, {"reduction": "sum"}, {"microbatch_weight": "sum"}, (8, 7, 2)),
    "time first": (time_first, {}, {"batch_dim": 1}, (8, 7, 2)),
    "split by the user": (plain, {}, {"split_batch": halves}, (8, 7)),
}


def main():
    for name, (make_batch, loss_options, options, sizes) in CASES.items():
        torch.manual_seed(0)
        net = WithLoss(**loss_options)
        single = copy.deepcopy(net)
        number = 2 if "split_batch" in options else 4
        schedule = "gpipe" if number < 3 else "1f1b"
        model = PipelinedModel(net, num_microbatches=number, schedule=schedule, **options)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, single)]
        for size in sizes:
            x, labels = make_batch(size)
            loss = model.step(x=x, labels=labels)
            expected = single(x, labels)
            expected.backward()
            torch.testing.assert_close(loss, expected.detach(), rtol=2e-5, atol=1e-6)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        x, labels = make_batch(7)
        torch.testing.assert_close(model(x=x, labels=labels), single(x, labels).detach(), rtol=2e-5, atol=1e-6)
        if dist.get_rank() == 0:
            print(name, flush=True)
        model.release()


run_ranks(main, 3)
