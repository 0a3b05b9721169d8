"""A square wave of load: from it is learnt how a GPU's energy counter looks at power (`device.energy.calibration`)."""

from __future__ import annotations

import random

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device import Gpu
from lightning_pfo.device.energy.calibration import calibrate
from lightning_pfo.device.energy.known_looks import Calibration
from lightning_pfo.device.energy.sampler import EnergySampler
from lightning_pfo.device.time import time_of
from lightning_pfo.experiment.gpu_loads.load import Load

SECONDS = 30.0
_SHORTEST_S, _LONGEST_S = 0.015, 0.18  # of pulses and pauses: around the ticks and windows of counters


def calibrate_counter(gpu: Gpu, load: Load, seconds: float = SECONDS) -> Calibration:
    """Put pulses of random lengths on a GPU, at its own clock, and learn from the ticks of its counter.

    In between it waits as a rank waits for its neighbour, so that its clock does not fall asleep.

    Args:
        gpu: The GPU; nobody else may use it meanwhile. No clock is changed.
        load: What keeps it busy.
        seconds: How long.

    Raises:
        DeviceError: If others use the GPU, if its counter fails, does not tick, or ticks too seldom.
    """
    if gpu.energy_is_continuous:
        raise DeviceError(f"A counter that ticks can be calibrated; that of {gpu.name} is continuous. Nothing to do.")
    gpu.claim_clocks()  # refused while others use the GPU, whose power would be taken for the load's
    time, chance = time_of(gpu), random.Random(0)
    sampler = EnergySampler(gpu, with_state=False)
    sampler.start()
    busy = []
    try:
        end_s = time.now_s() + seconds
        while time.now_s() < end_s:
            load.blocked(chance.uniform(_SHORTEST_S, _LONGEST_S))
            begin_s = time.now_s()
            load.busy(chance.uniform(_SHORTEST_S, _LONGEST_S))
            busy.append((begin_s, time.now_s()))
        trace = sampler.trace(busy[0][0])
        if sampler.error is not None:
            raise sampler.error
    finally:
        sampler.stop()
        gpu.restore()
    return calibrate(gpu, trace, busy)
