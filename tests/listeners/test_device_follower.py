"""Actions that follow a device, with marks that a test passes by hand: CUDA's events behave like them."""

import threading
import time

import pytest
import torch

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.listeners import device_follower
from lightning_pfo.listeners.device_follower import DeviceFollower, no_mark
from lightning_pfo.listeners.meters.instructions import InstructionMeter
from lightning_pfo.listeners.meters.iterations import IterationMeter
from tests.listeners.fakes import FakeGpu, FakeSource
from tests.waiting import wait_until


class FakeStream:
    """Work is launched by `record` and done when a test says so; `times_s` are those of the device."""

    def __init__(self):
        self.marks = []

    def record(self):
        self.marks.append(Mark())
        return self.marks[-1]

    def get_to(self, index):
        for mark in self.marks[: index + 1]:
            mark.reached.set()


class Mark:
    def __init__(self, time_s=0.0):
        self.reached = threading.Event()
        self.time_s = time_s

    def synchronize(self):
        assert self.reached.wait(30)

    def elapsed_time(self, other):
        return 1000 * (other.time_s - self.time_s)


def test_actions_wait_for_the_device_in_order_and_the_caller_does_not():
    stream, done = FakeStream(), []
    follower = DeviceFollower(stream.record)
    for number in range(4):
        follower.when_reached(lambda number=number: done.append((number, threading.current_thread().name)))
    assert follower.is_deferred
    assert done == []
    stream.get_to(1)
    wait_until(lambda: len(done) == 2)
    time.sleep(0.01)
    assert done == [(0, "pfo-device-follower"), (1, "pfo-device-follower")]
    stream.get_to(3)
    wait_until(lambda: len(done) == 4)
    follower.close()


def test_where_the_host_waits_actions_run_at_once():
    done, follower = [], DeviceFollower(no_mark)
    follower.when_reached(lambda: done.append(threading.current_thread()))
    assert done == [threading.current_thread()]
    assert not follower.is_deferred
    follower.close()


def test_without_cuda_there_are_no_marks():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert device_follower.record_mark() is None
    assert device_follower.record_timed_mark() is None


def test_on_cuda_marks_are_blocking_events_in_the_current_stream(monkeypatch):
    made = []

    class Event:
        def __init__(self, **options):
            made.append(options)

        def record(self):
            made.append("recorded")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    device_follower.record_mark()
    device_follower.record_timed_mark()
    assert made == [
        {"enable_timing": False, "blocking": True},
        "recorded",
        {"enable_timing": True, "blocking": True},
        "recorded",
    ]


def test_closing_drops_what_is_still_to_come(monkeypatch):
    monkeypatch.setattr(device_follower, "_CLOSE_TIMEOUT_S", 0.01)
    stream, done = FakeStream(), []
    follower = DeviceFollower(stream.record)
    follower.when_reached(lambda: done.append(0))
    follower.close()
    follower.close()
    follower.when_reached(lambda: done.append(1))
    stream.get_to(1)
    follower._thread.join(30)
    assert done == []


def test_a_failed_device_is_reported_once_and_ends_the_following(caplog):
    class Broken(Mark):
        def synchronize(self):
            raise RuntimeError("an illegal memory access was encountered")

    follower = DeviceFollower(Broken)
    follower.when_reached(lambda: None)
    wait_until(lambda: follower.error is not None)
    follower.when_reached(lambda: None)
    wait_until(lambda: caplog.records)  # written after the error is known
    assert [record.getMessage() for record in caplog.records] == [
        "Nothing is timed or set by the GPU's progress any more: an illegal memory access was encountered"
    ]


def test_the_thread_waits_on_the_gpu_that_trains(monkeypatch):
    """A new thread is on GPU 0, where its first CUDA call would take half a gigabyte."""
    chosen, done = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: chosen.append((index, threading.current_thread().name)))
    stream = FakeStream()
    follower = DeviceFollower(stream.record)
    follower.when_reached(lambda: done.append(list(chosen)))
    stream.get_to(0)
    wait_until(lambda: bool(done))
    follower.close()
    assert done == [[(3, "pfo-device-follower")]]
    assert not follower._thread.is_alive()  # else it might be inside CUDA when the interpreter ends


def test_the_last_iteration_is_measured_where_one_waits_for_the_device():
    stream, gpu, source = FakeStream(), FakeGpu(), FakeSource()
    follower = DeviceFollower(stream.record)
    source.add_listener(meter := IterationMeter(gpu, source, follower, is_ready=lambda: True))
    for _ in range(2):
        source.run_iteration()
    stream.get_to(len(stream.marks) - 1)
    assert meter.take().iteration == 0
    assert meter.take() is None
    assert meter.take(waits=True).iteration == 1
    assert meter.take(waits=True) is None
    follower.close()
    meter.close()


@pytest.mark.parametrize("is_deferred", [True, False])
def test_a_failing_counter_ends_the_measuring_not_the_training(is_deferred):
    stream, gpu, source, failures = FakeStream(), FakeGpu(), FakeSource(), []
    follower = DeviceFollower(stream.record if is_deferred else no_mark, on_failure=failures.append)
    source.add_listener(meter := IterationMeter(gpu, source, follower, is_ready=lambda: True))
    source.run_iteration()
    stream.get_to(len(stream.marks) - 1)
    wait_until(lambda: meter._finished.qsize() == 1)
    gpu.total_energy_mj = lambda: 1 / 0
    source.run_iteration()
    stream.get_to(len(stream.marks) - 1)
    wait_until(lambda: follower.error is not None)
    for _ in range(3):
        source.run_iteration()
        assert meter.take() is None  # at once, though nothing will come any more
    wait_until(lambda: failures)  # told after the error is known
    assert failures == [follower.error]
    assert isinstance(follower.error, ZeroDivisionError)
    follower.close()


def test_a_counter_that_fails_from_the_beginning_is_reported_once_and_training_goes_on(caplog):
    class Failing(FakeGpu):
        def total_energy_mj(self):
            raise DeviceError("Its reason is not known.")

    source, failures = FakeSource(), []
    follower = DeviceFollower(no_mark, on_failure=failures.append)
    source.add_listener(meter := IterationMeter(Failing(), source, follower, is_ready=lambda: True))
    for _ in range(3):
        source.run_iteration()
        assert meter.take() is None
    assert (failures, caplog.text.count("Its reason is not known.")) == ([follower.error], 1)
    follower.close()


def test_on_cuda_an_iteration_is_measured_when_the_device_has_done_it():
    stream, gpu, source = FakeStream(), FakeGpu(), FakeSource()
    follower = DeviceFollower(stream.record)
    meter = IterationMeter(gpu, source, follower, is_ready=lambda: True)
    source.add_listener(meter)
    source.run_iteration()
    assert meter.take() is None  # the device may still be busy with it
    source.run_iteration()
    stream.get_to(0)
    wait_until(lambda: meter._begin[0] > 0)
    gpu.energy_mj = 5000
    stream.get_to(3)
    measured = meter.take()
    assert (measured.iteration, measured.energy_j) == (0, 5.0)
    source.run_iteration()
    source.run_iteration()
    stream.get_to(7)
    assert meter.take().iteration == 2  # the last one that is known to be over
    follower.close()


def test_on_cuda_instructions_are_timed_by_events_without_waiting_for_the_device():
    times_s = iter([0.0, 0.5, 0.6, 1.0, 1.2, 2.0, 2.1, 2.4, 2.6, 2.7])  # anchor, begin and end of F B F B, the end

    class Source(FakeSource):
        num_waits = 0

        def synchronize(self):
            self.num_waits += 1

    class Gpu(FakeGpu):
        energy_is_continuous = False

    source = Source()
    meter = InstructionMeter(Gpu(), source, record=lambda: Mark(next(times_s)))
    source.add_listener(meter)
    source.run_iteration()
    meter.close()
    assert source.num_waits == 2  # at the begin and at the end of the iteration
    assert meter.instructions[0, InstructionType.FORWARD].times_s == pytest.approx([0.1, 0.1])
    assert meter.instructions[0, InstructionType.BACKWARD].times_s == pytest.approx([0.2, 0.2])
    assert meter.blocked.times_s == pytest.approx([0.5, 0.4, 0.8, 0.3, 0.1])
