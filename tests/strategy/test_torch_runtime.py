"""Splitting a backward in two gives the gradients of a whole one; a torch that cannot is refused by name."""

import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.pipeline_schedule import make_schedule
from lightning_pfo.strategy import torch_runtime
from lightning_pfo.strategy.torch_runtime import backward_of_inputs, backward_of_weights, check_split_backward


@pytest.mark.parametrize("last_layer", [nn.Tanh(), nn.Flatten(0)])  # the second returns a view
def test_two_parts_make_the_whole(last_layer):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), last_layer)
    module[2].bias.requires_grad_(False)
    x = torch.randn(5, 3, requires_grad=True)
    expected = torch.autograd.grad(module(x).sum(), [x, *(p for p in module.parameters() if p.requires_grad)])

    output = module(x)
    groups = backward_of_inputs([output], [torch.ones_like(output)], [x], module.parameters())
    assert torch.allclose(x.grad, expected[0])
    assert all(parameter.grad is None for parameter in module.parameters())
    backward_of_weights(module.parameters(), groups)
    assert module[2].bias.grad is None
    for parameter, gradient in zip((module[0].weight, module[0].bias, module[2].weight), expected[1:], strict=True):
        assert torch.allclose(parameter.grad, gradient)


def test_another_torch_is_refused_with_what_works(monkeypatch):
    split = make_schedule("zbv", 2, 4)
    check_split_backward(split)
    monkeypatch.setattr("torch.distributed.pipelining._backward.stage_backward_weight", lambda weights: None)
    check_split_backward(make_schedule("1f1b", 2, 4))
    message = rf"'zbv' splits backwards .* torch {torch.__version__} has no .* such as 1f1b"
    with pytest.raises(ConfigurationError, match=message.replace("+", r"\+")):
        check_split_backward(split)
    monkeypatch.setattr(torch_runtime, "_split_backward", lambda: None)
    with pytest.raises(ConfigurationError, match=r"or torch 2\.13"):
        check_split_backward(split)
