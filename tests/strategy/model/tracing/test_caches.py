"""A cache of keys and values is not divided between calls of one layer."""

import pytest
from torch import nn

from lightning_pfo.strategy.model.tracing.dividing.cutting import Obstacles
from lightning_pfo.strategy.model.tracing.events import Event, Trace
from lightning_pfo.strategy.model.units import Unit


@pytest.fixture
def trace():
    """Two layers that are called twice with one cache, and then with another one."""
    units = [Unit(f"layers.{index}", nn.Identity()) for index in range(2)]
    calls = [unit for _ in range(3) for unit in units]
    caches = [object(), object()]
    given = [caches[position // 4] for position in range(6)]
    return Trace(
        events=[Event(unit, units=[unit]) for unit in calls],
        caches=[(position, unit, cache) for position, (unit, cache) in enumerate(zip(calls, given, strict=True))],
    )


def test_no_boundary_lies_between_calls_with_one_cache(trace):
    obstacles = Obstacles(trace)
    refused = [bool(obstacles.refusal(cut)) for cut in range(1, 6)]
    assert refused == [True, True, True, False, False]
    assert "'layers.0' is called several times with one cache" in obstacles.refusal(1)
    assert "'layers.1'" in obstacles.refusal(3)


def test_several_caches_are_no_obstacle(trace):
    trace.caches = [(position, unit, object()) for position, unit, _ in trace.caches]
    assert not any(Obstacles(trace).refusal(cut) for cut in range(1, 6))
