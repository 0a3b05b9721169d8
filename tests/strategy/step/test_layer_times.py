import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.units import find_units
from lightning_pfo.strategy.step import layer_times
from lightning_pfo.strategy.step.layer_times import measure_layer_times, measure_training_step


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class SleepyLayer(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return Sleeps.apply(self.linear(x), self.seconds)


class Owner(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(*[SleepyLayer(seconds) for seconds in (0.02, 0.0, 0.04, 0.0)])
        self.norm = nn.BatchNorm1d(2)

    def training_step(self):
        self.log("loss", 0.0)
        out = self.norm(self.model(torch.randn(3, 2)))
        return {"loss": Sleeps.apply(out.sum(), 0.03)}


def test_each_layer_gets_its_forward_and_backward_and_the_last_one_the_loss():
    owner = Owner()
    state = torch.get_rng_state()
    statistics = owner.norm.running_mean.clone()
    found = find_units(owner)
    times = measure_training_step(owner, found, owner.training_step, torch.device("cpu"))
    assert times[0] >= 0.06
    assert times[2] >= 0.12
    assert times[3] >= 0.09
    assert "log" not in owner.__dict__
    assert all(parameter.grad is None for parameter in owner.parameters())
    assert torch.equal(owner.norm.running_mean, statistics)
    assert torch.equal(torch.get_rng_state(), state)


def test_times_add_up_to_the_step_also_where_layers_are_frozen(monkeypatch):
    owner = Owner()
    owner.model[0].requires_grad_(False)
    owner.model[1].requires_grad_(False)
    ticks = iter(range(1000))
    # the module's own clock: other threads of the process may read the real one
    monkeypatch.setattr(layer_times, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    loss = lambda: owner.model(torch.randn(3, 2)).sum()  # noqa: E731
    times = measure_layer_times(find_units(owner), loss, torch.device("cpu"), repeats=1)
    # stamps: begin, layers 0, 1, 2, 3, loss forward; loss, layer 3 and the end backward: one tick apart
    assert times == [2.0, 1.0, 2.0, 2.0]


def test_what_has_no_values_cannot_be_measured():
    with torch.device("meta"):
        owner = Owner()
    with pytest.raises(ConfigurationError, match=r"built on the meta device.*partition='parameters'"):
        measure_training_step(owner, find_units(owner), owner.training_step, torch.device("cpu"))
