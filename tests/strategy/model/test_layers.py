from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.layers import (
    check_compilable,
    check_compiler,
    check_recomputable,
    recompute_activations,
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
    model = nn.Sequential(*layers)
    patches = Patches()
    recompute_activations(model, layers, patches)
    x = torch.ones(1, 2)
    model(x).sum().backward()
    assert layers[0].num_forwards == 4
    patches.close()
    assert "forward" not in layers[0].__dict__
    assert layers[1].forward is replaced
    model(x).sum().backward()
    assert layers[0].num_forwards == 6


class Functions(TorchDispatchMode):
    """Counts the functions of torch that are called."""

    def __init__(self):
        super().__init__()
        self.numbers = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.numbers[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("how", "products", "activations"), [("full", 3, 2), ("selective", 2, 2), (None, 2, 1)])
def test_what_is_dear_is_not_recomputed_if_asked(how, products, activations):
    """What the last product returns is never recomputed: nobody needs it."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 2))
    x = torch.randn(3, 2)
    layer(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    with Patches() as patches:
        if how is not None:
            recompute_activations(layer, [layer], patches, how)
        with Functions() as functions:
            layer(x).square().sum().backward()
    assert [functions.numbers[name] for name in ("addmm", "gelu")] == [products, activations]
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_schedules_that_cut_backwards_recompute_all():
    check_recomputable("full", make_schedule("zbv", 2, 4))
    check_recomputable("selective", make_schedule("1f1b", 2, 4))
    with pytest.raises(ConfigurationError, match=r"'zbv'.*serves one backward. Use activation_checkpointing='full'"):
        check_recomputable("selective", make_schedule("zbv", 2, 4))


class RecomputesItself(CountsForwards):
    """As the layers of Hugging Face models: one call of `forward` keeps its inputs, and calls itself again."""

    gradient_checkpointing = False

    def forward(self, x):
        if not self.gradient_checkpointing:
            return super().forward(x)
        return self._gradient_checkpointing_func(super().forward, x)


def test_layers_that_can_recompute_do_so_themselves():
    model = nn.Sequential(RecomputesItself(2, 2), RecomputesItself(2, 2))
    model.gradient_checkpointing = False  # the whole model is told, too
    model[1].gradient_checkpointing = True  # the user has asked for it
    model[1]._gradient_checkpointing_func = users = lambda forward, x: forward(x)
    x = torch.ones(1, 2)
    patches = Patches()
    for num_forwards in (2, 3):
        if num_forwards == 2:
            recompute_activations(model, list(model), patches)
        assert model.gradient_checkpointing == (num_forwards == 2)
        model(x).sum().backward()
        assert model[0].num_forwards == num_forwards
        patches.close()
    assert model[1].gradient_checkpointing
    assert model[1]._gradient_checkpointing_func is users


def test_compiling_what_cannot_be_compiled_is_refused(monkeypatch):
    check_compilable(make_schedule("1f1b", 2, 4))
    with pytest.raises(ConfigurationError, match=r"'zbv'.*cannot be cut in two.*schedule='1f1b'"):
        check_compilable(make_schedule("zbv", 2, 4))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigurationError, match=r"needs a C\+\+ compiler.*g\+\+"):
        check_compiler(torch.device("cpu"))
    check_compiler(torch.device("cuda"))
