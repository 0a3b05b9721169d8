"""`gpu=zeus` through the real zeus package: on the fake NVML driver, with a stand-in for zeusd, on a fake amdsmi."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device import open_gpu
from tests.device.fake_driver import FakeDriver, fake_driver
from tests.waiting import wait_until

__all__ = ["fake_driver"]

HAS_ZEUS = subprocess.run([sys.executable, "-c", "import zeus"], capture_output=True, check=False).returncode == 0
needs_zeus = pytest.mark.skipif(not HAS_ZEUS, reason="the zeus package is not installed (pip install '.[zeus]')")

LOCK_AND_DIE = """
import os, signal
from lightning_pfo.device import open_gpu
gpu = open_gpu("zeus", 0)
gpu.lock_graphics_clock(gpu.supported_clocks_mhz()[4])
print(gpu.graphics_clock_mhz(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def zeusd(fake_driver: FakeDriver, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a client of zeusd that itself may not set clocks."""
    socket = tmp_path / "zeusd.sock"
    command = [sys.executable, "-m", "tests.device.fake_zeusd", str(socket)]
    daemon = subprocess.Popen(command, env=fake_driver.environment(), stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    assert daemon.stdout.readline() == "serving\n"
    yield fake_driver.environment("no_permission") | {"ZEUSD_SOCK_PATH": str(socket)}
    daemon.kill()
    daemon.communicate()


@needs_zeus
@pytest.mark.slow
def test_conformance_of_nvidia_gpus_without_and_with_zeusd(fake_driver: FakeDriver, zeusd: dict[str, str]) -> None:
    for environment in (fake_driver.environment(), zeusd):
        done = run(environment, "-W", "error::UserWarning", "-m", "tests.device.conformance", "zeus")
        assert done.returncode == 0, done.stderr
        assert fake_driver.locked_gpus() == {}
        assert fake_driver.leases() == []


@needs_zeus
def test_zeusd_s_clients_need_no_permission_and_are_restored_when_killed(
    fake_driver: FakeDriver, zeusd: dict[str, str]
) -> None:
    done = run(zeusd | {"CUDA_VISIBLE_DEVICES": "GPU-11111111-fake"}, "-c", LOCK_AND_DIE)
    assert done.stdout == "1350\n", done.stderr
    assert "left clocks changed; restored those of Fake GPU 1" in done.stderr
    assert [(change.gpu, change.clock_mhz) for change in fake_driver.changes()] == [(1, 1350), (1, None)]
    wait_until(lambda: fake_driver.leases() == [])
    output = run(zeusd, "-m", "lightning_pfo", "gpu", "gpu=zeus", "probe=true", "watch_s=0.02", "json=true").stdout
    assert output.count('"may_set_clocks": true') == 2
    assert fake_driver.locked_gpus() == {}


@needs_zeus
def test_without_zeusd_a_refusal_says_how_to_get_permission(fake_driver: FakeDriver) -> None:
    script = """
from lightning_pfo.core.errors import ClockPermissionError, DeviceError
from lightning_pfo.device import open_gpu
try:
    open_gpu("zeus", 0).lock_graphics_clock(1200)
except ClockPermissionError as error:
    print(error)
"""
    assert "Start zeusd as root" in run(fake_driver.environment("no_permission"), "-c", script).stdout
    assert fake_driver.changes() == []
    assert fake_driver.leases() == []
    unreachable = fake_driver.environment() | {"ZEUSD_SOCK_PATH": "/nowhere.sock"}
    assert "Cannot reach Zeusd at /nowhere.sock" in run(unreachable, "-c", script).stderr


@pytest.fixture
def rocm(fake_driver: FakeDriver, tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with two AMD GPUs and no NVIDIA driver."""
    environment = fake_driver.environment("no_driver")
    return environment | {
        "PYTHONPATH": f"{Path(__file__).parents[1] / 'fake_rocm'}:{environment['PYTHONPATH']}",
        "FAKE_AMDSMI_STATE": str(tmp_path / "clocks.json"),
        "FAKE_AMDSMI_LOG": str(tmp_path / "amd.log"),
    }


@needs_zeus
def test_conformance_of_amd_gpus(rocm: dict[str, str], fake_driver: FakeDriver, tmp_path: Path) -> None:
    done = run(rocm, "-m", "tests.device.conformance", "zeus")
    assert done.returncode == 0, done.stderr
    changes = (tmp_path / "amd.log").read_text().splitlines()
    assert {line.split()[1] for line in changes} == {"gpu1"}  # HIP's first GPU
    assert changes[-1].split()[2:] == ["500", "2100"]
    assert fake_driver.leases() == []


@needs_zeus
def test_a_killed_job_s_amd_gpu_gets_back_the_range_found_before(rocm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "clocks.json").write_text('{"gpu0": [600, 1900]}')  # an administrator's range
    done = run(rocm | {"HIP_VISIBLE_DEVICES": "1"}, "-c", LOCK_AND_DIE)
    assert done.stdout == "1800\n", done.stderr
    assert "restored those of Fake Instinct (gpu0)" in done.stderr
    changes = [line.split()[1:] for line in (tmp_path / "amd.log").read_text().splitlines()]
    assert changes == [["gpu0", "1800", "1800"], ["gpu0", "600", "1900"]]


@needs_zeus
@pytest.mark.parametrize(
    ("processes", "said"),
    [
        ("", ""),
        ("4000000", "is left alone: 1 process of others compute on it (4000000)"),
        ("!43", "is left alone: others may compute on it: Listing the processes on Fake Instinct (gpu1) failed: 43"),
        ("!2", "The driver does not tell which processes compute on Fake Instinct (gpu1)"),  # not supported
        (None, "The driver does not tell which processes compute on Fake Instinct (gpu1)"),
    ],
)
def test_amd_gpus_that_others_may_use_are_left_alone(
    processes: str | None, said: str, rocm: dict[str, str], tmp_path: Path
) -> None:
    environment = rocm if processes is None else rocm | {"FAKE_AMDSMI_PROCESSES": processes}
    done = run(environment, "-c", "from lightning_pfo.device import open_gpu; open_gpu('zeus', 0).claim_clocks()")
    assert said in done.stderr
    assert bool(done.stderr) == bool(said)
    assert (done.returncode == 0) == ("left alone" not in said)


@pytest.mark.skipif(HAS_ZEUS, reason="the zeus package is installed")
def test_without_the_package_the_error_says_what_to_install() -> None:
    with pytest.raises(DeviceError, match=r"pip install 'lightning-pfo\[zeus\]'"):
        open_gpu("zeus", 0)
