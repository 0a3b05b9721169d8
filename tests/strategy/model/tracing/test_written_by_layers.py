"""A weight that a layer writes into, and all that use it, are on one stage."""

import pytest
from torch import nn

from lightning_pfo.strategy.model.tracing.dividing.cutting import Obstacles
from lightning_pfo.strategy.model.tracing.events import Event, Trace
from lightning_pfo.strategy.model.units import Unit


def traced(*, tied, held=()):
    """A table that limits norms, a layer, a head that may be tied, one more layer; `held` is what the last is given."""
    modules = [nn.Embedding(4, 3, max_norm=1.0), nn.Linear(3, 3), nn.Linear(3, 4, bias=False), nn.Linear(4, 4)]
    if tied:
        modules[2].weight = modules[0].weight
    units = [Unit(name, module) for name, module in zip(("table", "layer", "head", "last"), modules, strict=True)]
    events = [Event(unit, units=[unit]) for unit in units]
    events[0].changes_weights, events[3].held = ("weight",), list(held)
    return Trace(events=events)


@pytest.mark.parametrize(
    ("tied", "held", "refused"),
    [
        (False, (), [False, False, False]),
        (True, (), [True, True, False]),
        (False, ("table.weight",), [True, True, True]),
        (True, ("head.weight",), [True, True, True]),  # by the name that it has there
    ],
)
def test_no_boundary_lies_between_who_writes_and_who_uses(tied, held, refused):
    obstacles = Obstacles(traced(tied=tied, held=held))
    assert [bool(obstacles.refusal(cut)) for cut in range(1, 4)] == refused
    if tied:
        assert "'table' writes into its weights" in obstacles.refusal(1)
        assert "(of 'table', 'head')" in obstacles.refusal(1)
