"""The GPU of a rank is the one that CUDA trains on, and its clocks are guarded."""

import signal
from types import SimpleNamespace

import pytest
import torch

from lightning_pfo.core.errors import ClockPermissionError, ConfigurationError
from lightning_pfo.device import EmulatedGpu, GpuConfig
from lightning_pfo.device.safety import guard as clock_guard
from lightning_pfo.listeners import gpu_session
from lightning_pfo.listeners.gpu_session import check_same_gpu, open_session
from tests.listeners.fakes import FakeSource


@pytest.fixture
def cuda(monkeypatch):
    """Two GPUs that CUDA counts in this order; `cuda.current_device` is the one that trains."""
    uuids = ["11111111-fake", "00000000-fake"]
    fake = SimpleNamespace(current_device=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: fake.current_device)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
    return fake


def gpu(uuid, **properties):
    return SimpleNamespace(uuid=uuid, **properties)


def test_the_same_gpu_passes(cuda):
    check_same_gpu(gpu("GPU-11111111-fake"))
    cuda.current_device = 1
    check_same_gpu(gpu("GPU-00000000-fake"))


def test_another_gpu_is_refused(cuda):
    with pytest.raises(
        ConfigurationError, match=r"index 0 is GPU 11111111-fake for CUDA.*CUDA_DEVICE_ORDER=PCI_BUS_ID"
    ):
        check_same_gpu(gpu("GPU-00000000-fake"))


def test_what_cannot_be_compared_is_not(cuda, monkeypatch):
    check_same_gpu(SimpleNamespace())  # emulated
    check_same_gpu(gpu("gpu0-74a0"))  # AMD
    check_same_gpu(gpu("GPU-00000000-fake", is_split=True))  # CUDA then names the MIG instance
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # training on the CPU
    check_same_gpu(gpu("GPU-00000000-fake"))


@pytest.mark.parametrize(("kind", "index"), [("nvml", 1), ("auto", 1), ("emulated", 0)])
def test_the_gpu_is_the_one_that_torch_computes_on(cuda, monkeypatch, kind, index):
    """As with `Trainer(devices=[1])`, where the first process of the node trains on the second GPU."""
    opened = []

    def open_gpu(choice, index, *, num_gpus):
        opened.append(index)
        return EmulatedGpu(GpuConfig(kind="emulated"))

    monkeypatch.setattr(gpu_session, "open_gpu", open_gpu)
    cuda.current_device = 1
    open_session(FakeSource(), GpuConfig(kind=kind), "a user", num_gpus=1).release("a user")
    assert opened == [index]


def test_one_gpu_is_shared_and_closed_after_its_last_user():
    source = FakeSource()
    one, two = object(), object()
    session = open_session(source, "emulated_a40", one, num_gpus=1)
    assert open_session(source, "emulated_a40", two, num_gpus=1) is session
    with pytest.raises(ConfigurationError, match=r"gpu='nvml', another callback gpu='emulated_a40'"):
        open_session(source, "nvml", two, num_gpus=1)
    with pytest.raises(ConfigurationError, match=r"cluster='ideal', another callback cluster='nvlink'"):
        open_session(source, "emulated_a40", two, num_gpus=1, cluster="ideal")
    session.own_clocks(one)
    with pytest.raises(ConfigurationError, match="One callback sets the clocks"):
        session.own_clocks(two)
    session.release(one)
    session.own_clocks(two)
    assert source.counting
    session.release(two)
    session.release(two)
    assert not source.counting
    assert open_session(source, "emulated_a100", one, num_gpus=1) is not session


def test_an_unknown_cluster_is_refused():
    with pytest.raises(ConfigurationError, match=r"cluster is one of ideal, nvlink, pcie .*got 'nvlin'"):
        open_session(FakeSource(), "emulated_a40", "a user", num_gpus=1, cluster="nvlin")


def test_a_gpu_that_cannot_be_restored_does_not_spoil_the_end_of_a_training(monkeypatch, caplog):
    def fail(gpu):
        raise ClockPermissionError("You may not any more.")

    session = open_session(FakeSource(), GpuConfig(kind="emulated"), "a user", num_gpus=1)
    monkeypatch.setattr(EmulatedGpu, "close", fail)
    session.release("a user")
    assert "was not released: You may not any more. The watchdog tries again" in caplog.text


@pytest.mark.parametrize("time", ["virtual", "real"])
def test_clocks_go_back_to_the_gpu_s_own_where_its_progress_is_not_known_any_more(time, caplog):
    config = GpuConfig(kind="emulated", time=time, clock_latency_s=0)
    session = open_session(FakeSource(), config, "a user", num_gpus=1)
    session.own_clocks("a user")
    session.clocks.request(600)
    assert session.clocks.wait(30)
    session.follower.when_reached(lambda: 1 / 0)
    assert session.clocks.statistics().failure == "division by zero"
    assert session.gpu.graphics_clock_mhz() == 1410
    session.release("a user")
    assert [record.getMessage() for record in caplog.records] == [
        "Nothing is timed or set by the GPU's progress any more: division by zero"
    ]


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
