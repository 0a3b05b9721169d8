from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_pfo import cli
from lightning_pfo.device import EmulatedGpu, load_gpu_config
from lightning_pfo.device.emulated.physics import GpuPhysics
from lightning_pfo.experiment.gpu_loads.p2p_power import clocks_to_measure, measure_blocked_power
from lightning_pfo.planner.profile.blocking_power import read_blocking_power
from tests.device.fake_driver import FakeDriver, fake_driver
from tests.launch import run_script

__all__ = ["fake_driver"]


MAIN = Path(cli.__file__).parents[1] / "__main__.py"


def measure(environment: dict[str, str], *settings: str) -> tuple[str, list[dict[str, float]], str]:
    output = run_script(MAIN, "p2p-power", "json=true", "seconds=0.3", *settings, **environment).stdout
    begin = output.index("{")
    report = json.loads(output[begin:])
    return report["gpu"], report["blocked"], output[:begin]


def test_an_emulated_gpu_draws_its_modelled_blocked_power(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["p2p-power", "json=true", "gpu=emulated_a100", "num_clocks=2", "seconds=2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gpu"] == "NVIDIA A100-SXM4-80GB (emulated, virtual time)"
    assert [power["clock_mhz"] for power in report["blocked"]] == [1410, 705]
    physics = GpuPhysics(load_gpu_config("emulated_a100"))
    for power in report["blocked"]:
        assert power["power_w"] == pytest.approx(physics.blocked_power_w(power["clock_mhz"]), rel=1e-3)
    (tmp_path / "power.json").write_text(json.dumps(report))
    for_the_planner = read_blocking_power(tmp_path / "power.json")
    assert for_the_planner == {power["clock_mhz"]: power["power_w"] for power in report["blocked"]}


def test_in_real_time_an_emulated_gpu_really_waits() -> None:
    gpu = EmulatedGpu(replace(load_gpu_config("emulated_a100"), time="real"))
    begin_s = time.monotonic()
    (measured,) = measure_blocked_power(gpu, 1, 0.3)
    assert time.monotonic() - begin_s >= 0.3
    assert measured.clock_mhz == 1410
    # a busy machine may interrupt a reading; in virtual time it is exact
    assert measured.power_w == pytest.approx(gpu.physics.blocked_power_w(1410), rel=0.5)


@pytest.mark.slow
def test_a_real_gpu_is_measured_and_its_clocks_restored(fake_driver: FakeDriver) -> None:
    name, blocked, _ = measure(fake_driver.environment(), "gpu=nvml", "num_clocks=2")
    assert name == "Fake GPU 0"
    assert [power["power_w"] for power in blocked] == pytest.approx([300, 300], rel=0.3)
    assert [change.clock_mhz for change in fake_driver.changes()] == [1410, 705, None]
    assert fake_driver.leases() == []


@pytest.mark.slow
def test_without_permission_its_own_clock_is_measured(fake_driver: FakeDriver) -> None:
    _, blocked, said = measure(fake_driver.environment("no_permission"), "gpu=nvml")
    assert [power["clock_mhz"] for power in blocked] == [1410]
    assert "CAP_SYS_ADMIN" in said


def test_clocks_are_spread_from_the_top_to_half_of_it() -> None:
    supported = tuple(range(1410, 209, -15))
    assert clocks_to_measure(supported, 1) == [1410]
    assert clocks_to_measure(supported, 2) == [1410, 705]
    assert clocks_to_measure(supported, 3) == [1410, 1050, 705]
    assert clocks_to_measure((1000, 900), 5) == [1000, 900]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("num_clocks=0", "num_clocks is between 1 and 1000; got 0."),
        ("num_clocks=1000000000", "num_clocks is between 1 and 1000; got 1000000000."),
        ("seconds=0", "seconds is between 0.1 and 3600; got 0.0."),
        ("seconds=-1", "seconds is between 0.1 and 3600; got -1.0."),
        ("seconds=.inf", "seconds is between 0.1 and 3600; got inf."),
        ("seconds=.nan", "seconds is between 0.1 and 3600; got nan."),
    ],
)
def test_impossible_settings(
    setting: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_pfo.cli.p2p_power.open_gpu", lambda *_: pytest.fail("it would measure without end"))
    assert cli.main(["p2p-power", "gpu=emulated_a100", setting]) == 2
    assert capsys.readouterr().err == f"lightning-pfo: error: {message}\n"


def test_more_clocks_than_there_are_is_all_of_them() -> None:
    assert clocks_to_measure((1000, 900, 800), 10**9) == [1000, 900, 800]
