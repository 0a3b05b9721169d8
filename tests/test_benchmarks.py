"""The benchmarks that sessions with a GPU start with judge themselves, and need neither permission nor CUDA."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.device.fake_driver import PROJECT, FakeDriver, fake_driver

__all__ = ["fake_driver"]

sys.path.insert(0, str(PROJECT / "benchmarks"))
from clock_overhead import judge


@pytest.mark.parametrize(
    ("overheads", "verdict"),
    [
        ([0.001, 0.002, 0.003] * 5, "within the limit"),
        ([-0.001, 0.0, 0.001] * 5, "within the limit"),
        ([0.009, 0.010, 0.011] * 5, "ABOVE THE LIMIT"),
        ([-0.02, 0.004, 0.03], "undecided: give more steps"),
    ],
)
def test_the_overhead_is_judged_with_two_standard_errors_to_spare(overheads: list[float], verdict: str) -> None:
    judged = judge(overheads)
    assert judged["verdict"] == verdict
    assert judged["overhead_percent"] == pytest.approx(100 * sorted(overheads)[len(overheads) // 2])


def test_the_overhead_is_measured_without_permission_but_not_that_of_changing_clocks(fake_driver: FakeDriver) -> None:
    script = """
import clock_overhead
settings = ["gpu=nvml", "steps=4", "microbatches=2", "instruction_ms=4"]
assert clock_overhead.main([*settings, "sets_clocks=true"]) == 2
clock_overhead.main(settings)
"""
    environment = fake_driver.environment("no_permission")
    environment["PYTHONPATH"] = f"{PROJECT / 'benchmarks'}:{environment['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Insufficient Permissions" in done.stderr
    result = json.loads(done.stdout)
    assert (result["gpu"], result["training"], result["limit_percent"]) == ("Fake GPU 0 (dry run)", "cpu", 0.5)
    assert result["verdict"]
    assert fake_driver.changes() == []
