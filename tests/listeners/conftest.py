import time

import pytest

from tests.listeners.fakes import FakeGpu, FakeSource


@pytest.fixture
def world(monkeypatch):
    """Time passes only where a test says so."""

    class World:
        now_s = 100.0
        gpu = FakeGpu()
        source = FakeSource()

        def spend(self, time_s, power_w):
            self.now_s += time_s
            self.gpu.energy_mj += int(1000 * time_s * power_w)

    world = World()
    monkeypatch.setattr(time, "perf_counter", lambda: world.now_s)
    return world
