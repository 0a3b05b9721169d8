"""Processes that set clocks on the fake driver, for tests that end them; `conftest.py` kills those still running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.launch import heed_signals

STARTED: list[subprocess.Popen[str]] = []


def start(environment: dict[str, str], gpu: str, ending: str) -> subprocess.Popen[str]:
    """Start `locking_process` on the first GPU; it has locked its clocks."""
    return start_several(environment, gpu, ending, 1)[0]


def start_several(environment: dict[str, str], gpu: str, ending: str, num_gpus: int) -> list[subprocess.Popen[str]]:
    """The same on each of several GPUs."""
    processes = []
    for index in range(num_gpus):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.device.locking_process", gpu, ending, str(index)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_signals,
        )
        STARTED.append(process)
        processes.append(process)
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n", process.communicate(timeout=60)
    return processes


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
