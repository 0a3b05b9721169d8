from __future__ import annotations

import threading
import time

import pytest

from lightning_pfo.core.errors import DeviceError, NotSupportedError
from lightning_pfo.device import EmulatedGpu
from lightning_pfo.device.config import GpuConfig
from lightning_pfo.device.energy.reader import EnergyReader
from tests.waiting import wait_until


def test_total_energy_comes_from_the_counter_or_from_power(caplog: pytest.LogCaptureFixture) -> None:
    class Old(EmulatedGpu):
        def total_energy_mj(self) -> int:
            raise NotSupportedError("Older than Volta.")

    gpu = EmulatedGpu(GpuConfig(kind="emulated"))
    assert EnergyReader(gpu).energy_j() == pytest.approx(gpu.total_energy_mj() / 1000, abs=1)
    assert not caplog.records
    reader = EnergyReader(Old(GpuConfig(kind="emulated")))
    wait_until(lambda: reader.energy_j() > 1)
    assert "no energy counter" in caplog.text
    reader.close()
    assert "pfo-energy-sampler" not in {thread.name for thread in threading.enumerate()}


class ResetCounter(EmulatedGpu):
    """Its energy counter starts again once, from `reset` on."""

    forgotten_mj = 0

    def reset(self) -> None:
        self.forgotten_mj = super().total_energy_mj()

    def total_energy_mj(self) -> int:
        return super().total_energy_mj() - self.forgotten_mj


def test_a_counter_that_is_reset_is_an_error_not_a_negative_energy() -> None:
    gpu = ResetCounter(GpuConfig(kind="emulated", counter_tick_s=0.02))
    reader = EnergyReader(gpu)
    wait_until(lambda: reader.energy_j() > 5)
    gpu.reset()

    def is_refused() -> bool:
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
    wait_until(lambda: reader.energy_j() >= 6)
    time.sleep(0.1)
    errors = []
    for _ in range(15):
        begin_s, begin_j = time.perf_counter(), reader.energy_j()
        time.sleep(0.08)
        end_s, end_j = time.perf_counter(), reader.energy_j()
        errors.append(abs((end_j - begin_j) / (60 * (end_s - begin_s)) - 1))
    reader.close()
    assert sorted(errors)[len(errors) // 2] < 0.1
