"""A square wave tells how counters look at power: emulated ones, and, through the real pynvml, the fake driver's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lightning_pfo.core.errors import ConfigurationError, DeviceError
from lightning_pfo.device import load_gpu_config, open_gpu
from lightning_pfo.device.gpu import Gpu
from lightning_pfo.experiment.gpu_loads.load import load_of
from lightning_pfo.experiment.gpu_loads.square_wave import calibrate_counter
from tests.device.driven_gpu import POWERS_W
from tests.device.fake_driver import PROJECT, FakeDriver, fake_driver
from tests.launch import run_script

__all__ = ["fake_driver"]


def emulated(**settings: float) -> Gpu:
    return open_gpu(replace(load_gpu_config("emulated_a100"), noise=0.02, **settings), 0)


@pytest.mark.parametrize(
    ("settings", "words", "lag_s"),
    [
        ({"counter_tick_s": 0.1, "counter_lag_s": 0.012}, "all power", 0.012),
        ({"counter_tick_s": 0.1, "counter_window_s": 0.057, "counter_lag_s": 0.03}, "the mean of 57 ms", 0.03),
        ({"counter_tick_s": 0.1, "power_ramp_s": 0.03}, "a filter of 30 ms", 0.0),
    ],
)
def test_looks_and_lags_of_emulated_counters_are_found(settings: dict[str, float], words: str, lag_s: float) -> None:
    gpu = emulated(**settings)
    calibration = calibrate_counter(gpu, load_of(gpu))
    assert calibration.describe().startswith(words)
    assert calibration.looks[0].lag_s == pytest.approx(lag_s, abs=0.0012)  # half the time between two polls
    assert sum(look.weight for look in calibration.looks) == pytest.approx(1)


@pytest.mark.parametrize(
    ("settings", "error"), [({}, "is continuous. Nothing to do."), ({"counter_tick_s": 1.0}, "takes 40 ticks")]
)
def test_what_cannot_be_calibrated_is_said(settings: dict[str, float], error: str) -> None:
    gpu = emulated(**settings)
    with pytest.raises(DeviceError, match=error):
        calibrate_counter(gpu, load_of(gpu))


def test_a_real_gpu_takes_cuda() -> None:
    with pytest.raises(ConfigurationError, match="takes CUDA"):
        load_of(object())  # type: ignore[arg-type]


def test_counters_of_the_fake_driver_are_read_rightly_and_few_ticks_do_once_they_are_known(
    fake_driver: FakeDriver,
    tmp_path,
) -> None:
    """Varying power through pynvml, sampler and attribution; what is claimed covers the truth, and is sharp at 50."""
    counters = {
        "tick_ms=100": "all power",
        "tick_ms=100,window_ms=57,lag_ms=12": "the mean of 57 ms, 11",
        "tick_ms=20,window_ms=100": "the mean of 100 ms",
        "tick_ms=100,ramp_ms=30": "a filter of 30 ms",
        "tick_ms=100,lag_ms=5,call_ms=8": "all power",
        "tick_ms=100,window_ms=100,call_ms=8": "the mean of 100 ms",
    }
    environment = fake_driver.environment(num_gpus=1)
    names = [name for name in environment if name.startswith(("FAKE_", "LD_", "LIGHTNING_"))]
    settings = {name: environment[name] for name in names} | {"XDG_CACHE_HOME": str(tmp_path)}
    printed = run_script(PROJECT / "tests" / "device" / "driven_gpu.py", *counters, **settings).stdout
    outcomes = [json.loads(line) for line in printed.splitlines()]
    for words, found in zip(counters.values(), outcomes, strict=True):
        assert found["look"].startswith(words)
        assert found["clocks"] == [210, 1410, ""]  # an idle GPU's is nobody's lock
        for phase in ("many", "few", "calibrated"):
            for kind, (power_w, stderr_w) in found[phase].items():
                assert abs(power_w - POWERS_W[kind]) < 2 * stderr_w, (words, phase, kind)
                assert phase == "few" or stderr_w < 0.04 * POWERS_W["forward"], (words, phase, kind)
    assert sum(found["few"]["forward"][1] > 10 * found["calibrated"]["forward"][1] for found in outcomes) >= 2
    assert fake_driver.changes() == []
    assert fake_driver.leases() == []
