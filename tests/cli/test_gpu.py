from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_pfo import cli
from lightning_pfo.cli import gpu as gpu_command
from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device import gpu_config_from, load_gpu_config, open_gpu
from tests.device.fake_driver import FakeDriver, fake_driver

__all__ = ["fake_driver"]


def run(environment: dict[str, str], *settings: str) -> str:
    command = [sys.executable, "-m", "lightning_pfo", "gpu", "watch_s=0.05", *settings]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_real_gpus_as_json(fake_driver: FakeDriver) -> None:
    reports = json.loads(run(fake_driver.environment(num_gpus=2), "json=true"))
    assert [report["uuid"] for report in reports] == ["GPU-00000000-fake", "GPU-11111111-fake"]
    first = reports[0]
    assert (first["name"], first["is_emulated"], first["index"]) == ("Fake GPU 0", False, 0)
    assert (first["top_clock_mhz"], first["min_clock_mhz"], first["clock_step_mhz"]) == (1410, 210, 15)
    assert first["num_clocks"] == 81
    assert (first["scan_max_mhz"], first["scan_min_mhz"], first["scan_step_mhz"]) == (1410, 705, 30)
    assert first["may_set_clocks"] is None
    assert "probe=true tests it" in first["permission"]
    assert first["energy_source"] == "counter"


def test_clocks_are_touched_only_where_that_is_asked_for_and_nobody_else_is(fake_driver: FakeDriver) -> None:
    assert "unknown" in run(fake_driver.environment())
    assert fake_driver.changes() == []
    output = " ".join(run(fake_driver.environment(processes="1:4000000"), "probe=true").split())
    assert "Fake GPU 1 (GPU-11111111-fake) is left alone: 1 process of others compute on it (4000000)" in output
    assert {change.gpu for change in fake_driver.changes()} == {0}
    assert "yes" in run(fake_driver.environment(processes="1:4000000"), "probe=true", "share=true")
    assert {change.gpu for change in fake_driver.changes()} == {0, 1}


def test_the_probe_leaves_no_trace(fake_driver: FakeDriver) -> None:
    run(fake_driver.environment(), "probe=true")
    for gpu in (0, 1):
        changes = [change.clock_mhz for change in fake_driver.changes() if change.gpu == gpu]
        assert changes == [1410, None, *[1050, 1410] * 4, None]
    assert fake_driver.leases() == []


def test_the_latency_of_changes_is_reported(fake_driver: FakeDriver) -> None:
    (report,) = json.loads(run(fake_driver.environment(num_gpus=1, landing_ms=30), "json=true", "probe=true"))
    assert 0.03 <= report["clock_latency_s"] <= report["clock_latency_p90_s"]
    capped = run(fake_driver.environment(num_gpus=1, cap_mhz=1000), "--json", "--probe")  # no request is reached
    assert json.loads(capped)[0]["clock_latency_s"] is None


def test_a_driver_that_ignores_changes_has_no_latency(fake_driver: FakeDriver) -> None:
    (report,) = json.loads(run(fake_driver.environment("ignores", num_gpus=1), "json=true", "probe=true"))
    assert report["clock_latency_s"] is None


def test_no_permission_says_how_to_get_it(fake_driver: FakeDriver) -> None:
    output = " ".join(run(fake_driver.environment("no_permission", num_gpus=1), "probe=true").split())
    assert "needs root or the capability CAP_SYS_ADMIN" in output
    assert "set ZEUSD_SOCK_PATH to its socket, and use gpu=zeus (pip install 'lightning-pfo[zeus]'" in output
    unsupported = " ".join(run(fake_driver.environment("not_supported", num_gpus=1), "probe=true").split())
    assert "GPU or driver cannot do it" in unsupported
    assert "root" not in unsupported  # which would not help
    assert fake_driver.changes() == []


def test_a_gpu_that_fails_does_not_hide_the_others(fake_driver: FakeDriver, tmp_path: Path) -> None:
    environment = fake_driver.environment(num_gpus=3, failing_gpu=1)
    command = [
        sys.executable,
        "-m",
        "lightning_pfo",
        "gpu",
        "watch_s=0.05",
        "json=true",
        f"write={tmp_path / 'x.yaml'}",
    ]
    done = subprocess.run(
        [*command, "index=2"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        "lightning-pfo: error: GPU 1: Reading the energy counter of Fake GPU 1 failed: NVML says 'GPU"
    )
    assert [report["index"] for report in json.loads(done.stdout)] == [0, 2]
    assert "Fake GPU 2" in (tmp_path / "x.yaml").read_text()


def test_clocks_that_the_probe_cannot_restore_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        def close(self) -> None:
            raise DeviceError("Unlocking failed.")

    monkeypatch.setattr(gpu_command, "open_gpu", lambda *_: Stuck())
    monkeypatch.setattr(gpu_command, "report_gpu", lambda *_, **__: None)
    with pytest.raises(DeviceError, match=r"Unlocking failed\. .* lightning-pfo restore-clocks tries again"):
        gpu_command.run(gpu_command.Settings(gpu="emulated_a40", probe=True))


def test_no_counter_means_power_integration(fake_driver: FakeDriver) -> None:
    (report,) = json.loads(run(fake_driver.environment("no_energy_counter", num_gpus=1), "json=true"))
    assert (report["energy_source"], report["counter_tick_s"]) == ("power", None)


def test_a_written_configuration_works(fake_driver: FakeDriver, tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    path = tmp_path / "new" / "fake_gpu.yaml"
    assert "gpu=fake_gpu" in run(fake_driver.environment(), "--write", str(path), "--index=1").replace("\n", " ")
    config = gpu_config_from(OmegaConf.to_container(OmegaConf.load(path)))  # type: ignore[arg-type]
    assert (config.kind, config.model) == ("nvml", "Fake GPU 1")
    assert (config.scan_max_mhz, config.scan_min_mhz, config.scan_step_mhz) == (1410, 705, 30)


def test_an_emulated_gpu_is_written_with_its_physics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from omegaconf import OmegaConf

    path = tmp_path / "copy.yaml"
    assert cli.main(["gpu", "gpu=emulated_a40", "json=true", "probe=true", "watch_s=0.02", f"write={path}"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["name"] == "NVIDIA A40 (emulated, virtual time)"
    assert (report["uuid"], report["is_emulated"], report["may_set_clocks"]) == ("", True, True)
    original, copy = load_gpu_config("emulated_a40"), gpu_config_from(OmegaConf.to_container(OmegaConf.load(path)))  # type: ignore[arg-type]
    assert copy.power_limit_w == original.power_limit_w
    assert copy.voltage_rise == original.voltage_rise
    assert open_gpu(copy, 0).supported_clocks_mhz() == open_gpu(original, 0).supported_clocks_mhz()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("watch_s=0", "between 0.001 and 3600"),
        ("index=3", "from 0 to 0; got 3"),
        ("write=copy.json", "ends in .yaml; got 'copy.json'. Use write=copy.yaml"),
        ("write=7", "a name of letters, digits and _, or a path that ends in .yaml; got '7'. Use write=my_gpu"),
        ("write=true", "got 'true'. Use write=my_gpu"),  # --write alone
        ("write=auto", "There is a gpu=auto already; got write=auto. Use write=auto_2"),
        (
            "write=/proc/nobody/x.yaml",
            "a folder that you may write to; got '/proc/nobody/x.yaml' (/proc/",
        ),
    ],
)
def test_impossible_settings(setting: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["gpu", "gpu=emulated_a100", "watch_s=0.02", "probe=false", f"write={tmp_path / 'x.yaml'}", setting]
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_written_to_where_it_is_found_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, mine = tmp_path / "package", tmp_path / "home" / "lightning-pfo" / "conf"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    (ours / "gpu").mkdir(parents=True)
    monkeypatch.setattr("lightning_pfo.cli.gpu.conf_dir", lambda: ours)
    arguments = ["gpu", "gpu=emulated_a40", "watch_s=0.02", "probe=false"]
    assert cli.main([*arguments, "write=one"]) == 0
    assert capsys.readouterr().out.endswith(f"written to {ours / 'gpu' / 'one.yaml'}; use it with gpu=one\n")
    (ours / "gpu" / "one.yaml").unlink()
    (ours / "gpu").rmdir()
    (ours / "gpu").write_text("nothing can be written into this")  # root may write into read-only folders
    assert cli.main([*arguments, "write=one"]) == 0
    assert capsys.readouterr().out.endswith(f"written to {mine / 'gpu' / 'one.yaml'}; use it with gpu=one\n")
    assert cli.main(["gpu", "gpu=one", "watch_s=0.02", "json=true"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "NVIDIA A40 (emulated, virtual time)"
    path = tmp_path / "conf" / "gpu" / "two.yaml"
    assert cli.main([*arguments, f"write={path}"]) == 0
    assert capsys.readouterr().out.endswith(f"use it with --config-dir {tmp_path / 'conf'} gpu=two\n")


def test_a_counter_is_calibrated_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One without a driver has nowhere to keep it; a continuous one has nothing to be found."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (config := tmp_path / "lightning-pfo" / "conf" / "gpu" / "ticking.yaml").parent.mkdir(parents=True)
    config.write_text("defaults: [emulated_a40]\ncounter_tick_s: 0.1\ncounter_window_s: 0.1\n")
    assert cli.main(["gpu", "gpu=ticking", "watch_s=0.02", "calibrate=true", "json=true"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)[0]["name"] == "NVIDIA A40 (emulated, virtual time)"
    assert " shows the mean of 100 ms, " in err
    assert "(not kept: there is no driver)." in err
    assert cli.main(["gpu", "gpu=emulated_a40", "watch_s=0.02", "calibrate=true"]) == 2
    assert "is continuous. Nothing to do." in capsys.readouterr().err
