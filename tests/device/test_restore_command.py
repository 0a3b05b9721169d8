"""`lightning-pfo restore-clocks` on the fake driver."""

from __future__ import annotations

import subprocess
import sys

from tests.device.fake_driver import FakeDriver, fake_driver
from tests.device.processes import kill_with_watchdog, start
from tests.waiting import wait_until

__all__ = ["fake_driver"]


def restore_clocks(environment: dict[str, str], *settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_pfo", "restore-clocks", *settings]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_restore_clocks_by_hand(fake_driver: FakeDriver) -> None:
    assert "Nothing to restore" in restore_clocks(fake_driver.environment()).stdout
    process = start(fake_driver.environment(), "nvml", "slow")
    refused = restore_clocks(fake_driver.environment())
    assert refused.returncode == 2
    assert f"in use: process {process.pid} sets its clocks" in refused.stderr
    assert fake_driver.locked_gpus().keys() == {0}
    kill_with_watchdog(process)
    assert "no lease of a GPU GPU-1..." in restore_clocks(fake_driver.environment(), "gpu=GPU-1").stdout
    assert fake_driver.locked_gpus().keys() == {0}
    restored = restore_clocks(fake_driver.environment(), "gpu=GPU-0")
    assert restored.returncode == 0, restored.stderr
    assert f"its clocks are restored; process {process.pid} had claimed them" in restored.stdout
    assert fake_driver.locked_gpus() == {}
    assert fake_driver.leases() == []


def test_restore_clocks_by_force_takes_a_living_process_s_lock(fake_driver: FakeDriver) -> None:
    script = """
import time
from lightning_pfo.device import open_gpu
gpu = open_gpu("nvml", 0)
gpu.lock_graphics_clock(600)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", script], env=fake_driver.environment())
    wait_until(lambda: bool(fake_driver.locked_gpus()))
    assert restore_clocks(fake_driver.environment(), "force=true").returncode == 0
    assert fake_driver.locked_gpus() == {}
    process.kill()
    process.wait()
