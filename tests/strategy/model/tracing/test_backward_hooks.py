import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.tracing.backward_hooks import take_backward_hooks
from lightning_pfo.strategy.model.tracing.tracked import follow_units
from lightning_pfo.strategy.model.units import find_units


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


@pytest.fixture
def patches():
    with Patches() as patches:
        yield patches


def noting(calls, name):
    return lambda module, *_: calls.append((name, module))


def test_hooks_are_called_where_units_run_until_their_handles_remove_them(patches):
    net, calls = Net(), []
    layer = net.layers[1]
    units = find_units(net).all

    def run():
        calls.clear()
        net.layers(torch.ones(2, 3)).sum().backward()
        return list(calls)

    first = layer.register_full_backward_hook(noting(calls, "first"))
    follow_units(units, patches)
    take_backward_hooks(net, units, patches)
    assert not layer._backward_hooks  # torch finds none
    later = layer.register_full_backward_hook(noting(calls, "later"))
    before = layer.register_full_backward_pre_hook(noting(calls, "before"))
    for _ in range(2):
        take_backward_hooks(net, units, patches)
    assert run() == [("before", layer), ("first", layer), ("later", layer)]
    first.remove()
    assert run() == [("before", layer), ("later", layer)]
    patches.close()
    assert run() == [("before", layer), ("later", layer)]
    before.remove()
    later.remove()


def test_a_hook_on_several_layers_is_refused_and_one_on_a_part_is_left_alone(patches):
    net = Net()
    net.layers.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ConfigurationError, match="parts of 'layers' run on several"):
        take_backward_hooks(net, find_units(net).all, patches)
    net = nn.Sequential(Block(), Block())
    net[0].linear.register_full_backward_hook(lambda *_: None)
    take_backward_hooks(net, find_units(net).all, patches)
    assert len(net[0].linear._backward_hooks) == 1
