"""What is known of a counter helps where its ticks tell little, is doubted where they say otherwise, and is kept."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_pfo.device.energy.attribution import mean_powers
from lightning_pfo.device.energy.calibration import calibrate, calibration_path, known_calibration, save_calibration
from lightning_pfo.device.energy.known_looks import Calibration, KnownLook
from lightning_pfo.device.energy.trace import EnergyTrace
from tests.device.energy import test_counters
from tests.device.energy.test_counters import Counter, outcome

WINDOW = Calibration("NVIDIA A100/80", "570.86", 297, (KnownLook(1.0, 0.03, 1e-5, 1.0, 0.1, 0.0),))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attribution with a calibration that says: a window of 100 ms, 30 ms late."""
    monkeypatch.setattr(
        test_counters,
        "mean_powers",
        lambda trace, intervals: mean_powers(replace(trace, calibration=WINDOW), intervals),
    )


def few_repeats(counter: Counter) -> tuple[float, float]:
    """Root-mean-square error and median standard error of 12 repeats; all claims hold."""
    counter.run = lambda seed, repeats=12: Counter.run(counter, seed, repeats)  # type: ignore[method-assign]
    errors, stderrs = outcome(counter, seeds=6)
    assert np.mean(np.abs(errors) < 2 * stderrs) > 0.88
    return float(np.sqrt(np.mean(errors**2))), float(np.median(stderrs))


def test_few_ticks_do_where_the_counter_is_known(request: pytest.FixtureRequest) -> None:
    before = few_repeats(Counter(window_s=0.1, lag_s=0.03))
    request.getfixturevalue("known")
    error, stderr = few_repeats(Counter(window_s=0.1, lag_s=0.03))
    assert error < before[0] / 3
    assert stderr < before[1] / 3


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("counter", [Counter(), Counter(smoothing_s=0.045)], ids=["plain", "filter"])
def test_a_calibration_that_does_not_hold_is_found_out(counter: Counter) -> None:
    errors, stderrs = outcome(counter, seeds=3)
    assert np.max(np.abs(errors)) < 0.03
    assert np.mean(np.abs(errors) < 2 * stderrs) > 0.83


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return SimpleNamespace(name=WINDOW.gpu, driver_version=WINDOW.driver)


def test_it_is_kept_for_a_model_and_a_driver(gpu: Any, tmp_path: Path) -> None:
    assert known_calibration(gpu) is None
    path = save_calibration(WINDOW)
    assert path == tmp_path / "lightning-pfo" / "counters" / "NVIDIA_A100_80_driver_570.86.json"
    assert known_calibration(gpu) == WINDOW
    gpu.name += " (dry run)"
    assert known_calibration(gpu) == WINDOW
    gpu.driver_version = "580.1"
    assert known_calibration(gpu) is None
    gpu.driver_version = ""
    assert known_calibration(gpu) is None


def test_a_dry_run_calibrates_the_gpu_itself(gpu: Any) -> None:
    gpu.name += " (dry run)"
    busy = [(0.37 * number, 0.37 * number + 0.1 + 0.002 * number) for number in range(30)]
    trace = EnergyTrace([0.1 * tick for tick in range(100)], [20.0 * tick for tick in range(100)], 0.001)
    save_calibration(calibrate(gpu, trace, busy))
    gpu.name = WINDOW.gpu
    assert known_calibration(gpu) is not None


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.update(version=2),
        lambda content: content["looks"][0].update(window_s=-1.0),
        lambda content: content["looks"][0].update(weight=0.5),
        lambda content: content["looks"][0].update(lag_s="nan"),
        lambda content: content["looks"][0].pop("part"),
        lambda content: content.update(looks=3),
        lambda content: content.clear(),
    ],
)
def test_a_damaged_file_is_a_warning(damage: Any, gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    content = json.loads(save_calibration(WINDOW).read_text())
    damage(content)
    calibration_path(gpu.name, gpu.driver_version).write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        assert known_calibration(gpu) is None
    assert "lightning-pfo gpu calibrate=true" in caplog.text
