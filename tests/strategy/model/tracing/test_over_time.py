"""Layers that go over time: the form of what they return, and what is kept of it, against what they do with values."""

import pytest
import torch
from torch import nn

from lightning_pfo.strategy.model.tracing.forms.left import returned_of
from lightning_pfo.strategy.model.tracing.forms.outline import outline_call
from lightning_pfo.strategy.model.tracing.forms.over_time import FewTimeSteps, Saved
from lightning_pfo.strategy.model.tracing.trees import tree_unflatten

CPU = torch.device("cpu")
LAYERS = [
    (nn.GRU, {}),
    (nn.GRU, {"batch_first": True, "num_layers": 2, "dropout": 0.1}),
    (nn.GRU, {"bidirectional": True, "bias": False}),
    (nn.RNN, {"batch_first": True, "num_layers": 3, "bidirectional": True}),
    (nn.RNN, {"nonlinearity": "relu"}),
    (nn.LSTM, {"num_layers": 2}),
]


def forms_of(values):
    """Shapes, strides and whether gradients flow, of all tensors."""
    outputs, state = values
    states = state if isinstance(state, tuple) else (state,)
    return [(each.shape, each.stride(), each.dtype, each.requires_grad) for each in (outputs, *states)]


def outlined(layer, arguments):
    outline = outline_call(layer, layer.forward, (arguments, {}), CPU)
    assert outline.way == 0
    made = tree_unflatten(outline.leaves, outline.structure)
    return outline, forms_of(returned_of(outline, made, (arguments, {})))


@pytest.mark.parametrize(("kind", "options"), LAYERS)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forms_and_memory_are_those_of_all_steps(kind, options, length, dtype):
    layer = kind(6, 5, **options).to(dtype)
    shape = (3, length, 6) if options.get("batch_first") else (length, 3, 6)
    given = torch.zeros(shape, dtype=dtype, requires_grad=True)
    with Saved(layer.parameters()) as saved:
        found = layer(given)
    outline, forms = outlined(layer, (given,))
    assert forms == forms_of(found)
    if kind is not nn.LSTM:  # whose one operation keeps what it needs, and says of it what it says
        assert outline.saved_bytes == saved.num_bytes > 0


def test_only_few_steps_are_run():
    steps = []

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.gru:
                steps.append(args[0].shape[0])
            return func(*args, **(kwargs or {}))

    with Counting(), FewTimeSteps():
        nn.GRU(6, 5)(torch.zeros(1000, 3, 6))
    assert sum(steps) < 10
