"""Steps that look at values of layers and fail on zeros, on two processes; every rank writes FOLDER/rank_N.json."""

import itertools
import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.core.errors import PfoError
from lightning_pfo.loops import PipelinedModel
from lightning_pfo.strategy.model.tracing.forms import values
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


def refuses_both(x):
    if not 0.3 < x.max().item() < 0.9999:
        raise ValueError("neither zeros nor ones")
    return x


CASES = (divides, asserts, takes_logarithms, asks_for_variety, divides_by_deviation, doubles, refuses_both)


class Layer(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.linear, self.inside = nn.Linear(8, 8), inside

    def forward(self, x):
        return self.inside(self.linear(x).tanh())


class Model(nn.Module):
    """With what a case does between layers, or in the forward of one."""

    def __init__(self, case, in_layer):
        super().__init__()
        torch.manual_seed(1)
        inside, self.between = (case, nn.Identity()) if in_layer else (nn.Identity(), case)
        self.layers = nn.Sequential(nn.Linear(6, 8), Layer(inside), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x, y):
        x = self.between(self.layers[:2](x))
        return nn.functional.cross_entropy(self.layers[2:](x), y)


def main():
    x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(2)), torch.arange(8) % 3
    results = {}
    values.MOST_LOOKS = 300
    for case, in_layer in itertools.product(CASES, (False, True)):
        module = Model(case, in_layer)
        with torch.no_grad():
            expected = sum(float(module(x[i : i + 2], y[i : i + 2])) for i in range(0, 8, 2)) / 4
        try:
            model = PipelinedModel(
                module, pipeline_module="layers", num_microbatches=4, partition="custom:0,3,5", check_loss=False
            )
            results[f"{case.__name__}{' in layer' if in_layer else ''}"] = [float(model.step(x, y)), expected]
        except PfoError as error:
            results[f"{case.__name__}{' in layer' if in_layer else ''}"] = f"{type(error).__name__}: {error}"
    Path(sys.argv[1], f"rank_{dist.get_rank()}.json").write_text(json.dumps(results))


run_ranks(main, 2)
