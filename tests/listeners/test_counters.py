"""Scans of emulated GPUs with the counters of real ones; the truth is their model."""

import csv
from dataclasses import replace

import pytest

from lightning_pfo.core.events import InstructionListener, InstructionWork
from lightning_pfo.device import EmulatedGpu, GpuConfig
from lightning_pfo.device.emulated.physics import GpuPhysics
from lightning_pfo.listeners.profiling_run import ProfilingRun, ScanSettings
from tests.listeners.fakes import FakeSource

CONFIG = GpuConfig(kind="emulated", counter_tick_s=0.1, counter_lag_s=0.02, forward_s=0.02, seed=3)
WORK = InstructionWork(1e9, 1e6, 0.0)


class Neighbours(InstructionListener):
    """Outputs arrive after waits of several lengths, the same in every iteration."""

    def __init__(self, gpu):
        self.gpu, self.number = gpu, 0

    def on_iteration_begin(self, iteration):
        self.number = 0

    def on_instruction_begin(self, event):
        self.number += 1
        self.gpu.time_source.sleep((0.0, 0.013, 0.0, 0.021, 0.006)[self.number % 5])


def scanned(tmp_path, config, **settings):
    source, gpu = FakeSource(num_microbatches=8), EmulatedGpu(config)
    source.add_listener(Neighbours(gpu), outermost=True)
    scan = ScanSettings(iterations_per_clock=3, clock_step_mhz=300, min_clock_mhz=1000, **settings)
    with ProfilingRun(
        source, tmp_path / "profile.csv", gpu=gpu, num_gpus=1, cluster="ideal", settings=scan, report=lambda _: None
    ) as run:
        while not run.done:
            source.run_iteration(work=WORK)
    return list(csv.DictReader((tmp_path / "profile.csv").read_text().splitlines()))


@pytest.mark.parametrize(
    "options",
    [{}, {"counter_window_s": 0.1}, {"power_ramp_s": 0.03}],
    ids=str,
)
def test_a_scan_measures_on_until_claims_that_hold_are_small(tmp_path, options):
    config = replace(CONFIG, **options)
    rows = scanned(tmp_path, config)
    assert len(rows) == 4
    physics = GpuPhysics(config)
    covered = []
    for row in rows:
        clock, time_s, energy_j = int(row["frequency"]), float(row["time"]), float(row["energy"])
        true_j = physics.computing_power_w(clock) * time_s
        assert energy_j == pytest.approx(true_j, rel=0.03)
        covered.append(abs(energy_j - true_j) < 2 * float(row["energy_stderr"]))
        waiting_w, stderr_w = (float(row[f"p2p_blocking_power_{name}"]) for name in ("w", "stderr"))
        assert waiting_w == pytest.approx(physics.blocked_power_w(clock), rel=0.15)
        covered.append(abs(waiting_w - physics.blocked_power_w(clock)) < 2 * stderr_w)
        assert "energy_uncertain" not in row["flags"]
    assert sum(covered) >= 7


def test_pauses_keep_ticks_from_telling_the_same_in_every_iteration(tmp_path, monkeypatch):
    """The iteration takes four ticks at the first clock: 16 x 20 ms and 80 ms of waits."""
    config = replace(CONFIG, memory_share=0.0, clock_latency_s=0.0, scan_max_mhz=1410, counter_lag_s=0.0)
    source = FakeSource(num_microbatches=8)
    waits_s = sum((0.0, 0.013, 0.0, 0.021, 0.006)[number % 5] for number in range(1, 17))
    config = replace(config, forward_s=(0.4 - waits_s) / len(source.schedule.orders[0]))
    rows = scanned(tmp_path, config)
    assert "uncertain" not in rows[0]["flags"]
    monkeypatch.setattr(ProfilingRun, "_pause", lambda self: None)
    without = scanned(tmp_path, config)
    assert int(without[0]["samples"]) > 2 * int(rows[0]["samples"])
