"""The benchmarks that sessions with a GPU start with judge themselves, and need neither permission nor CUDA."""

from __future__ import annotations

import json
import sys

import pytest

from lightning_pfo.core.errors import ClockPermissionError
from lightning_pfo.device import EmulatedGpu
from tests.example_scripts import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import clock_overhead


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
    judged = clock_overhead.judge(overheads)
    assert judged["verdict"] == verdict
    assert judged["overhead_percent"] == pytest.approx(100 * sorted(overheads)[len(overheads) // 2])


SETTINGS = ["gpu=emulated_a100", "steps=4", "microbatches=2", "instruction_ms=4"]


def test_the_overhead_is_measured_and_judged_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    code = clock_overhead.main(SETTINGS)
    result = json.loads(capsys.readouterr().out)
    assert (result["training"], result["limit_percent"], result["instructions_per_step"]) == ("cpu", 0.5, 4)
    assert "(emulated)" in result["gpu"]
    assert code == (result["verdict"] == "ABOVE THE LIMIT")


def test_without_permission_the_cost_of_setting_clocks_is_not_called_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(gpu: EmulatedGpu, clock_mhz: int) -> None:
        raise ClockPermissionError("Ask root.")

    monkeypatch.setattr(EmulatedGpu, "lock_graphics_clock", refuse)
    assert clock_overhead.main([*SETTINGS, "sets_clocks=true"]) == 2
    assert capsys.readouterr().err.endswith("error: Ask root.\n")
