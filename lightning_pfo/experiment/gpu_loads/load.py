"""What a GPU can be kept doing, for so many seconds: computing, waiting, nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.device import EmulatedGpu, Gpu
from lightning_pfo.experiment.gpu_loads.compat import spin


class Load(Protocol):
    """What a GPU can be kept doing, for some seconds."""

    def idle(self, seconds: float) -> None:
        """Nothing."""

    def blocked(self, seconds: float) -> None:
        """Wait on the GPU."""

    def busy(self, seconds: float) -> float | None:
        """Compute; returns how long by the GPU's events, where there are any."""


class EmulatedLoad:
    """Tells an emulated GPU what it does."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        self._gpu = gpu

    def idle(self, seconds: float) -> None:
        """Let virtual time pass."""
        self._wait("idle", seconds)

    def blocked(self, seconds: float) -> None:
        """Let virtual time pass."""
        self._wait("blocked", seconds)

    def busy(self, seconds: float) -> None:
        """Do work that takes so long at the top clock."""
        self._gpu.begin_work()
        self._gpu.finish_work(seconds, 0.0)
        self._gpu.set_waiting("idle")

    def _wait(self, state: str, seconds: float) -> None:
        self._gpu.set_waiting(state)
        self._gpu.time_source.sleep(seconds)
        self._gpu.set_waiting("idle")


class CudaLoad:
    """Keeps one of torch's GPUs busy; each call returns when the GPU is done."""

    def __init__(self, gpu: Gpu, index: int) -> None:
        import torch  # takes seconds

        from lightning_pfo.listeners.gpu_session import check_same_gpu

        if not torch.cuda.is_available():
            raise ConfigurationError("A real GPU is measured under load, which takes CUDA. Use gpu=emulated_a100.")
        torch.cuda.set_device(index)
        check_same_gpu(gpu)
        self._torch = torch
        self._matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        for call in (self._multiply, lambda: spin(1000)):
            self._timed_s(call)
        self._product_s = min(self._timed_s(lambda: self._repeat(self._multiply, 20)) for _ in range(5)) / 20
        self._spin_s = min(self._timed_s(lambda: spin(10_000_000)) for _ in range(3))
        self._spin: Callable[[], None] = lambda: spin(10_000_000)

    def idle(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def blocked(self, seconds: float) -> None:
        """Keep one kernel spinning."""
        self._timed_s(lambda: self._repeat(self._spin, max(1, round(seconds / self._spin_s))))

    def busy(self, seconds: float) -> float:
        """Multiply matrices."""
        return self._timed_s(lambda: self._repeat(self._multiply, max(1, round(seconds / self._product_s))))

    def _multiply(self) -> None:
        self._torch.mm(self._matrix, self._matrix)

    def _repeat(self, call: Callable[[], object], count: int) -> None:
        for _ in range(count):
            call()

    def _timed_s(self, launch: Callable[[], object]) -> float:
        event: Any = self._torch.cuda.Event
        begin, end = (event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


def load_of(gpu: Gpu, index: int = 0) -> Load:
    """What keeps a GPU busy; `index` is its own among the visible ones.

    Raises:
        ConfigurationError: If it is a real one and there is no CUDA, or CUDA counts GPUs in another order.
    """
    return EmulatedLoad(gpu) if isinstance(gpu, EmulatedGpu) else CudaLoad(gpu, index)
