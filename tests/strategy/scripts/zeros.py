"""Steps that look at values of layers and fail on zeros, on two processes; every rank writes FOLDER/rank_N.json."""

import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.core.errors import PfoError
from lightning_pfo.loops import PipelinedModel
from tests.ranks import run_ranks


def divides(x):
    return x * (1 / x.max().item())


def asserts(x):
    assert x.abs().sum() > 0
    return x


def takes_logarithms(x):
    return x + math.log(x.abs().max().item())


def asks_for_variety(x):
    assert x.max() != x.min()
    return x


def divides_by_deviation(x):
    return x * (1 / x.std().item())


def doubles(x):
    while x.norm() < 100:
        x = x * 2
    return x


CASES = (divides, asserts, takes_logarithms, asks_for_variety, divides_by_deviation, doubles)


class Model(nn.Module):
    def __init__(self, between):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.between = between

    def forward(self, x, y):
        x = self.between(self.layers[:2](x))
        return nn.functional.cross_entropy(self.layers[2:](x), y)


def main():
    x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(2)), torch.arange(8) % 3
    results = {}
    for case in CASES:
        module = Model(case)
        with torch.no_grad():
            expected = sum(float(module(x[i : i + 2], y[i : i + 2])) for i in range(0, 8, 2)) / 4
        try:
            model = PipelinedModel(module, pipeline_module="layers", num_microbatches=4, check_loss=False)
            results[case.__name__] = [float(model.step(x, y)), expected]
        except PfoError as error:
            results[case.__name__] = f"{type(error).__name__}: {error}"
    Path(sys.argv[1], f"rank_{dist.get_rank()}.json").write_text(json.dumps(results))


run_ranks(main, 2)
