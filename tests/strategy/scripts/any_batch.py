"""Trains on batches of any size and weight, in three stages and in one process; prints what was compared."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

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


class TwoViews(nn.Module):
    """In-batch negatives: two views in one call of the layers, each against all of the other."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)), nn.Linear(6, 4))
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x, labels):
        first, second = nn.functional.normalize(self.layers(torch.cat([x, x.flip(1) + 1])), dim=1).chunk(2)
        similarities = first @ second.T / self.temperature
        return nn.functional.cross_entropy(similarities, torch.arange(len(x)))


class Correlations(nn.Module):
    """The layers see time first, in one dimension with samples; the loss has parameters and sees all samples."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)), nn.Linear(6, 4))
        self.loss = Whitened()

    def forward(self, x, labels):
        hidden = self.layers(x.transpose(0, 1).flatten(0, 1))
        return self.loss(hidden.unflatten(0, (5, -1)).mean(0)) + hidden.std()


class Whitened(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, hidden):
        centred = (hidden - hidden.mean(0)) * self.scale
        return (centred.T @ centred / len(hidden) - torch.eye(4)).square().sum()


class Queue(nn.Module):
    """Momentum contrast: the end of the step fills a queue from where a buffer points, which moves on."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)), nn.Linear(6, 4))
        self.key = nn.Linear(6, 4)
        self.register_buffer("queue", nn.functional.normalize(torch.randn(4, 16), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x, labels):
        query = nn.functional.normalize(self.layers(x), dim=1)
        with torch.no_grad():
            key = nn.functional.normalize(self.key(x), dim=1)
        positive, negative = (query * key).sum(1, keepdim=True), query @ self.queue.clone()
        loss = nn.functional.cross_entropy(torch.cat([positive, negative], 1) / 0.2, torch.zeros_like(labels))
        if self.training:
            places = (int(self.pointer) + torch.arange(len(x))) % 16
            self.queue[:, places] = key.T
            self.pointer[0] = (int(self.pointer) + len(x)) % 16
        return loss


def with_gaps(size, length=5):
    """Sequences with other numbers of labels; the first has none."""
    labels = torch.randint(0, 4, (size, length))
    for index in range(size):
        labels[index, : index % (length + 1)] = -100
    labels[0] = -100
    return torch.randn(size, length, 6), labels


def time_first(size):
    return torch.randn(5, size, 6), torch.randint(0, 4, (5, size))


def sequences(size):
    return torch.randn(size, 5, 6), torch.zeros(size)


def plain(size):
    return torch.randn(size, 6), torch.randint(0, 4, (size,))


def labels_of(microbatch):
    _, named = microbatch
    return (named["labels"] != -100).sum()


def halves(batch, num_microbatches):
    (), named = batch
    middle = (len(named["x"]) + 1) // 2
    return [((), {name: value[part] for name, value in named.items()}) for part in (slice(middle), slice(middle, None))]


WHOLE = {"loss_over": "batch", "schedule": "gpipe"}
FIRST = {"loss_over": "batch", "schedule": "looped_bfs"}
CASES = {
    "samples": (plain, {}, {}, (8, 7, 4, 2, 1, 8)),
    "found labels": (with_gaps, {}, {}, (8, 7, 3)),
    "tokens": (with_gaps, {}, {"microbatch_weight": "tokens"}, (8, 7, 3)),
    "function": (with_gaps, {}, {"microbatch_weight": labels_of}, (8, 7, 3)),
    "sum": (plain, {"reduction": "sum"}, {"microbatch_weight": "sum"}, (8, 7, 2)),
    "time first": (time_first, {}, {"batch_dim": 1}, (8, 7, 2)),
    "split by the user": (plain, {}, {"split_batch": halves}, (8, 7)),
    "whole, two views": (plain, TwoViews, WHOLE, (8, 7)),
    "whole, correlations": (sequences, Correlations, WHOLE, (8, 7)),
    "whole, queue": (plain, Queue, WHOLE, (8, 7, 4, 8)),
    "whole, weighted sum": (with_gaps, {"weight": torch.tensor([1.0, 3, 2, 0.5]), "reduction": "sum"}, FIRST, (8, 3)),
}


class Convolutions(nn.Module):
    """Batch norms in all stages: of images and rows, called twice, recomputed, without momentum."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3)),
            nn.Sequential(nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3, momentum=0.3)),
            nn.Sequential(nn.Flatten(), nn.Linear(27, 6), Twice()),
            Recomputed(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)),
            nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)),
        )
        self.last = nn.BatchNorm1d(4, affine=False)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.last(self.layers(x)), labels)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(self.norm(x).tanh() + x)


class Recomputed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def deferred(**options):
    """Running statistics are those of whole batches that are normalised by microbatches."""
    torch.manual_seed(0)
    net = Convolutions()
    single = copy.deepcopy(net)
    norms = {name: m for name, m in single.named_modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))}
    expected = copy.deepcopy(norms)
    seen = {}
    for name, module in norms.items():
        module.register_forward_pre_hook(lambda module, args, name=name: seen[name].append(args[0]))
    model = PipelinedModel(net, num_microbatches=3, batch_norm="deferred", check_loss=False, **options)
    for size in (8,) if options else (9, 8, 4, 5):
        number = min(3, size // 2)  # of a single sample nothing is normalised
        x, labels = torch.randn(size, 1, 5, 5), torch.randint(0, 4, (size,))
        loss = model.step(x=x, labels=labels)
        seen |= {name: [] for name in norms}
        parts = list(zip(x.tensor_split(number), labels.tensor_split(number), strict=True))
        with torch.no_grad():
            mean = sum(single(*part) * len(part[0]) / size for part in parts)
        if not options:
            torch.testing.assert_close(loss, mean)
        for name, module in expected.items():
            calls = len(seen[name]) // number
            for call in range(calls):
                module(torch.cat(seen[name][call::calls]))
    state = model.full_state_dict()
    for name, module in expected.items() if dist.get_rank() == 0 else ():
        for key, value in module.named_buffers():
            torch.testing.assert_close(state[f"{name}.{key}"], value, rtol=1e-5, atol=1e-6)
    model.release()


def main():
    for name, (make_batch, make, options, sizes) in CASES.items():
        torch.manual_seed(0)
        net = WithLoss(**make) if isinstance(make, dict) else make()
        single = copy.deepcopy(net)
        number = 2 if "split_batch" in options else 4
        options = {"schedule": "gpipe" if number < 3 else "1f1b", **options}
        model = PipelinedModel(net, num_microbatches=number, **options)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, single)]
        for size in sizes:
            x, labels = make_batch(size)
            loss = model.step(x=x, labels=labels)
            expected = single(x, labels)
            expected.backward()
            torch.testing.assert_close(loss, expected.detach(), rtol=2e-5, atol=1e-6)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        state = model.full_state_dict()
        for key, value in single.named_buffers() if dist.get_rank() == 0 else ():
            torch.testing.assert_close(state[key], value)
        model.eval()
        single.eval()
        x, labels = make_batch(7)
        torch.testing.assert_close(model(x=x, labels=labels), single(x, labels).detach(), rtol=2e-5, atol=1e-6)
        if dist.get_rank() == 0:
            print(name, flush=True)
        model.release()
    deferred()
    deferred(**WHOLE)
    if dist.get_rank() == 0:
        print("deferred", flush=True)


run_ranks(main, 3)
