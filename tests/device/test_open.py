from __future__ import annotations

import logging

import pytest

from lightning_pfo.core.errors import ConfigurationError, DeviceError
from lightning_pfo.device import EmulatedGpu, Gpu, load_gpu_config, open_gpu
from lightning_pfo.device.backends import nvml
from lightning_pfo.device.report import probe_permission


class OpenedNvmlGpu:
    def __init__(self, index: int) -> None:
        self.index = index


@pytest.fixture
def real_gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    count: int = request.param
    monkeypatch.setattr(nvml, "visible_gpu_count", lambda: count)
    monkeypatch.setattr(nvml, "NvmlGpu", OpenedNvmlGpu)
    monkeypatch.setattr("lightning_pfo.device.open._said", [])
    return count


def with_real_gpus(count: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("real_gpus", [count], indirect=True)


@with_real_gpus(0)
def test_auto_without_nvml_is_emulated_and_says_so_once(real_gpus: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        gpus = [open_gpu("auto", index) for index in range(4)]
    assert all(gpu.is_emulated and isinstance(gpu, EmulatedGpu) for gpu in gpus)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "emulated NVIDIA A100" in caplog.text


@with_real_gpus(2)
def test_auto_takes_real_gpus(real_gpus: int, caplog: pytest.LogCaptureFixture) -> None:
    gpu = open_gpu("auto", 1, num_gpus=2)
    assert isinstance(gpu, OpenedNvmlGpu)
    assert gpu.index == 1
    assert caplog.text == ""


@with_real_gpus(2)
def test_auto_never_mixes_real_and_emulated(real_gpus: int, caplog: pytest.LogCaptureFixture) -> None:
    gpus = [open_gpu("auto", index, num_gpus=4) for index in range(4)]
    assert all(isinstance(gpu, EmulatedGpu) for gpu in gpus)
    assert "only 2 of the 4 GPUs needed" in caplog.text


@with_real_gpus(2)
@pytest.mark.parametrize("choice", ["auto", "nvml"])
def test_more_ranks_than_gpus(real_gpus: int, choice: str) -> None:
    with pytest.raises(ConfigurationError, match=r"3 ranks on this node, but NVML sees 2 .*Use 2 ranks"):
        open_gpu(choice, 2)


@with_real_gpus(2)
def test_emulated_is_emulated_wherever_it_runs(real_gpus: int, caplog: pytest.LogCaptureFixture) -> None:
    gpu = open_gpu("emulated_a40", 7)
    assert gpu.name == "NVIDIA A40 (emulated, virtual time)"
    assert isinstance(gpu, Gpu)
    assert caplog.text == ""  # asked for, so nothing to warn of


def test_nvml_without_a_driver_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    if nvml.nvml_available():
        pytest.skip("this machine has an NVIDIA GPU")
    with pytest.raises(DeviceError, match=r"Starting NVML failed.*emulated_a100"):
        open_gpu("nvml", 0)


def test_an_open_gpu_and_a_configuration_are_taken_as_they_are() -> None:
    config = load_gpu_config("emulated_h100")
    gpu = open_gpu(config, 3)
    assert isinstance(gpu, EmulatedGpu)
    assert gpu.config is config
    assert gpu.index == 3
    assert open_gpu(gpu, 0) is gpu


def test_unknown_choice() -> None:
    with pytest.raises(ConfigurationError, match="gpu is one of auto, emulated_a100"):
        open_gpu("quantum", 0)


def test_a_dry_run_does_everything_but_change_clocks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_gpu_config("nvml")
    config.dry_run = True
    real = EmulatedGpu(load_gpu_config("emulated_a40"))
    monkeypatch.setattr(nvml, "visible_gpu_count", lambda: 1)
    monkeypatch.setattr(nvml, "NvmlGpu", lambda index: real)
    with caplog.at_level(logging.WARNING):
        gpu = open_gpu(config, 0)
    assert isinstance(gpu, Gpu)
    assert gpu.name == f"{real.name} (dry run)"
    assert "are not changed" in caplog.text
    assert probe_permission(gpu) == (None, "not tested (dry_run=true)")
    gpu.claim_clocks()
    gpu.lock_graphics_clock(1200)
    with pytest.raises(DeviceError, match=r"got 1201 MHz"):
        gpu.lock_graphics_clock(1201)
    gpu.restore()
    assert not real._requests
    assert gpu.graphics_clock_mhz() == 1740
    assert gpu.power_mw() == real.power_mw()
    assert gpu.total_energy_mj() <= real.total_energy_mj()
    gpu.close()
