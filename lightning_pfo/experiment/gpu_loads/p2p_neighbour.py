"""A second rank that lets this one wait in a receive: it sleeps before it sends.

NCCL between two GPUs; gloo where torch has none.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.device import Gpu
from lightning_pfo.listeners.gpu_session import check_same_gpu

_WARMUP_EXCHANGES = 5
_STOP, _WAIT = 0.0, 1.0


@contextmanager
def neighbour_of(gpu: Gpu, seconds: float) -> Iterator[Callable[[], None]]:
    """Start the rank that lets this one wait; gives a function that waits for it once.

    Args:
        gpu: The first GPU of this node; the second one sends.
        seconds: How long each wait takes.

    Raises:
        ConfigurationError: If torch sees only one GPU, or its first is not the driver's first.
    """
    uses_cuda = torch.cuda.is_available()
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
            yield partial(_receive, tensor)
            tensor.fill_(_STOP)
            dist.send(tensor, 1)
            neighbour.join(10)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            neighbour.terminate()


def _receive(tensor: torch.Tensor) -> None:
    """Receive from a rank that sleeps before it sends."""
    dist.send(tensor.fill_(_WAIT), 1)
    dist.recv(tensor, 1)
    tensor.item()  # NCCL's receive returns before the data is there


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
