"""What a GPU can do, found out without a command."""

from __future__ import annotations

import pytest

from lightning_pfo.device import open_gpu
from lightning_pfo.device.config import GpuConfig
from lightning_pfo.device.report import probe_permission, report_gpu, watch_counter
from tests.device.fake_driver import FakeDriver, fake_driver
from tests.device.processes import run

__all__ = ["fake_driver"]


@pytest.mark.parametrize("tick_s", [0.02, 0.1])
def test_the_counter_s_tick_is_found(tick_s: float) -> None:
    gpu = open_gpu(GpuConfig(kind="emulated", counter_tick_s=tick_s), 0)
    assert watch_counter(gpu, 7 * tick_s) == (
        "counter",
        pytest.approx(tick_s, abs=0.001),
    )  # looked at every millisecond


def test_a_counter_without_ticks_and_one_that_ticks_too_seldom() -> None:
    assert watch_counter(open_gpu(GpuConfig(kind="emulated"), 0), 0.1) == ("counter", 0.0)
    assert watch_counter(open_gpu(GpuConfig(kind="emulated", counter_tick_s=30.0), 0), 1.0) == ("counter", None)


def test_in_real_time_the_counter_is_watched_too() -> None:
    source, tick_s = watch_counter(open_gpu(GpuConfig(kind="emulated", time="real", counter_tick_s=0.02), 0), 0.14)
    assert source == "counter"
    assert tick_s == pytest.approx(0.02, rel=0.4)


def test_few_clocks_are_all_scanned() -> None:
    gpu = open_gpu(GpuConfig(kind="emulated", top_clock_mhz=1400, min_clock_mhz=400, clock_step_mhz=50), 0)
    report = report_gpu(gpu, 0, watch_s=0.01)
    assert (report.scan_max_mhz, report.scan_min_mhz, report.scan_step_mhz) == (1400, 700, 50)


def test_a_gpu_held_by_another_job_is_not_probed(fake_driver: FakeDriver) -> None:
    script = """
from lightning_pfo.device import open_gpu
from lightning_pfo.device.report import probe_permission
gpu = open_gpu("nvml", 0)
gpu.claim_clocks()
print(probe_permission(open_gpu("nvml", 0)))
gpu.close()
"""
    done = run(fake_driver.environment(), script)
    assert done.stdout.startswith("(None, "), done.stderr
    assert "held by process" in done.stdout
    assert fake_driver.changes() == []


def test_the_probe_of_an_emulated_gpu_puts_its_clock_back() -> None:
    gpu = open_gpu(GpuConfig(kind="emulated", clock_latency_s=0), 0)
    assert probe_permission(gpu) == (True, "")
    assert gpu.graphics_clock_mhz() == gpu.supported_clocks_mhz()[0]
