"""What every `Gpu` must do. Run as a program: `python -m tests.device.conformance GPU [CHECK ...]`, e.g. GPU=nvml."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device import Gpu, open_gpu
from lightning_pfo.device.time import time_of


def wait_for_clock(gpu: Gpu, clock_mhz: int) -> None:
    time_source = time_of(gpu)
    deadline_s = time_source.now_s() + 10
    while gpu.graphics_clock_mhz() != clock_mhz:
        assert time_source.now_s() < deadline_s, f"{gpu.graphics_clock_mhz()} instead of {clock_mhz} MHz"
        time_source.sleep(0.001)


def follows_the_protocol(gpu: Gpu) -> None:
    assert isinstance(gpu, Gpu)
    assert gpu.name
    assert gpu.is_emulated == ("(emulated" in gpu.name)


def clocks_descend(gpu: Gpu) -> None:
    clocks = gpu.supported_clocks_mhz()
    assert len(clocks) > 10
    assert all(isinstance(clock, int) for clock in clocks)
    assert list(clocks) == sorted(set(clocks), reverse=True)


def lock_is_reached_and_restored(gpu: Gpu) -> None:
    unlocked_mhz = gpu.graphics_clock_mhz()
    for clock_mhz in gpu.supported_clocks_mhz()[5:8]:
        gpu.lock_graphics_clock(clock_mhz)
        wait_for_clock(gpu, clock_mhz)
    gpu.restore()
    wait_for_clock(gpu, unlocked_mhz)


def close_restores_and_may_be_repeated(gpu: Gpu) -> None:
    gpu.lock_graphics_clock(gpu.supported_clocks_mhz()[-1])
    gpu.close()
    gpu.close()


def restore_without_a_lock_does_nothing(gpu: Gpu) -> None:
    gpu.restore()
    gpu.restore()


def unsupported_clocks_name_the_nearest(gpu: Gpu) -> None:
    clocks = gpu.supported_clocks_mhz()
    cases = {
        clocks[0] + 1: [clocks[0]],
        clocks[-1] - 1: [clocks[-1]],
        clocks[3] + 1: [clocks[3], clocks[2]],
    }
    for wrong_mhz, nearest in cases.items():
        with pytest.raises(DeviceError) as raised:
            gpu.lock_graphics_clock(wrong_mhz)
        expected = " or ".join(f"{clock} MHz" for clock in nearest)
        assert str(raised.value).endswith(f"got {wrong_mhz} MHz. The nearest supported: {expected}.")
    gpu.restore()


def energy_and_power_agree(gpu: Gpu) -> None:
    time_source = time_of(gpu)
    start_s, start_mj = time_source.now_s(), gpu.total_energy_mj()
    time_source.sleep(0.05)
    energy_mj = gpu.total_energy_mj() - start_mj
    assert energy_mj > 0
    assert gpu.power_mw() > 1000
    longest_tick_s = 0.1  # a counter may show at once what was used before
    assert energy_mj <= gpu.power_mw() * (time_source.now_s() - start_s + longest_tick_s) * 1.1


def claiming_changes_nothing_and_may_be_repeated(gpu: Gpu) -> None:
    clock_mhz = gpu.graphics_clock_mhz()
    gpu.claim_clocks()
    gpu.claim_clocks()
    assert gpu.graphics_clock_mhz() == clock_mhz
    gpu.restore()


def locking_after_restoring_works(gpu: Gpu) -> None:
    for clock_mhz in gpu.supported_clocks_mhz()[1:3]:
        gpu.lock_graphics_clock(clock_mhz)
        wait_for_clock(gpu, clock_mhz)
        gpu.restore()


def nothing_limits_an_idle_gpu(gpu: Gpu) -> None:
    assert gpu.clock_limits() == frozenset()
    assert gpu.energy_is_continuous in (True, False)


CHECKS: dict[str, Callable[[Gpu], None]] = {
    check.__name__: check
    for check in (
        follows_the_protocol,
        clocks_descend,
        lock_is_reached_and_restored,
        close_restores_and_may_be_repeated,
        restore_without_a_lock_does_nothing,
        unsupported_clocks_name_the_nearest,
        energy_and_power_agree,
        claiming_changes_nothing_and_may_be_repeated,
        locking_after_restoring_works,
        nothing_limits_an_idle_gpu,
    )
}

if __name__ == "__main__":
    for name in sys.argv[2:] or CHECKS:
        print(name, flush=True)
        opened = open_gpu(sys.argv[1], 0)
        CHECKS[name](opened)
        opened.close()
