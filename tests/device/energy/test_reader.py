"""The energy used so far, in virtual time and in real time."""

from __future__ import annotations

import threading

import pytest

from lightning_pfo.core.errors import DeviceError, NotSupportedError
from lightning_pfo.device import EmulatedGpu
from lightning_pfo.device.config import GpuConfig
from lightning_pfo.device.energy.reader import EnergyReader
from tests.waiting import wait_until


class Old(EmulatedGpu):
    def total_energy_mj(self) -> float:
        raise NotSupportedError("Older than Volta.")


def test_energy_comes_from_a_counter_that_does_not_tick(caplog: pytest.LogCaptureFixture) -> None:
    gpu = EmulatedGpu(GpuConfig(kind="emulated"))
    reader = EnergyReader(gpu)
    gpu.time_source.sleep(0.3)
    assert reader.energy_j() == gpu.total_energy_mj() / 1000 == pytest.approx(0.3 * 60)
    assert not caplog.records
    assert reader.trace(0.0) is None
    reader.close()


def test_without_a_counter_power_is_integrated(caplog: pytest.LogCaptureFixture) -> None:
    """At the readings it is the energy; between them the power before goes on."""
    gpu = Old(GpuConfig(kind="emulated", static_power_w=100, dynamic_power_w=300, power_limit_w=1000))
    reader = EnergyReader(gpu)
    gpu.time_source.sleep(1.003)
    assert reader.energy_j() == pytest.approx(1.003 * 60)
    gpu.begin_work()
    gpu.finish_work(0.5, 0.0)
    gpu.time_source.sleep(0.2)
    assert reader.energy_j() == pytest.approx(1.203 * 60 + 0.5 * 400, abs=0.01 * 340)  # a step falls between readings
    assert "no energy counter" in caplog.text
    reader.close()


def test_in_real_time_a_thread_integrates_power(caplog: pytest.LogCaptureFixture) -> None:
    reader = EnergyReader(Old(GpuConfig(kind="emulated", time="real")))
    wait_until(lambda: reader.energy_j() > 1)
    assert "no energy counter" in caplog.text
    reader.close()
    assert "pfo-energy-sampler" not in {thread.name for thread in threading.enumerate()}


class ResetCounter(EmulatedGpu):
    """Its energy counter starts again once, from `reset` on."""

    forgotten_mj = 0.0

    def reset(self) -> None:
        self.forgotten_mj = super().total_energy_mj()

    def total_energy_mj(self) -> float:
        return super().total_energy_mj() - self.forgotten_mj


@pytest.mark.parametrize("time", ["virtual", "real"])
def test_a_counter_that_is_reset_is_an_error_not_a_negative_energy(time: str) -> None:
    gpu = ResetCounter(GpuConfig(kind="emulated", time=time, counter_tick_s=0.02))
    reader = EnergyReader(gpu)

    def passes_until_above_5_j() -> bool:
        gpu.time_source.sleep(0.01)
        return reader.energy_j() > 5

    wait_until(passes_until_above_5_j)
    gpu.reset()

    def is_refused() -> bool:
        gpu.time_source.sleep(0.01)
        try:
            return reader.energy_j() < 0
        except DeviceError as error:
            return "only rises" in str(error) and "Measure again" in str(error)

    wait_until(is_refused)
    reader.close()
    assert reader._sampler is not None
    energies_j = reader._sampler.trace(0.0).energies_j
    assert list(energies_j) == sorted(energies_j)


def test_between_the_ticks_of_a_counter_its_last_tick_is_continued() -> None:
    """Read as it is, 0.08 s at 60 W are 3 J or 6 J on a counter with ticks of 3 J."""
    gpu = EmulatedGpu(GpuConfig(kind="emulated", counter_tick_s=0.05, idle_power_w=60))
    reader = EnergyReader(gpu)
    gpu.time_source.sleep(0.3)
    for _ in range(15):
        begin_j = reader.energy_j()
        gpu.time_source.sleep(0.08)
        # each tick is seen to a millisecond: half the time between two polls
        assert reader.energy_j() - begin_j == pytest.approx(60 * 0.08, abs=60 * 0.004)
    reader.close()
