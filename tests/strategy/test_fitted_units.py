"""Modules whose own code changes their buffers: layers as a whole, if they are not too large for a stage."""

from functools import partial

import pytest
import torch

from lightning_pfo.strategy.fitted_units import fit_units
from lightning_pfo.strategy.model.units import find_units
from tests.strategy.zoo.own import WIDTH
from tests.strategy.zoo.seen import Averaged, Counted


@pytest.mark.parametrize(
    ("make", "at_least", "whole", "divided"),
    [
        (Averaged, 4, ["first.3", "last.2"], []),
        (Averaged, 9, [], ["first.3.experts.0", "last.2.experts.3"]),  # it would leave too few
        (Counted, 2, [], ["model.layers.0", "model.layers.5"]),
    ],
)
def test_modules_that_change_buffers_are_layers_as_a_whole_if_they_can(make, at_least, whole, divided):
    model = make()
    find = partial(find_units, model, None, at_least)
    batch = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    options = {"at_least": at_least, "follows_weights": True, "may_look_elsewhere": True}
    units, trace = fit_units(model, find(), lambda: model.training_step(batch, 0), find, **options)
    names = [unit.name for unit in units.layers]
    assert trace.failure is None
    assert {*whole, *divided} <= set(names)
    assert not [name for name in names if name.startswith(tuple(f"{each}." for each in whole))]
