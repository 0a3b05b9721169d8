"""What crosses stage boundaries besides one differentiable tensor, on 2 ranks; writes FOLDER/rank_N.json."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.loops import PipelinedModel
from lightning_pfo.strategy.engine import transfers
from tests.ranks import run_ranks

SCHEDULES = ("1f1b", "zbv")
BY_HOST = "1f1b by host memory"
"""As gloo does with tensors of a GPU: transfers have tensors of their own."""


def frozen():
    """The first stages have nothing to train, so no gradient comes back to them."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    net[:2].requires_grad_(False)
    return net


class Pair(nn.Module):
    """Hands on a mask of integers and a tensor that the next layer does not use."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value):
        x, mask, _ = value if isinstance(value, tuple) else (value, (value[:, :1] > 0).long(), None)
        x = self.linear(x) * mask
        return x, mask, x.exp()


class Biased(nn.Module):
    """Hands on what it computed from its input, and a bias that depends on weights alone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.table = nn.Parameter(torch.rand(1, 6))

    def forward(self, value):
        x, bias = value if isinstance(value, tuple) else (value, None)
        if bias is None:
            bias = self.table.exp().expand(x.shape)
        return (self.linear(x) * bias).tanh(), bias + self.table.expand(x.shape)


class Sum(nn.Module):
    def forward(self, value):
        return value[0] + value[1]


class First(nn.Module):
    def forward(self, value):
        return value[0]


def pairs():
    return nn.Sequential(*(Pair() for _ in range(3)), First())


def several():
    return nn.Sequential(*(Biased() for _ in range(3)), Sum())


def views():
    """Stages end with a view of what they computed."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (2, 3)), nn.Flatten(1)) for _ in range(4)))


MODELS = {"frozen": frozen, "pairs": pairs, "several": several, "views": views}


def make(name):
    torch.manual_seed(0)
    return MODELS[name]()


def gradients(module):
    return {name: p.grad.flatten().tolist() for name, p in module.named_parameters() if p.grad is not None}


def main():
    x, y = torch.randn(2, 16, 6, generator=torch.Generator().manual_seed(1))
    results = {}
    for name in MODELS:
        for case in (*SCHEDULES, BY_HOST):
            transfers.goes_by_host = lambda tensor, group, case=case: case == BY_HOST
            schedule = case.partition(" ")[0]
            model = PipelinedModel(make(name), nn.functional.mse_loss, num_microbatches=4, schedule=schedule)
            model.step(x, y)
            results[f"{name} {case}"] = gradients(model.module)
        whole = make(name)
        nn.functional.mse_loss(whole(x), y).backward()
        results[name] = gradients(whole)
    Path(sys.argv[1], f"rank_{dist.get_rank()}.json").write_text(json.dumps(results))


run_ranks(main, 2)
