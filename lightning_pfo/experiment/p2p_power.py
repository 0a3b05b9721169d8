"""What a GPU draws while it waits for its neighbour: rank 0 waits in a receive, rank 1 sleeps before it sends.

NCCL between two GPUs; gloo where torch has none, as with emulated GPUs.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_pfo.core.errors import ConfigurationError, DeviceError
from lightning_pfo.device import ClockController, EmulatedGpu, Gpu
from lightning_pfo.device.energy.sampler import EnergySampler
from lightning_pfo.listeners.gpu_session import check_same_gpu

_WARMUP_EXCHANGES = 5
_CLOCK_TIMEOUT_S = 5.0
_SETTLE_SHARE = 0.2  # of the waiting: the clock lands, the GPU cools down from the exchange before
_STOP, _WAIT = 0.0, 1.0


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
    uses_cuda = torch.cuda.is_available() and not gpu.is_emulated
    if uses_cuda and torch.cuda.device_count() < 2:
        raise ConfigurationError(
            "P2P power is measured between two GPUs; torch sees 1. Use a machine with two, or gpu=emulated_a100."
        )
    with tempfile.TemporaryDirectory(prefix="lightning-pfo-") as folder:
        meeting_point = f"file://{folder}/meeting"
        neighbour = multiprocessing.get_context("spawn").Process(
            target=_neighbour, args=(meeting_point, uses_cuda, seconds), daemon=True
        )
        neighbour.start()
        try:
            tensor = _join(meeting_point, 0, uses_cuda)
            check_same_gpu(gpu)
            with ClockController(gpu) as clocks:
                measured = _measure_clocks(gpu, clocks, tensor, num_clocks, seconds)
            tensor.fill_(_STOP)
            dist.send(tensor, 1)
            neighbour.join(10)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            neighbour.terminate()
    return measured


def _measure_clocks(
    gpu: Gpu, clocks: ClockController, tensor: torch.Tensor, num_clocks: int, seconds: float
) -> list[BlockedPower]:
    sampler = EnergySampler(gpu)
    sampler.start()
    measured: list[BlockedPower] = []
    try:
        for clock_mhz in clocks_to_measure(gpu.supported_clocks_mhz(), num_clocks):
            clocks.request(clock_mhz)
            is_set = clocks.wait(_CLOCK_TIMEOUT_S)
            power_w = _wait_for_neighbour(gpu, sampler, tensor, seconds)
            measured.append(BlockedPower(clock_mhz if is_set else gpu.graphics_clock_mhz(), power_w))
            if not is_set:  # said by the controller; there is only one clock to measure then
                break
    finally:
        sampler.stop()
    return measured


def _wait_for_neighbour(gpu: Gpu, sampler: EnergySampler, tensor: torch.Tensor, seconds: float) -> float:
    """Receive from a rank that sleeps before it sends; returns the mean power meanwhile, W."""
    dist.send(tensor.fill_(_WAIT), 1)
    begin_s = time.perf_counter()
    if isinstance(gpu, EmulatedGpu):
        gpu.set_waiting("blocked")
    dist.recv(tensor, 1)
    tensor.item()  # NCCL's receive returns before the data is there
    end_s = time.perf_counter()
    if isinstance(gpu, EmulatedGpu):
        gpu.set_waiting("idle")
    trace = sampler.trace(begin_s + _SETTLE_SHARE * seconds)
    readings = [pair for pair in zip(trace.times_s, trace.energies_j, strict=True) if pair[0] <= end_s]
    if len(readings) < 2:
        raise sampler.error or DeviceError(
            f"Power is the energy between two ticks of the counter; {gpu.name} had {len(readings)} in "
            f"{end_s - begin_s:.3g} s. Use more seconds."
        )
    (first_s, first_j), (last_s, last_j) = readings[0], readings[-1]
    return (last_j - first_j) / (last_s - first_s)


def _join(meeting_point: str, rank: int, uses_cuda: bool) -> torch.Tensor:
    """Meet the other rank and exchange a few times, so that connections stand; returns the tensor to exchange."""
    if uses_cuda:
        torch.cuda.set_device(rank)
    backend = "nccl" if uses_cuda else "gloo"
    dist.init_process_group(backend, init_method=meeting_point, rank=rank, world_size=2)
    tensor = torch.zeros(1, device="cuda" if uses_cuda else "cpu")
    for _ in range(_WARMUP_EXCHANGES):
        for sender in (0, 1):
            if rank == sender:
                dist.send(tensor, 1 - sender)
            else:
                dist.recv(tensor, sender)
    return tensor


def _neighbour(meeting_point: str, uses_cuda: bool, seconds: float) -> None:
    """The rank that lets the other one wait."""
    tensor = _join(meeting_point, 1, uses_cuda)
    while True:
        dist.recv(tensor, 0)
        if tensor.item() == _STOP:
            break
        time.sleep(seconds)
        dist.send(tensor, 0)
    dist.destroy_process_group()
