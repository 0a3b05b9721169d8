"""Initialising in hooks what other ranks hold draws what they draw."""

import pytest
import torch
from torch import nn

from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.reach.drawing import draw_alike
from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder, mark_placeholders


@pytest.mark.parametrize("name", ["trunc_normal_", "orthogonal_", "sparse_"])
def test_it_draws_as_where_the_values_are(name):
    here, there = nn.Linear(5, 4), nn.Linear(5, 4, device="meta")
    mark_placeholders(there)
    ordinary = getattr(nn.init, name)
    arguments = {"sparsity": 0.5} if name == "sparse_" else {}
    states, before = [], here.weight.detach().clone()
    with Patches() as patches:
        draw_alike(torch.device("cpu"), patches)
        for layer in (here, there):
            torch.manual_seed(0)
            assert getattr(nn.init, name)(layer.weight, **arguments) is layer.weight
            states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert not torch.equal(here.weight, before)
    assert is_placeholder(there.weight)
    assert getattr(nn.init, name) is ordinary
