"""Requests applied by a thread in real time, and in step in virtual time."""

from __future__ import annotations

import logging
import signal
import threading
from dataclasses import replace
from itertools import pairwise

import pytest

from lightning_pfo.core.errors import ClockPermissionError, DeviceError
from lightning_pfo.device import ClockController, EmulatedGpu, load_gpu_config
from tests.waiting import wait_until


class RecordingGpu(EmulatedGpu):
    """Records what is done to it; `gate` lets a test hold the worker inside a change."""

    def __init__(self, time: str) -> None:
        super().__init__(replace(load_gpu_config("emulated_a100"), time=time))
        self.calls: list[int | str] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.failure: Exception | None = None
        self.refused_restores = 0

    def lock_graphics_clock(self, clock_mhz: int) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        self.threads.add(threading.current_thread().name)
        if self.failure is not None:
            raise self.failure
        super().lock_graphics_clock(clock_mhz)
        self.calls.append(clock_mhz)

    def restore(self) -> None:
        self.threads.add(threading.current_thread().name)
        if self.refused_restores:
            self.refused_restores -= 1
            raise DeviceError("Lost.")
        super().restore()
        self.calls.append("restore")


@pytest.fixture(params=["virtual", "real"])
def gpu(request: pytest.FixtureRequest) -> RecordingGpu:
    return RecordingGpu(request.param)


@pytest.fixture
def virtual_gpu() -> RecordingGpu:
    return RecordingGpu("virtual")


@pytest.fixture
def real_gpu() -> RecordingGpu:
    return RecordingGpu("real")


def test_applies_requests_and_restores(gpu: RecordingGpu) -> None:
    with ClockController(gpu) as clocks:
        for clock_mhz in (1410, 1200, 1305):
            clocks.request(clock_mhz)
            assert clocks.wait(30)
    assert gpu.calls == [1410, 1200, 1305, "restore"]
    assert clocks.num_changes == 3
    assert clocks.error is None


def test_latest_wins_and_the_caller_never_waits(real_gpu: RecordingGpu) -> None:
    with ClockController(real_gpu) as clocks:
        real_gpu.gate.clear()
        clocks.request(1410)
        assert real_gpu.entered.wait(30)
        for clock_mhz in real_gpu.supported_clocks_mhz()[1:]:
            clocks.request(clock_mhz)  # would block for ever if it waited for the gate
        assert not clocks.wait(0.01)
        real_gpu.gate.set()
        assert clocks.wait(30)
    assert real_gpu.calls == [1410, 210, "restore"]
    assert clocks.num_changes == 2


def test_repeated_values_are_free(gpu: RecordingGpu) -> None:
    with ClockController(gpu) as clocks:
        for clock_mhz in (1410, 1410, 1200, 1200, 1200, 1410):
            clocks.request(clock_mhz)
            assert clocks.wait(30)
    assert gpu.calls == [1410, 1200, 1410, "restore"]


def test_repeated_values_do_not_even_wake_the_worker(real_gpu: RecordingGpu) -> None:
    with ClockController(real_gpu) as clocks:
        real_gpu.gate.clear()
        clocks.request(1410)
        assert real_gpu.entered.wait(30)
        for _ in range(5):
            clocks.request(1200)
        assert clocks._worker._wake_ups.qsize() == 1  # type: ignore[union-attr]
        real_gpu.gate.set()


def test_a_value_that_returns_while_the_worker_is_busy_is_not_set_again(real_gpu: RecordingGpu) -> None:
    with ClockController(real_gpu) as clocks:
        real_gpu.gate.clear()
        clocks.request(1410)
        assert real_gpu.entered.wait(30)
        clocks.request(1200)
        clocks.request(1410)
        real_gpu.gate.set()
        assert clocks.wait(30)
    assert real_gpu.calls == [1410, "restore"]


def test_in_virtual_time_each_request_is_applied_before_it_returns(virtual_gpu: RecordingGpu) -> None:
    before = threading.active_count()
    with ClockController(virtual_gpu) as clocks:
        for number, clock_mhz in enumerate((1410, 1200, 1200, 1305), start=1):
            clocks.request(clock_mhz)
            assert virtual_gpu.calls[-1] == clock_mhz
            assert clocks.wait(0), number
        virtual_gpu.time_source.sleep(0.01)
        assert virtual_gpu.graphics_clock_mhz() == 1305
    assert threading.active_count() == before
    assert virtual_gpu.threads == {threading.current_thread().name}
    assert virtual_gpu.calls == [1410, 1200, 1305, "restore"]
    virtual_gpu.time_source.sleep(10)  # nothing is left that would change a clock
    assert virtual_gpu.calls == [1410, 1200, 1305, "restore"]


def test_only_the_worker_touches_clocks(real_gpu: RecordingGpu) -> None:
    with ClockController(real_gpu) as clocks:
        clocks.request(1200)
    assert real_gpu.threads == {"pfo-clock-controller"}


def test_without_a_request_nothing_is_touched_or_started(gpu: RecordingGpu) -> None:
    before = threading.active_count()
    with ClockController(gpu) as clocks:
        assert clocks.wait(0)
        assert threading.active_count() == before
    assert gpu.calls == []


def test_requests_after_close_are_ignored(gpu: RecordingGpu) -> None:
    clocks = ClockController(gpu)
    clocks.request(1410)
    assert clocks.wait(30)
    clocks.close()
    clocks.close()
    clocks.request(1200)
    assert not clocks.wait(0)
    assert gpu.calls == [1410, "restore"]


def test_close_while_a_change_is_under_way_restores_after_it(real_gpu: RecordingGpu) -> None:
    clocks = ClockController(real_gpu)
    real_gpu.gate.clear()
    clocks.request(1200)
    assert real_gpu.entered.wait(30)
    clocks.request(1000)
    closing = threading.Thread(target=clocks.close)
    closing.start()
    wait_until(lambda: clocks._is_closed)
    real_gpu.gate.set()
    closing.join(30)
    assert real_gpu.calls == [1200, "restore"]


def test_restores_on_an_exception(gpu: RecordingGpu) -> None:
    def train() -> None:
        with ClockController(gpu) as clocks:
            clocks.request(1200)
            assert clocks.wait(30)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert gpu.calls == [1200, "restore"]


@pytest.mark.parametrize(
    ("failure", "level", "message"),
    [
        (ClockPermissionError("You may not."), "WARNING", "Training goes on without clock control"),
        (DeviceError("Lost."), "WARNING", "training goes on. Lost."),
        (TypeError("Oops."), "ERROR", "because of a bug"),
    ],
)
def test_first_failure_is_kept_logged_once_and_makes_the_controller_inert(
    gpu: RecordingGpu, caplog: pytest.LogCaptureFixture, failure: Exception, level: str, message: str
) -> None:
    with caplog.at_level(logging.WARNING), ClockController(gpu) as clocks:
        clocks.request(1410)
        assert clocks.wait(30)
        gpu.failure = failure
        clocks.request(1200)
        assert not clocks.wait(30)
        gpu.failure = ValueError("a later one")
        clocks.request(1000)
        assert not clocks.wait(30)
        assert clocks.error is failure
        wait_until(lambda: gpu.calls == [1410, "restore"])  # better no lock than a stale one
    assert [record.levelname for record in caplog.records] == [level]
    assert message in caplog.text
    assert gpu.calls == [1410, "restore"]


@pytest.mark.parametrize("refused", [1, 3])
def test_a_restoring_that_is_refused_for_a_moment_is_tried_again(
    real_gpu: RecordingGpu, caplog: pytest.LogCaptureFixture, refused: int
) -> None:
    real_gpu.refused_restores = refused
    with ClockController(real_gpu) as clocks:
        clocks.request(1410)
        assert clocks.wait(30)
        real_gpu.failure = DeviceError("Lost.")
        clocks.request(1200)
        wait_until(lambda: real_gpu.calls == [1410, "restore"])
        assert clocks.error is real_gpu.failure
    assert real_gpu.calls == [1410, "restore"]
    assert "could not be restored" not in caplog.text
    assert f"were restored at attempt {refused + 1}." in caplog.text


def test_a_restoring_that_is_refused_for_long_is_told_once_and_tried_again_all_along(
    real_gpu: RecordingGpu, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_pfo.device.clocks.controller._RESTORES_AFTER_S", (0.001,))
    monkeypatch.setattr("lightning_pfo.device.clocks.controller._RESTORES_EVERY_S", 0.01)
    real_gpu.refused_restores = 9
    with ClockController(real_gpu) as clocks:
        real_gpu.failure = DeviceError("Lost.")
        clocks.request(1200)
        wait_until(lambda: real_gpu.calls == ["restore"])
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "could not be restored: Lost. This is tried again every 0.01 s." in errors[0]


@pytest.mark.parametrize(("refused", "calls"), [(2, [1410, "restore"]), (10**6, [1410])])
def test_closing_tries_a_few_times_and_ends(
    real_gpu: RecordingGpu, caplog: pytest.LogCaptureFixture, refused: int, calls: list[int | str]
) -> None:
    with ClockController(real_gpu) as clocks:
        clocks.request(1410)
        assert clocks.wait(30)
        real_gpu.refused_restores = refused
    assert real_gpu.calls == calls
    assert ("could not be restored: Lost." in caplog.text) == (refused > 2)
    assert bool(clocks.statistics().failure) == (refused > 2)
    assert "tried again every" not in caplog.text


def test_a_hung_driver_does_not_hang_the_end(
    real_gpu: RecordingGpu, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_pfo.device.clocks.controller._CLOSE_TIMEOUT_S", 0.02)
    clocks = ClockController(real_gpu)
    real_gpu.gate.clear()
    clocks.request(1200)
    assert real_gpu.entered.wait(30)
    clocks.close()
    assert "--reset-gpu-clocks" in caplog.text
    real_gpu.gate.set()  # when it answers after all, its clocks are restored
    wait_until(lambda: real_gpu.calls == [1200, "restore"])


def test_guarded_on_the_main_thread_signals_restore_what_another_thread_asked_for(gpu: RecordingGpu) -> None:
    caught: list[int] = []
    replaced = signal.signal(signal.SIGTERM, lambda signum, _: caught.append(signum))
    try:
        clocks = ClockController(gpu)
        clocks.guard()
        asking = threading.Thread(target=clocks.request, args=(1200,))  # as the follower of a CUDA device does
        asking.start()
        asking.join()
        assert clocks.wait(30)
        signal.raise_signal(signal.SIGTERM)
        assert gpu.calls[-1] == "restore"
        assert caught == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, replaced)


def test_a_lock_that_nobody_would_undo_is_given_up_though_its_clock_stays_the_same(
    real_gpu: RecordingGpu, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_pfo.device.clocks.controller._CHECK_S", 0.001)
    checks: list[int] = []

    def check_lock() -> None:
        checks.append(len(checks))
        if len(checks) == 3:
            raise DeviceError("The watchdog has ended.")

    monkeypatch.setattr(real_gpu, "check_lock", check_lock, raising=False)
    with ClockController(real_gpu) as clocks:
        clocks.request(1200)
        wait_until(lambda: real_gpu.calls == [1200, "restore"])
    assert "The watchdog has ended." in caplog.text
    assert clocks.statistics().failure == "The watchdog has ended."


def test_many_threads_many_requests_end_consistently(real_gpu: RecordingGpu) -> None:
    supported = real_gpu.supported_clocks_mhz()
    clocks = ClockController(real_gpu)
    clocks.request(supported[0])

    def hammer(offset: int) -> None:
        for i in range(500):
            clocks.request(supported[(i * 7 + offset) % len(supported)])

    threads = [threading.Thread(target=hammer, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clocks.wait(30)
    assert real_gpu.calls[-1] == clocks._target.clock_mhz
    clocks.close()
    assert real_gpu.calls[-1] == "restore"
    assert clocks.num_changes == len(real_gpu.calls) - 1
    assert all(a != b for a, b in pairwise(real_gpu.calls))
