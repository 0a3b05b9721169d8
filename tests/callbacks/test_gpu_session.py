"""The GPU of a rank is the one that CUDA trains on, and its clocks are guarded."""

import signal
from types import SimpleNamespace

import pytest
import torch

from lightning_pfo.callbacks.gpu_session import check_same_gpu, open_session
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.device import GpuConfig, clock_guard
from tests.callbacks.fakes import FakeSource


@pytest.fixture
def cuda(monkeypatch):
    """Two GPUs that CUDA counts in this order."""
    uuids = ["11111111-fake", "00000000-fake"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
    return monkeypatch


def gpu(uuid):
    return SimpleNamespace(uuid=uuid)


def test_the_same_gpu_passes(cuda):
    check_same_gpu(gpu("GPU-11111111-fake"), 0)
    check_same_gpu(gpu("GPU-00000000-fake"), 1)


def test_another_gpu_is_refused(cuda):
    with pytest.raises(
        ConfigurationError, match=r"index 0 is GPU 11111111-fake for CUDA.*CUDA_DEVICE_ORDER=PCI_BUS_ID"
    ):
        check_same_gpu(gpu("GPU-00000000-fake"), 0)


def test_what_cannot_be_compared_is_not(cuda):
    check_same_gpu(SimpleNamespace(), 0)  # emulated
    check_same_gpu(gpu("gpu0-74a0"), 0)  # AMD
    check_same_gpu(gpu("GPU-00000000-fake"), 5)
    cuda.setenv("CUDA_VISIBLE_DEVICES", "MIG-1-0")
    check_same_gpu(gpu("GPU-00000000-fake"), 0)
    cuda.delenv("CUDA_VISIBLE_DEVICES")
    cuda.setattr(torch.cuda, "is_initialized", lambda: False)  # training on the CPU
    check_same_gpu(gpu("GPU-00000000-fake"), 0)


def test_signals_are_caught_from_the_moment_that_clocks_are_claimed():
    """Not from the first request on, which on CUDA comes from a thread that cannot install handlers."""
    found = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        session = open_session(FakeSource(), GpuConfig(kind="emulated"), "a user", num_gpus=1)
        session.own_clocks("a user")
        assert signal.getsignal(signal.SIGTERM) is clock_guard._on_signal
        session.release("a user")
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, found)
