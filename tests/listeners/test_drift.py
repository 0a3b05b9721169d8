"""Scans of an emulated GPU that gets warmer, and leaks more; the truth is its model at the last temperature."""

import csv
import math
from dataclasses import replace

import pytest

from lightning_pfo.core.events import InstructionWork
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.device import EmulatedGpu, GpuConfig
from lightning_pfo.device.emulated.physics import GpuPhysics
from lightning_pfo.listeners.drift import without_drift
from lightning_pfo.listeners.profile_row import ProfileRow
from lightning_pfo.listeners.profiling_run import ProfilingRun, ScanSettings
from lightning_pfo.planner import read_profile
from tests.listeners.fakes import FakeSource

CONFIG = GpuConfig(kind="emulated", min_clock_mhz=810, clock_step_mhz=60, leakage_per_c=0.01, heating_s=4.0, seed=1)
KINDS = (InstructionType.FORWARD, InstructionType.BACKWARD)


def scanned(tmp_path, config, **settings):
    source = FakeSource(num_microbatches=6)
    gpu = EmulatedGpu(config)
    reports = []
    with ProfilingRun(
        source, tmp_path / "profile.csv", gpu=gpu, num_gpus=1, cluster="ideal",
        settings=ScanSettings(iterations_per_clock=2, patience=100, **settings), report=reports.append,
    ) as run:  # fmt: skip
        for _ in range(300):
            source.run_iteration(work=InstructionWork(1e9, 1e6, 0.0))
            if run.done:
                break
        assert run.done
        visits = run.scan._visits
    return read_profile(tmp_path / "profile.csv"), visits, (tmp_path / "profile.csv").read_text()


def true_power_w(config, clock_mhz, temperature_c):
    idle_c = config.ambient_c + config.heating_c_per_w * config.idle_power_w
    leakage_w = config.static_power_w * config.leakage_per_c * (temperature_c - idle_c)
    return GpuPhysics(config).computing_power_w(clock_mhz) + leakage_w


@pytest.mark.parametrize("tick_s", [0.0, 0.05])
def test_energies_are_those_at_the_last_temperature_however_the_gpu_warmed_up(tmp_path, tick_s):
    config = replace(CONFIG, counter_tick_s=tick_s)
    profile, visits, text = scanned(tmp_path, config)
    assert len(visits) == 4  # two kinds: after six of eleven clocks, and at the end
    assert "drift" not in text
    warmest_c = visits[-1].temperature_c
    rows = list(csv.DictReader(text.splitlines()))
    assert warmest_c - float(rows[0]["temperature_c"]) > 12
    for kind in KINDS:
        measured = profile.of(0, kind)
        errors = []
        for clock, time_s, energy_j in zip(measured.clocks_mhz, measured.times_s, measured.energies_j, strict=True):
            errors.append(energy_j / (time_s * true_power_w(config, clock, warmest_c)) - 1)
        assert max(map(abs, errors)) < (0.003 if tick_s == 0 else 0.02)
    as_found = float(rows[0]["time"]) * true_power_w(config, 1410, float(rows[0]["temperature_c"]))
    assert float(rows[0]["energy"]) > 1.01 * as_found  # it was cold then
    assert all(float(row["power_seen_w"]) > 60 for row in rows)


def test_how_long_clocks_take_is_measured_and_reaches_the_planner(tmp_path):
    config = replace(CONFIG, leakage_per_c=0.0, clock_latency_s=0.004, clock_rise_latency_s=0.012, forward_s=0.04)
    latency = scanned(tmp_path, config)[0].switch_latency
    for before, after, seconds in [(1410, 1350, 0.004), (810, 1410, 0.012), (1410, 810, 0.004), (1110, 1410, 0.012)]:
        assert latency.of(before, after) == pytest.approx(seconds, abs=0.0015)
    profile, _, text = scanned(tmp_path, replace(config, clock_rise_latency_s=None))
    assert profile.switch_latency.usual_s == pytest.approx(0.004, abs=0.0006)
    assert profile.switch_latency.pairs_s == ()
    assert ":" not in text
    assert scanned(tmp_path, config, warmup_iterations=0)[0].switch_latency is not None  # from the scan's own changes


def row(power_w, temperature_c, frequency=1410, **more):
    numbers = frequency, 0.1, 0.1 * power_w, 0.0, 0.01, 10, 80.0
    return ProfileRow(0, "forward", *numbers, temperature_c=temperature_c, **more)


def test_what_the_temperature_does_not_explain_is_flagged_and_uncertain():
    rows = [row(400.0, 50.0), row(300.0, 55.0, 1200)]
    explained = without_drift(rows, [row(404.0, 60.0), row(402.0, 55.0)], 0.005)
    assert [one.energy for one in explained] == pytest.approx([40.2, 30.0])  # 0.4 W a degree, to 55 degrees
    assert not any(one.flags for one in explained)
    assert explained[0].p2p_blocking_power_w == pytest.approx(82.0)
    for visit in (row(420.0, 50.0), row(420.0, math.nan)):
        found = without_drift([replace(one, temperature_c=visit.temperature_c) for one in rows], [visit], 0.02)
        assert [one.flags for one in found] == ["drift", "drift"]
        assert found[0].energy == rows[0].energy
        assert found[0].energy_stderr > 0.02 * rows[0].energy
    slower = replace(row(400.0, 50.0), time=0.105, energy=42.0)
    assert without_drift(rows, [slower], 0.02)[0].flags == "drift"
    assert without_drift(rows, [], 0.02) == rows


def test_noise_is_not_taken_for_drift():
    rows = [replace(row(400.0, 50.0), energy_stderr=0.4), row(300.0, 55.0, 1200)]
    visits = [replace(row(403.0, 56.0), energy_stderr=0.4), replace(row(399.0, 58.0), energy_stderr=0.4)]
    found = without_drift(rows, visits, 0.02)
    assert [one.energy for one in found] == [one.energy for one in rows]
    assert found[0].energy_stderr > 0.4  # there may be some all the same
    assert not found[0].flags
