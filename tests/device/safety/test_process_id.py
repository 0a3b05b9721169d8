from __future__ import annotations

import subprocess
import sys

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
