"""End processes that set clocks, at random moments: `python -m tests.device.killed_processes NUM_KILLS SEED`.

Each victim is forked from this process (which has imported everything, so that a kill costs little), sets random clocks
of one GPU as fast as it can, and is killed with SIGKILL after a random time: before its lease, between lease and lock,
in between, or while it ends by itself. One of eight sits inside a call of C instead, as a rank that hangs in a
collective does, and gets SIGTERM; one of 64 keeps the interpreter there. They are killed when their GPU was restored.
Prints the longest time from a signal until the GPU's lease was gone.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import time
from pathlib import Path

import pynvml

from lightning_pfo.device import ClockController
from lightning_pfo.device.backends.nvml import NvmlGpu
from lightning_pfo.device.safety.lease import lease_path

NUM_GPUS = 8


def victim(gpu_index: int, seed: int, library: type[ctypes.CDLL] | None, tells: int) -> None:
    chance = random.Random(seed)
    with ClockController(gpu := NvmlGpu(gpu_index)) as clocks:
        for _ in range(chance.randrange(3, 300)):
            clocks.request(chance.choice(gpu.supported_clocks_mhz()))
            time.sleep(0.0002)
        if library is not None:
            assert clocks.wait(60)
            library("libnvidia-ml.so.1").fake_hang(tells)
    gpu.close()


def changed() -> set[int]:
    """Numbers of the processes that have changed a clock."""
    log = Path(os.environ["FAKE_NVML_LOG"])
    return {int(line.split()[0]) for line in log.read_text().splitlines()} if log.exists() else set()


def wait_for(condition: object) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, "nothing was changed, or a lease was never cleared"
        time.sleep(0.005)


def main(num_kills: int, seed: int) -> None:
    chance = random.Random(seed)
    pynvml.nvmlInit()
    paths = [lease_path(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i))) for i in range(NUM_GPUS)]
    slowest_s, (told, tells) = 0.0, os.pipe()
    for first in range(0, num_kills, NUM_GPUS):
        pids: list[int] = []
        for gpu_index in range(min(NUM_GPUS, num_kills - first)):
            library = None if gpu_index else ctypes.CDLL if first % 64 else ctypes.PyDLL
            pid = os.fork()
            if pid == 0:
                try:
                    victim(gpu_index, seed + first + gpu_index, library, tells)
                finally:
                    os._exit(0)
            pids.append(pid)
        if chance.random() < 0.75:  # else it strikes before anything is locked, on a busy machine
            num_changed = chance.randrange(1, len(pids) + 1)
            wait_for(lambda count=num_changed, pids=tuple(pids): len(changed() & set(pids)) >= count)
        time.sleep(chance.uniform(0, 0.03))
        for pid in chance.sample(pids[1:], len(pids) - 1):
            time.sleep(chance.uniform(0, 0.015))
            os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        for pid in pids[1:]:
            os.waitpid(pid, 0)
        wait_for(lambda: not any(path.exists() for path in paths[1:]))
        slowest_s = max(slowest_s, time.monotonic() - killed_s)
        assert os.read(told, 6) == b"hangs\n"
        killed_s = time.monotonic()
        os.kill(pids[0], signal.SIGTERM)
        wait_for(lambda: not paths[0].exists())
        slowest_s = max(slowest_s, time.monotonic() - killed_s)
        assert os.waitpid(pids[0], os.WNOHANG) == (0, 0)
        os.kill(pids[0], signal.SIGKILL)
        os.waitpid(pids[0], 0)
    print(f"{num_kills} kills, restored within {slowest_s:.2f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
