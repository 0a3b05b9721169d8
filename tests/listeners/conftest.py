import pytest

from lightning_pfo.device.emulated.time import VirtualTime
from tests.listeners.fakes import FakeGpu, FakeSource


class World:
    """Time passes only where a test says so."""

    def __init__(self):
        self.time_source = VirtualTime()
        self.gpu = FakeGpu(self.time_source)
        self.source = FakeSource()

    def spend(self, time_s, power_w):
        self.time_source.sleep(time_s)
        self.gpu.energy_mj += int(1000 * time_s * power_w)


@pytest.fixture
def world():
    return World()
