"""The fake NVML driver (`fake_nvml.c`) as a fixture: run any program on GPUs whose every clock change is logged.

Use `from tests.device.fake_driver import fake_driver` in a test module, then::

    process = subprocess.run([sys.executable, ...], env=fake_driver.environment(num_gpus=4))
    assert fake_driver.locked_gpus() == {}
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]


@dataclass(frozen=True)
class ClockChange:
    """One line of the driver's log; `clock_mhz` is None for a reset."""

    pid: int
    gpu: int
    clock_mhz: int | None


@dataclass(frozen=True)
class FakeDriver:
    """A compiled driver and the log of one test."""

    library_folder: Path
    log_path: Path

    @property
    def lease_folder(self) -> Path:
        """Where processes keep their leases."""
        return self.log_path.with_name("leases")

    def leases(self) -> list[Path]:
        """Lease files that are there now."""
        return sorted(self.lease_folder.glob("*.json"))

    def environment(
        self, scenario: str = "normal", num_gpus: int = 2, latency_ms: int = 0, **settings: object
    ) -> dict[str, str]:
        """Environment variables of a process that is to find the fake driver; `cap_mhz=...` is FAKE_NVML_CAP_MHZ."""
        environment = os.environ | {
            "LD_LIBRARY_PATH": f"{self.library_folder}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}",
            "PYTHONPATH": f"{PROJECT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "FAKE_NVML_SCENARIO": scenario,
            "FAKE_NVML_GPUS": str(num_gpus),
            "FAKE_NVML_LATENCY_MS": str(latency_ms),
            "FAKE_NVML_LOG": str(self.log_path),
            "LIGHTNING_PFO_RUNTIME_DIR": str(self.lease_folder),
        }
        environment |= {f"FAKE_NVML_{name.upper()}": str(value) for name, value in settings.items()}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        return environment

    def changes(self) -> list[ClockChange]:
        """All clock changes so far, in order."""
        if not self.log_path.exists():
            return []
        changes = []
        for line in self.log_path.read_text().splitlines():
            pid, gpu, action, *clocks = line.split()
            if action == "lock":
                assert clocks[0] == clocks[1]
            changes.append(ClockChange(int(pid), int(gpu), int(clocks[0]) if action == "lock" else None))
        return changes

    def locked_gpus(self) -> dict[int, int]:
        """GPUs that are locked now, and at which clock."""
        last = {change.gpu: change.clock_mhz for change in self.changes()}
        return {gpu: clock_mhz for gpu, clock_mhz in last.items() if clock_mhz is not None}


@pytest.fixture
def fake_driver(tmp_path: Path) -> FakeDriver:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the fake NVML driver")
    return FakeDriver(_compile(compiler), tmp_path / "clock_changes.log")


@functools.cache  # once per test run
def _compile(compiler: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fake-nvml-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source = Path(__file__).with_name("fake_nvml.c")
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wl,-soname,libnvidia-ml.so.1",
        "-o",
    ]
    subprocess.run([*command, str(folder / "libnvidia-ml.so.1"), str(source), "-lm"], check=True)
    return folder
