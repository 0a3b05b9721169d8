"""Kill processes that set clocks, at random moments: `python -m tests.device.killed_processes NUM_KILLS SEED`.

Each victim is forked from this process (which has imported everything, so that a kill costs little), sets random clocks
of one GPU as fast as it can, and is killed with SIGKILL after a random time: before its lease, between lease and lock,
in between, or while it ends by itself. Prints the longest time from a kill until the GPU's lease was gone.
"""

from __future__ import annotations

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


def victim(gpu_index: int, seed: int) -> None:
    chance = random.Random(seed)
    with ClockController(gpu := NvmlGpu(gpu_index)) as clocks:
        for _ in range(chance.randrange(3, 300)):
            clocks.request(chance.choice(gpu.supported_clocks_mhz()))
            time.sleep(0.0002)
    gpu.close()


def wait_for_a_change() -> None:
    """Until one more clock was changed, or 5 s have passed."""
    log = Path(os.environ["FAKE_NVML_LOG"])
    before, deadline_s = log.stat().st_size if log.exists() else 0, time.monotonic() + 5
    while not (log.exists() and log.stat().st_size > before) and time.monotonic() < deadline_s:
        time.sleep(0.001)


def main(num_kills: int, seed: int) -> None:
    chance = random.Random(seed)
    pynvml.nvmlInit()
    uuids = [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(NUM_GPUS)]
    slowest_s = 0.0
    for first in range(0, num_kills, NUM_GPUS):
        pids = []
        for gpu_index in range(min(NUM_GPUS, num_kills - first)):
            pid = os.fork()
            if pid == 0:
                try:
                    victim(gpu_index, seed + first + gpu_index)
                finally:
                    os._exit(0)
            pids.append(pid)
        if chance.random() < 0.75:  # else it strikes before anything is locked, on a busy machine
            wait_for_a_change()
        time.sleep(chance.uniform(0, 0.03))
        for pid in chance.sample(pids, len(pids)):
            time.sleep(chance.uniform(0, 0.015))
            os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        for pid in pids:
            os.waitpid(pid, 0)
        while any(lease_path(uuid).exists() for uuid in uuids):
            assert time.monotonic() < killed_s + 60, "a lease was never cleared"
            time.sleep(0.005)
        slowest_s = max(slowest_s, time.monotonic() - killed_s)
    print(f"{num_kills} kills, restored within {slowest_s:.2f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
