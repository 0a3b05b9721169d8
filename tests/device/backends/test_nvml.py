"""`NvmlGpu` through the real pynvml, on a driver compiled for the test."""

from __future__ import annotations

import os
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
    script = (
        "from lightning_pfo.device import open_gpu as o; g = o('nvml', 0); "
        "print(g.power_mw(), g.temperature_c(), *g.clock_limits())"
    )
    output = run(fake_driver.environment(old=old, average_mw=250_000, reasons="0x20", celsius=61), "-c", script)
    assert output == f"{power_mw} 61.0 thermal\n"


CLAIM = """
import logging, os, sys
logging.basicConfig(stream=sys.stdout)
from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device import GpuConfig, open_gpu
for share in (False, True):
    gpu = open_gpu(GpuConfig(kind="nvml", share=share), 0)
    try:
        gpu.lock_graphics_clock(gpu.supported_clocks_mhz()[-1])
        print("locked")
    except DeviceError as error:
        print("refused:", error)
    gpu.close()
"""


def test_a_gpu_in_instances_is_never_set(fake_driver: FakeDriver) -> None:
    environment = fake_driver.environment(mig=1) | {"CUDA_VISIBLE_DEVICES": "MIG-1-0,MIG-1-1"}
    output = run(environment, "-c", CLAIM)
    assert "Fake GPU 1 is split into MIG instances" in output
    assert (
        output.count("refused: The clocks of Fake GPU 1 (GPU-11111111-fake) are left alone: it is split into MIG") == 2
    )
    assert fake_driver.changes() == []
    assert fake_driver.leases() == []


def test_a_gpu_that_others_use_is_set_only_if_told_that_it_is_shared(fake_driver: FakeDriver) -> None:
    others = run(fake_driver.environment(processes=f"{os.getpid()},1:1,4000000"), "-c", CLAIM).splitlines()
    assert others[0].startswith("refused: Clocks are set on GPUs that nobody else uses; Fake GPU 0 (GPU-00000000-fake)")
    # the test run, which has started the process, is not another's; process 1 is on the other GPU
    assert "is left alone: 1 process of others compute on it (4000000). " in others[0]
    assert others[0].endswith("gpu.share=true (share=true of a command).")
    assert others[1:] == ["locked"]
    assert [change.clock_mhz for change in fake_driver.changes()] == [210, None]


@pytest.mark.parametrize("code", [999, 4])  # unknown, no permission
def test_where_the_processes_cannot_be_listed_a_gpu_is_taken_for_one_that_others_use(
    code: int, fake_driver: FakeDriver
) -> None:
    environment = fake_driver.environment(processes="4000000", unknown_processes="1-9", passing=code)
    refused, locked = run(environment, "-c", CLAIM).splitlines()
    assert refused.startswith("refused: Clocks are set on GPUs that nobody else uses; Fake GPU 0 (GPU-00000000-fake)")
    assert "is left alone: others may compute on it: Listing the processes on Fake GPU 0 failed: NVML says" in refused
    assert f"(code {code})" in refused
    assert refused.endswith("gpu.share=true (share=true of a command).")
    assert locked == "locked"
    assert [change.clock_mhz for change in fake_driver.changes()] == [210, None]


def test_a_list_of_processes_that_fails_once_is_asked_for_again(fake_driver: FakeDriver) -> None:
    assert run(fake_driver.environment(unknown_processes="1-1"), "-c", CLAIM) == "locked\n" * 2


@pytest.mark.parametrize("code", [3, 13])  # not supported, no such function
def test_a_driver_that_never_lists_processes_is_told_of_once(code: int, fake_driver: FakeDriver) -> None:
    output = run(fake_driver.environment(unknown_processes="1-9", passing=code), "-c", CLAIM * 2)
    assert output.count("WARNING") == output.count("does not tell which processes compute on Fake GPU 0") == 1
    assert "gpu.share=true" in output
    assert output.count("locked\n") == 4


def test_a_low_clock_that_nothing_explains_is_taken_for_somebody_s_lock(fake_driver: FakeDriver) -> None:
    by_hand = """
import pynvml
pynvml.nvmlInit()
pynvml.nvmlDeviceSetGpuLockedClocks(pynvml.nvmlDeviceGetHandleByIndex(0), 1200, 1200)
"""
    run(fake_driver.environment(), "-c", by_hand)
    seen = run(fake_driver.environment(), "-c", CLAIM)
    assert "is left alone: it runs at 1200 of 1410 MHz without a reason, so somebody seems to have locked it" in seen
    assert seen.endswith("locked\n")
    run(fake_driver.environment(), "-c", by_hand)
    explained = run(fake_driver.environment(reasons="0x1"), "-c", CLAIM)  # an idle GPU lowers its clock by itself
    assert explained == "locked\n" * 2


@pytest.mark.parametrize(("clock_list", "clocks"), [("none", (1410, 705, 48)), ("unknown", (1410, 1410, 1))])
def test_gpus_that_list_no_clocks_can_be_opened(
    clock_list: str, clocks: tuple[int, ...], fake_driver: FakeDriver
) -> None:
    script = """
from lightning_pfo.device import open_gpu
clocks = open_gpu("nvml", 0).supported_clocks_mhz()
print(clocks[0], clocks[-1], len(clocks))
"""
    output = run(fake_driver.environment(clock_list=clock_list), "-c", script + CLAIM).splitlines()
    assert output[0] == "{} {} {}".format(*clocks)
    if clock_list == "none":
        assert output[1:] == ["locked"] * 2
    else:
        assert all("left alone: its driver does not tell which clocks it supports" in line for line in output[1:])
        assert fake_driver.changes() == []


def test_the_energy_of_a_gpu_in_a_module_is_its_own(fake_driver: FakeDriver) -> None:
    script = """
from lightning_pfo.device import open_gpu
from lightning_pfo.device.report import watch_counter
print(watch_counter(open_gpu("nvml", 0), 0.01))
"""
    assert run(fake_driver.environment(module=1), "-c", script) == "('power', None)\n"


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


@pytest.mark.parametrize("code", [999, 10])  # unknown, timeout
def test_what_fails_once_for_a_reason_that_passes_is_tried_again(code: int, fake_driver: FakeDriver) -> None:
    script = """
from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device import open_gpu
from lightning_pfo.device.energy.reader import EnergyReader
gpu = open_gpu("nvml", 0)
print(len(gpu.supported_clocks_mhz()), gpu.total_energy_mj() > 0)
reader = EnergyReader(gpu)  # fails twice
try:
    reader.energy_j()
except DeviceError as error:
    print(error)
reader.close()
"""
    clocks, error = run(
        fake_driver.environment(unknown_clocks="1-1", unknown_energy="2-3", passing=code), "-c", script
    ).splitlines()
    assert clocks == "81 True"
    assert error.startswith("Reading the energy counter of Fake GPU 0 failed: NVML says ")
    assert f"(code {code})" in error


def test_a_name_that_is_no_text_is_read_as_far_as_it_can_be(fake_driver: FakeDriver) -> None:
    environment = fake_driver.environment() | {"FAKE_NVML_NAME": os.fsdecode(b"A\xff")}
    script = "from lightning_pfo.device import open_gpu; print(ascii(open_gpu('nvml', 1).name))"
    assert run(environment, "-c", script).strip() == ascii("A\ufffd 1")


@pytest.mark.parametrize("backend", ["nvml", "zeus"])
def test_clocks_are_unlocked_although_other_code_has_shut_nvml_down(backend: str, fake_driver: FakeDriver) -> None:
    if backend == "zeus":
        pytest.importorskip("zeus")
    script = f"""
import pynvml
from lightning_pfo.device import ClockController, open_gpu
gpu = open_gpu({backend!r}, 1)
clocks = ClockController(gpu)
clocks.request(600)
assert clocks.wait(30)
pynvml.nvmlShutdown()
print(gpu.graphics_clock_mhz(), gpu.total_energy_mj() > 0)  # started again
pynvml.nvmlShutdown()
clocks.close()
print(gpu.graphics_clock_mhz())
pynvml.nvmlShutdown()
gpu.close()
"""
    assert run(fake_driver.environment(), "-c", script) == "600 True\n1410\n"
    assert fake_driver.leases() == []


@pytest.mark.parametrize("ask", ["open_gpu('nvml', 1).close()", "nvml_available()"])
def test_nvml_that_cannot_be_left_ends_nothing(ask: str, fake_driver: FakeDriver) -> None:
    script = f"""
import logging, pynvml
logging.basicConfig()
def fails():
    raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
pynvml.nvmlShutdown = fails
from lightning_pfo.device import open_gpu
from lightning_pfo.device.backends.nvml import nvml_available
{ask}
print("done")
"""
    assert run(fake_driver.environment(), "-c", script).endswith("done\n")


def test_importing_the_device_layer_loads_neither_pynvml_nor_torch(fake_driver: FakeDriver) -> None:
    script = """
import sys
import lightning_pfo.device
lightning_pfo.device.open_gpu("emulated_a100", 0)
print(sorted({"pynvml", "torch", "lightning", "pandas"} & set(sys.modules)))
"""
    assert run(fake_driver.environment(), "-c", script) == "[]\n"


def test_older_pynvml_versions_return_bytes() -> None:
    assert nvml.text(b"NVIDIA A40") == nvml.text("NVIDIA A40") == "NVIDIA A40"
