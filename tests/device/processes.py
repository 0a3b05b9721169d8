"""Processes that set clocks on the fake driver, for tests that end them; `conftest.py` kills those still running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.launch import heed_signals

STARTED: list[subprocess.Popen[str]] = []


def start(environment: dict[str, str], gpu: str, ending: str, index: int = 0) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.device.locking_process", gpu, ending, str(index)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,
    )
    STARTED.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n", process.communicate(timeout=60)
    return process


def run(environment: dict[str, str], script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] or [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def kill_with_watchdog(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)  # without its watchdog it would restore the clocks
    for child in children_of(process.pid):
        os.kill(child, signal.SIGKILL)
    process.kill()
    process.communicate(timeout=60)
