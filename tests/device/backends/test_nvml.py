"""`NvmlGpu` through the real pynvml, on a driver compiled for the test."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_pfo.device import open_gpu
from lightning_pfo.device.backends import nvml
from lightning_pfo.device.backends.visible_gpus import visible_gpus
from tests.device.conformance import CHECKS
from tests.device.fake_driver import FakeDriver, fake_driver

__all__ = ["fake_driver"]


def run(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "settings", [{}, {"latency_ms": 3, "landing_ms": 10, "tick_ms": 20, "old": 1}], ids=["quick", "slow"]
)
def test_conformance_nvml(settings: dict[str, int], fake_driver: FakeDriver) -> None:
    run(fake_driver.environment(**settings), "-m", "tests.device.conformance", "nvml")
    assert fake_driver.locked_gpus() == {}


@pytest.mark.parametrize("check", CHECKS)
def test_conformance_emulated(check: str) -> None:
    CHECKS[check](open_gpu("emulated_a40", 0))


def test_nothing_is_touched_without_a_lock(fake_driver: FakeDriver) -> None:
    checks = ("restore_without_a_lock_does_nothing", "energy_and_power_agree")
    run(fake_driver.environment(), "-m", "tests.device.conformance", "nvml", *checks)
    assert fake_driver.changes() == []


VISIBLE = {
    "0,1,2": ["Fake GPU 0", "Fake GPU 1", "Fake GPU 2"],
    "2,0": ["Fake GPU 2", "Fake GPU 0"],
    "1": ["Fake GPU 1"],
    "GPU-22222222-fake, GPU-0": ["Fake GPU 2", "Fake GPU 0"],
    "": [],
    "0,-1,1": ["Fake GPU 0"],
    "7": [],
    "MIG-2-0,MIG-1-3": ["Fake GPU 2", "Fake GPU 1"],  # the GPUs that they are part of
    "MIG-7-0": [],
    "GPU-": [],  # ambiguous
    "2,0,2": [],
    "GPU-1,GPU-11111111-fake": [],
    "MIG-1-0,MIG-1-1": ["Fake GPU 1"] * 2,
    "MIG-1-0,MIG-1-0": [],
    "1,GPU-2": ["Fake GPU 1"],
    "GPU-2,1": ["Fake GPU 2"],
    "1gpu,+2,x,0": ["Fake GPU 1", "Fake GPU 2"],
}


def test_cuda_visible_devices(fake_driver: FakeDriver) -> None:
    script = f"""
import os
from lightning_pfo.device.backends.nvml import NvmlGpu, nvml_available, visible_gpu_count
assert visible_gpu_count() == 3
for visible, names in {VISIBLE!r}.items():
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    assert visible_gpu_count() == len(names), visible
    assert nvml_available() == bool(names)
    assert [NvmlGpu(i).name for i in range(len(names))] == names, visible
    for wrong in (len(names), -1):
        try:
            NvmlGpu(wrong)
        except Exception as error:
            assert f"got {{wrong}}, but {{len(names)}} are visible" in str(error), error
            assert repr(visible) in str(error)
        else:
            raise AssertionError(visible)
"""
    run(fake_driver.environment(num_gpus=3), "-c", script)


@pytest.mark.parametrize("visible", [visible for visible in VISIBLE if "-fake" not in visible and "MIG" not in visible])
def test_visible_gpus_are_those_of_torch(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import cuda

    uuids = [f"GPU-{index}" for index in range(3)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    expected = cuda._parse_visible_devices()
    if expected and isinstance(expected[0], str):
        expected = cuda._transform_uuid_to_ordinals(expected, uuids)  # type: ignore[arg-type]
    assert visible_gpus(visible, uuids, lambda mig: None) == [index for index in expected if index in range(3)]


@pytest.mark.parametrize(("code", "warnings"), [(4, 0), (15, 1)], ids=["kept from this job", "lost"])
def test_the_gpus_of_a_node_that_others_have_or_that_are_lost_do_not_count(
    code: int, warnings: int, fake_driver: FakeDriver
) -> None:
    script = """
import logging, sys
logging.basicConfig(stream=sys.stdout)
from lightning_pfo.device import open_gpu
from lightning_pfo.device.backends import nvml
print([open_gpu("nvml", index, num_gpus=2).name for index in range(nvml.visible_gpu_count())])
"""
    output = run(fake_driver.environment(num_gpus=3, refused_gpu=1, refused_code=code), "-c", script)
    assert output.count("WARNING") == output.count("GPU 1 of this node is left out") == warnings
    assert output.endswith("['Fake GPU 0', 'Fake GPU 2']\n")


@pytest.mark.parametrize(("old", "power_mw"), [(0, 300_000), (1, 250_000)])
def test_the_present_power_and_limits_are_read_by_new_names_and_old(
    old: int, power_mw: int, fake_driver: FakeDriver
) -> None:
    script = "from lightning_pfo.device import open_gpu as o; g = o('nvml', 0); print(g.power_mw(), *g.clock_limits())"
    output = run(fake_driver.environment(old=old, average_mw=250_000, reasons="0x20"), "-c", script)
    assert output == f"{power_mw} thermal\n"


def test_a_gpu_in_instances_is_one_gpu_and_says_so(fake_driver: FakeDriver) -> None:
    script = """
import logging, os, sys
logging.basicConfig(stream=sys.stdout)
from lightning_pfo.device import open_gpu
open_gpu("nvml", 0).claim_clocks()
try:
    open_gpu("nvml", 1).claim_clocks()
except Exception as error:
    print(error)
"""
    environment = fake_driver.environment() | {"FAKE_NVML_MIG": "1", "CUDA_VISIBLE_DEVICES": "MIG-1-0,MIG-1-1"}
    output = run(environment, "-c", script)
    assert "Fake GPU 1 is split into MIG instances" in output
    assert "(GPU-11111111-fake) are held by process" in output


FAILURES = {
    "not_supported": ("gpu.lock_graphics_clock(1410)", "NotSupportedError", "code 3.*Volta"),
    "no_permission": ("gpu.lock_graphics_clock(1410)", "ClockPermissionError", "root or the capability CAP_SYS_ADMIN"),
    "no_energy_counter": (
        "gpu.total_energy_mj()",
        "NotSupportedError",
        "counter of Fake GPU 0 failed.*code 3.*Volta",
    ),
    "lost_gpu": ("gpu.lock_graphics_clock(1410)", "DeviceError", "fallen off the bus"),
}


@pytest.mark.parametrize("scenario", FAILURES)
def test_failures_say_what_to_do(scenario: str, fake_driver: FakeDriver) -> None:
    call, error, message = FAILURES[scenario]
    script = f"""
import re
from lightning_pfo.core import errors
from lightning_pfo.device import open_gpu
from lightning_pfo.device.backends import nvml
gpu = open_gpu("nvml", 0)
try:
    {call}
except errors.DeviceError as error:
    assert type(error) is errors.{error}, error
    assert re.search({message!r}, str(error)), error
else:
    raise AssertionError
gpu.close()
"""
    run(fake_driver.environment(scenario), "-c", script)
    assert fake_driver.changes() == []


def test_without_a_driver_auto_is_emulated_and_nvml_says_why(fake_driver: FakeDriver) -> None:
    script = """
from lightning_pfo.device import open_gpu
from lightning_pfo.device.backends import nvml
assert open_gpu("auto", 0).is_emulated
try:
    open_gpu("nvml", 0)
except Exception as error:
    print(error)
"""
    assert "Starting NVML failed" in run(fake_driver.environment("no_driver"), "-c", script)


def test_without_permission_training_goes_on_with_one_warning(fake_driver: FakeDriver) -> None:
    script = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
from lightning_pfo.device import ClockController, open_gpu
from lightning_pfo.core.errors import ClockPermissionError
gpu = open_gpu("auto", 0)
with ClockController(gpu) as clocks:
    for clock_mhz in gpu.supported_clocks_mhz():
        clocks.request(clock_mhz)
        assert not clocks.wait(30)
    assert isinstance(clocks.error, ClockPermissionError)
    assert clocks.num_changes == 0
gpu.close()
"""
    output = run(fake_driver.environment("no_permission"), "-c", script)
    assert output.count("WARNING") == 1
    assert len(output.splitlines()) == 1
    assert "Training goes on without clock control" in output
    assert fake_driver.changes() == []


def test_importing_the_device_layer_loads_neither_pynvml_nor_torch(fake_driver: FakeDriver) -> None:
    script = """
import sys
import lightning_pfo.device
lightning_pfo.device.open_gpu("emulated_a100", 0)
print(sorted({"pynvml", "torch", "lightning", "pandas"} & set(sys.modules)))
"""
    assert run(fake_driver.environment(), "-c", script) == "[]\n"


def test_older_pynvml_versions_return_bytes() -> None:
    assert nvml._text(b"NVIDIA A40") == nvml._text("NVIDIA A40") == "NVIDIA A40"
