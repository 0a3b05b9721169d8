from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_pfo.device.safety.lease import DIRECTORY_VARIABLE, Lease, claimed_here
from lightning_pfo.device.safety.process_id import this_process
from tests.device.processes import STARTED


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    """Also where a test fails before it has ended what it started."""
    yield
    while STARTED:
        STARTED.pop().kill()


@pytest.fixture
def lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lease]:
    """Of this process, as if it had claimed the GPU."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    claimed_here.add("GPU-1")
    yield Lease("GPU-1", "Some GPU", "nvml", this_process(), {"power_limit_mw": None}, ("graphics_clock",))
    claimed_here.discard("GPU-1")
