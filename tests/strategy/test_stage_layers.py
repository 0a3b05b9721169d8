import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.pipeline_schedule import make_schedule
from lightning_pfo.strategy.stage_layers import (
    check_compilable,
    check_compiler,
    recompute_activations,
    restore_layers,
)


class CountsForwards(nn.Linear):
    num_forwards = 0

    def forward(self, x):
        self.num_forwards += 1
        return super().forward(x)


def test_recomputed_layers_run_twice_and_are_given_back():
    layers = [CountsForwards(2, 2), CountsForwards(2, 2)]
    layers[1].forward = replaced = lambda x: nn.functional.linear(x, layers[1].weight)
    layers.append(layers[0])  # a layer may be used twice
    recompute_activations(layers)
    x = torch.ones(1, 2)
    nn.Sequential(*layers)(x).sum().backward()
    assert layers[0].num_forwards == 4
    restore_layers(layers)
    assert "forward" not in layers[0].__dict__
    assert layers[1].forward is replaced
    nn.Sequential(*layers)(x).sum().backward()
    assert layers[0].num_forwards == 6


def test_compiling_what_cannot_be_compiled_is_refused(monkeypatch):
    check_compilable(make_schedule("1f1b", 2, 4))
    with pytest.raises(ConfigurationError, match=r"'zbv'.*cannot be cut in two.*schedule='1f1b'"):
        check_compilable(make_schedule("zbv", 2, 4))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigurationError, match=r"needs a C\+\+ compiler.*g\+\+"):
        check_compiler(torch.device("cpu"))
    check_compiler(torch.device("cuda"))
