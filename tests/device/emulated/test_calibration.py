"""The emulated A100 and A40 against the measured profiles of the Perseus SOSP'24 artifact."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from lightning_pfo.device import EmulatedGpu, load_gpu_config
from lightning_pfo.device.emulated.physics import GpuPhysics
from lightning_pfo.device.emulated.time import VirtualTime

PROFILES = Path(__file__).parents[4] / "shared" / "profiles"
MEASURED = {
    # The A40's forwards are too noisy to fit: measured times jump by 10 % between neighbouring clocks.
    "emulated_a100": ("gpt3-175b_a100-sxm_bf16.csv", ("forward", "backward"), 83.64),
    "emulated_a40": ("bloom-176b_a40_bf16.csv", ("backward",), 70.38),
}


@pytest.mark.parametrize("name", MEASURED)
def test_normalised_curves_of_every_stage_within_five_percent(name: str) -> None:
    file, instructions, _ = MEASURED[name]
    if not (PROFILES / file).exists():
        pytest.skip(f"the measured profile {file} is not on this machine")
    config = load_gpu_config(name)
    curves: dict[tuple[str, str], dict[int, tuple[float, float]]] = {}
    with (PROFILES / file).open() as handle:
        for row in csv.DictReader(handle):
            if row["instruction"] in instructions:
                curve = curves.setdefault((row["stage"], row["instruction"]), {})
                curve[int(row["frequency"])] = (float(row["time"]), float(row["energy"]))
    assert len(curves) == 8 * len(instructions)
    for curve in curves.values():
        top_mhz = max(curve)
        gpu = EmulatedGpu(config, time_source=(clock := VirtualTime()))
        emulated = {}
        for mhz in curve:
            gpu.lock_graphics_clock(mhz)
            clock.sleep(1)
            start_s, start_mj = clock.now_s(), gpu.total_energy_mj()
            gpu.begin_work()
            gpu.finish_work(1 - config.memory_share, config.memory_share)
            emulated[mhz] = (clock.now_s() - start_s, (gpu.total_energy_mj() - start_mj) / 1000)
        for mhz in curve:
            for quantity in (0, 1):  # time, energy
                measured = curve[mhz][quantity] / curve[top_mhz][quantity]
                assert emulated[mhz][quantity] / emulated[top_mhz][quantity] == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("name", MEASURED)
def test_blocked_power(name: str) -> None:
    config = load_gpu_config(name)
    physics = GpuPhysics(config)
    at_top_w = physics.blocked_power_w(config.top_clock_mhz)
    assert at_top_w == pytest.approx(MEASURED[name][2], rel=0.001)
    assert physics.blocked_power_w(870) > 0.8 * at_top_w  # it depends only weakly on the clock
