"""What a GPU draws while it waits for its neighbour (`p2p_neighbour`). An emulated one is told that it waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device import ClockController, EmulatedGpu, Gpu
from lightning_pfo.device.energy.sampler import EnergySampler
from lightning_pfo.device.time import time_of

_CLOCK_TIMEOUT_S = 5.0
_SETTLE_SHARE = 0.2  # of the waiting: the clock lands, the GPU cools down from the exchange before


@dataclass(frozen=True)
class BlockedPower:
    """Power while waiting (W) at a clock (MHz)."""

    clock_mhz: int
    power_w: float


def clocks_to_measure(supported_mhz: Sequence[int], count: int) -> list[int]:
    """Choose clocks evenly from the highest to the lowest one above half of it."""
    upper = [clock for clock in supported_mhz if clock >= supported_mhz[0] / 2]
    last, count = len(upper) - 1, min(count, len(upper))
    return list(dict.fromkeys(upper[round(i * last / max(1, count - 1))] for i in range(count)))


def measure_blocked_power(gpu: Gpu, num_clocks: int, seconds: float) -> list[BlockedPower]:
    """Measure what a GPU draws while it waits in a receive; its clocks are restored.

    Args:
        gpu: The first GPU of this node; the second one sends.
        num_clocks: How many clocks to measure, from the top to half of it.
        seconds: How long to wait at each.

    Returns:
        The power at each clock; only at the GPU's own clock if this process may not set clocks.

    Raises:
        ConfigurationError: If torch sees only one GPU, or its first is not the driver's first.
        DeviceError: If the energy counter fails or advances too seldom.
    """
    if isinstance(gpu, EmulatedGpu):
        with ClockController(gpu) as clocks:
            return _measure_clocks(gpu, clocks, partial(_pretend_to_wait, gpu, seconds), num_clocks, seconds)
    from lightning_pfo.experiment.gpu_loads.p2p_neighbour import neighbour_of  # torch takes seconds to import

    with neighbour_of(gpu, seconds) as wait, ClockController(gpu) as clocks:
        return _measure_clocks(gpu, clocks, wait, num_clocks, seconds)


def _pretend_to_wait(gpu: EmulatedGpu, seconds: float) -> None:
    gpu.set_waiting("blocked")
    gpu.time_source.sleep(seconds)
    gpu.set_waiting("idle")


def _measure_clocks(
    gpu: Gpu, clocks: ClockController, wait: Callable[[], None], num_clocks: int, seconds: float
) -> list[BlockedPower]:
    sampler = EnergySampler(gpu)
    sampler.start()
    measured: list[BlockedPower] = []
    try:
        for clock_mhz in clocks_to_measure(gpu.supported_clocks_mhz(), num_clocks):
            clocks.request(clock_mhz)
            is_set = clocks.wait(_CLOCK_TIMEOUT_S)
            power_w = _power_during(wait, gpu, sampler, seconds)
            measured.append(BlockedPower(clock_mhz if is_set else gpu.graphics_clock_mhz(), power_w))
            if not is_set:  # said by the controller; there is only one clock to measure then
                break
    finally:
        sampler.stop()
    return measured


def _power_during(wait: Callable[[], None], gpu: Gpu, sampler: EnergySampler, seconds: float) -> float:
    """Wait; returns the mean power meanwhile, W."""
    now_s = time_of(gpu).now_s
    begin_s = now_s()
    wait()
    end_s = now_s()
    trace = sampler.trace(begin_s + _SETTLE_SHARE * seconds)
    readings = [pair for pair in zip(trace.times_s, trace.energies_j, strict=True) if pair[0] <= end_s]
    if len(readings) < 2:
        raise sampler.error or DeviceError(
            f"Power is the energy between two ticks of the counter; {gpu.name} had {len(readings)} in "
            f"{end_s - begin_s:.3g} s. Use more seconds."
        )
    (first_s, first_j), (last_s, last_j) = readings[0], readings[-1]
    return (last_j - first_j) / (last_s - first_s)
