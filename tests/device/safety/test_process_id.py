from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_pfo.device.safety import process_id
from lightning_pfo.device.safety.process_id import ProcessId
from tests.waiting import wait_until


def test_a_zombie_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    _, start_ticks = process_id._state_and_start(process.pid)
    holder = ProcessId(process.pid, start_ticks, process_id.boot_id())
    wait_until(lambda: process_id._state_and_start(process.pid)[0] == "Z")
    assert not holder.is_alive()
    process.wait()
    assert not holder.is_alive()


def test_who_is_waited_for_between_two_looks_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a parent that waits for it, while a watchdog asks whether there are clocks to restore."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    look = process_id._state_and_start
    holder = ProcessId(process.pid, look(process.pid)[1], process_id.boot_id())

    def look_late(pid: int) -> tuple[str, int | None]:
        process.wait()
        return look(pid)

    wait_until(lambda: look(process.pid)[0] == "Z")
    monkeypatch.setattr(process_id, "_state_and_start", look_late)
    assert not holder.is_alive()
