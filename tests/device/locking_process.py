"""A process that locks clocks until something ends it: `python -m tests.device.locking_process GPU ENDING [INDEX]`."""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
import sys
import time

from lightning_pfo.device import ClockController, EmulatedGpu, GpuConfig, open_gpu
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
    is_real = gpu_name in ("nvml", "zeus")  # then all else is a default, and reading the name's file would cost more
    gpu = open_gpu(GpuConfig(kind=gpu_name) if is_real else gpu_name, int(index))
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
