"""GPU 0 of the fake driver under a load of known power, in virtual time: the real pynvml reads its energy counter.

As a program, with the counters to try as arguments (`tick_ms=100,window_ms=57 ...`), it prints what `outcome` finds.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
from collections.abc import Mapping
from typing import Any

from lightning_pfo.device.backends.nvml import NvmlGpu
from lightning_pfo.device.emulated.time import VirtualTime
from lightning_pfo.device.energy.attribution import mean_powers
from lightning_pfo.device.energy.calibration import calibration_path, save_calibration
from lightning_pfo.device.energy.sampler import EnergySampler
from lightning_pfo.experiment.gpu_loads.square_wave import calibrate_counter

POWERS_W = {"forward": 300.0, "backward": 250.0, "wait": 80.0}
IDLE_W = 60.0
COUNTER = ("tick_ms", "lag_ms", "window_ms", "ramp_ms")


class DrivenGpu(NvmlGpu):
    """Calls take up to `call_s`, as under contention; time passes where somebody sleeps."""

    def __init__(self, call_s: float) -> None:
        super().__init__(0)
        self._driver = ctypes.CDLL("libnvidia-ml.so.1")
        self._driver.fake_time.argtypes = [ctypes.c_double]
        self._driver.fake_power.argtypes = [ctypes.c_int, ctypes.c_double]
        self._chance = random.Random(1)
        self._call_s = call_s
        self.time_source = VirtualTime()

    def total_energy_mj(self) -> float:
        """The driver's, in a call that takes its time."""
        self.time_source.sleep(self._chance.uniform(0, self._call_s / 2))
        self._driver.fake_time(self.time_source.now_s())
        energy_mj = super().total_energy_mj()
        self.time_source.sleep(self._chance.uniform(0, self._call_s / 2))
        return energy_mj

    def draw(self, power_w: float, seconds: float) -> tuple[float, float]:
        """Draw so much for so long; returns begin and end."""
        begin_s = self.time_source.now_s()
        self._driver.fake_time(begin_s)
        self._driver.fake_power(0, power_w)
        self.time_source.sleep(seconds)
        self._driver.fake_time(self.time_source.now_s())
        self._driver.fake_power(0, IDLE_W)
        return begin_s, self.time_source.now_s()

    def clocks_and_lock(self) -> tuple[int, int, str]:
        """Clocks (MHz) without and with load, where idle GPUs lower theirs; whose lock the former is taken for."""
        os.environ["FAKE_NVML_IDLE_MHZ"] = "210"
        idle_mhz, lock = self.graphics_clock_mhz(), self._whose_lock()
        self._driver.fake_power(0, POWERS_W["forward"])
        busy_mhz = self.graphics_clock_mhz()
        self._driver.fake_power(0, IDLE_W)
        return idle_mhz, busy_mhz, lock

    # a load, for square waves

    def busy(self, seconds: float) -> None:
        """As an instruction."""
        self.draw(POWERS_W["forward"], seconds)

    def blocked(self, seconds: float) -> None:
        """As waiting."""
        self.draw(POWERS_W["wait"], seconds)

    def idle(self, seconds: float) -> None:
        """Nothing."""
        self.draw(IDLE_W, seconds)


def train(gpu: DrivenGpu, repeats: int, seed: int) -> dict[str, tuple[float, float]]:
    """Mean powers of the kinds with their standard errors, as ticks of the counter tell them."""
    chance = random.Random(seed)
    intervals: dict[str, list[tuple[float, float]]] = {kind: [] for kind in POWERS_W}
    sampler = EnergySampler(gpu)
    sampler.start()
    gpu.idle(0.3)
    begin_s = gpu.time_source.now_s()
    for number in range(repeats):
        for kind in ("forward", "backward"):
            intervals["wait"].append(gpu.draw(POWERS_W["wait"], chance.uniform(0.001, 0.03)))
            intervals[kind].append(gpu.draw(POWERS_W[kind], 0.02))
        if number % 12 == 11:
            gpu.idle(0.012)
    gpu.idle(0.2)
    trace = sampler.trace(begin_s)
    sampler.stop()
    return {kind: (power.power_w, power.stderr_w) for kind, power in mean_powers(trace, intervals).items()}


def outcome(counter: Mapping[str, float]) -> dict[str, Any]:
    """Powers of 50 repeats, and of 12 before and after a square wave has told of the counter."""
    for name in COUNTER:
        os.environ[f"FAKE_NVML_{name.upper()}"] = str(counter.get(name, 0.0))
    gpu = DrivenGpu(counter.get("call_ms", 0.0) / 1000)
    gpu.idle(0.5)
    many, few = train(gpu, 50, 1), train(gpu, 12, 2)
    calibration = calibrate_counter(gpu, gpu)
    path = save_calibration(calibration)
    assert path == calibration_path(gpu.name, gpu.driver_version)
    calibrated = train(gpu, 12, 2)
    path.unlink()
    clocks = gpu.clocks_and_lock()
    gpu.close()
    return {"many": many, "few": few, "calibrated": calibrated, "look": calibration.describe(), "clocks": clocks}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        pairs = (pair.split("=") for pair in argument.split(","))
        print(json.dumps(outcome({name: float(value) for name, value in pairs})), flush=True)
