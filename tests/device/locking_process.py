"""A process that locks clocks until something ends it: `python -m tests.device.locking_process GPU ENDING [INDEX]`.

The GPU `virtual` or `real` is emulated, in that time.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
import sys
import time

from lightning_pfo.device import ClockController, EmulatedGpu, GpuConfig, open_gpu
from lightning_pfo.device.config import TIMES
from lightning_pfo.device.safety import guard

logging.basicConfig(stream=sys.stderr)


class Announcer:
    """Says in which process it is closed."""

    def __init__(self) -> None:
        self.parent_pid = os.getpid()

    def close(self) -> None:
        print("closed in the", "parent" if os.getpid() == self.parent_pid else "child", flush=True)


def main(gpu_name: str, ending: str, index: str = "0") -> None:
    if ending == "own handler":
        signal.signal(signal.SIGTERM, lambda *_: (print("own handler", flush=True), sys.exit(7)))
    is_emulated = gpu_name in TIMES
    config = GpuConfig(kind="emulated", time=gpu_name) if is_emulated else GpuConfig(kind=gpu_name)
    gpu = open_gpu(config, int(index))  # not by its name, as reading a file would cost more
    clocks = ClockController(gpu)
    supported = gpu.supported_clocks_mhz()
    clocks.request(supported[3])
    assert clocks.wait(30)
    print("locked", flush=True)
    if ending == "return":
        return
    if ending == "exception":
        raise ZeroDivisionError
    if ending == "fork":  # what a data loader's worker does to its parent's clocks: nothing
        guard.register(Announcer())
        if os.fork() == 0:
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        _, status = os.wait()
        assert os.WTERMSIG(status) == signal.SIGTERM
        print(f"clock {gpu.graphics_clock_mhz()} of {supported[3]}", flush=True)
        return
    clocks.request(supported[-1])
    for _ in itertools.count():  # ends by a signal, which may strike anywhere in here
        clocks.request(random.choice(supported))
        if isinstance(gpu, EmulatedGpu):
            gpu.begin_work()
            gpu.finish_work(1e-5, 1e-5)
            gpu.total_energy_mj()
        elif ending == "slow":
            time.sleep(0.001)


if __name__ == "__main__":
    main(*sys.argv[1:])
