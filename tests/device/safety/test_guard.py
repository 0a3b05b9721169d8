"""However a process ends, no GPU stays locked: real processes, really killed, on the fake driver."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from lightning_pfo.device.safety import guard as clock_guard
from tests.device.fake_driver import FakeDriver, fake_driver
from tests.device.processes import start, start_several

__all__ = ["fake_driver"]


@pytest.mark.parametrize(("ending", "code"), [("return", 0), ("exception", 1)])
def test_restored_when_the_program_ends(ending: str, code: int, fake_driver: FakeDriver) -> None:
    process = start(fake_driver.environment(), "nvml", ending)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert [change.clock_mhz for change in fake_driver.changes()] == [1365, None]


@pytest.mark.parametrize("latency_ms", [0, 5])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_restored_on_signals_at_any_moment(signum: signal.Signals, latency_ms: int, fake_driver: FakeDriver) -> None:
    environment = fake_driver.environment(num_gpus=3, latency_ms=latency_ms)
    processes = start_several(environment, "nvml", "slow", 3)
    for number, process in enumerate(processes):
        time.sleep(0.007 * number)
        process.send_signal(signum)
    for process in processes:
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == -signum
        assert "did not answer" not in stderr
    for process in processes:
        changes = [change for change in fake_driver.changes() if change.pid == process.pid]
        assert changes[0].clock_mhz == 1365
        assert changes[-1].clock_mhz is None
        assert [change.clock_mhz for change in changes].count(None) == 1


@pytest.mark.parametrize("gpu", ["nvml", "virtual", "real"])
def test_a_signal_inside_our_own_code_does_not_deadlock(gpu: str, fake_driver: FakeDriver) -> None:
    processes = start_several(fake_driver.environment(num_gpus=4), gpu, "tight loop", 4)
    for number, process in enumerate(processes):
        time.sleep(0.003 * number)
        process.send_signal(signal.SIGTERM)
    for process in processes:
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGTERM
        assert stderr == ""  # a deadlock would be given up with an error message
    assert fake_driver.locked_gpus() == {}


def test_the_program_s_own_handler_is_called_afterwards(fake_driver: FakeDriver) -> None:
    process = start(fake_driver.environment(), "nvml", "own handler")
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 7
    assert stdout == "own handler\n"
    assert fake_driver.locked_gpus() == {}


def test_two_signals_in_a_row(fake_driver: FakeDriver) -> None:
    process = start(fake_driver.environment(latency_ms=50), "nvml", "slow")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, -signal.SIGTERM)
    assert fake_driver.locked_gpus() == {}


def test_a_forked_child_leaves_its_parents_clocks_alone(fake_driver: FakeDriver) -> None:
    process = start(fake_driver.environment(), "nvml", "fork")
    stdout, stderr = process.communicate(timeout=60)
    assert stdout == "clock 1365 of 1365\nclosed in the parent\n", stderr
    assert [(change.pid, change.clock_mhz) for change in fake_driver.changes()] == [
        (process.pid, 1365),
        (process.pid, None),
    ]


class Recorder:
    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def handler_calls() -> Iterator[list[int]]:
    """Signals as in a program started in the foreground, whatever this test run inherited; SIGTERM is counted."""
    calls: list[int] = []
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGTERM: lambda signum, _: calls.append(signum),
    }
    replaced = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    yield calls
    for signum, handler in replaced.items():
        signal.signal(signum, handler)


def test_handlers_stand_only_while_something_is_registered(handler_calls: list[int]) -> None:
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    first, second = Recorder(), Recorder()
    clock_guard.register(first)
    clock_guard.register(second)
    assert all(signal.getsignal(signum) is clock_guard._on_signal for signum in handlers)
    clock_guard.unregister(first)
    assert all(signal.getsignal(signum) is clock_guard._on_signal for signum in handlers)
    clock_guard.unregister(second)
    assert {signum: signal.getsignal(signum) for signum in handlers} == handlers
    signal.raise_signal(signal.SIGTERM)
    assert (first.num_closed, second.num_closed, handler_calls) == (0, 0, [signal.SIGTERM])


def test_a_signal_closes_all_and_then_calls_the_replaced_handler(handler_calls: list[int]) -> None:
    recorders = [Recorder(), Recorder()]
    for recorder in recorders:
        clock_guard.register(recorder)
    signal.raise_signal(signal.SIGTERM)
    assert [recorder.num_closed for recorder in recorders] == [1, 1]
    assert handler_calls == [signal.SIGTERM]
    signal.raise_signal(signal.SIGTERM)  # all is removed
    assert [recorder.num_closed for recorder in recorders] == [1, 1]
    assert handler_calls == [signal.SIGTERM] * 2


def test_a_failing_close_does_not_keep_others_from_closing(
    handler_calls: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def close(self) -> None:
            raise OSError("broken")

    recorder = Recorder()
    clock_guard.register(Failing())
    clock_guard.register(recorder)
    signal.raise_signal(signal.SIGTERM)
    assert recorder.num_closed == 1
    assert "broken" in caplog.text
    assert handler_calls == [signal.SIGTERM]


def test_ignored_signals_stay_ignored() -> None:
    replaced = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        recorder = Recorder()
        clock_guard.register(recorder)
        signal.raise_signal(signal.SIGHUP)
        assert recorder.num_closed == 0
        clock_guard.unregister(recorder)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, replaced)


def test_a_handler_that_wraps_ours_keeps_working_and_decides(handler_calls: list[int]) -> None:
    recorder = Recorder()
    clock_guard.register(recorder)
    ours = signal.getsignal(signal.SIGTERM)
    assert callable(ours)
    wrapped: list[int] = []

    def wrapper(signum: int, frame: FrameType | None) -> None:  # as Lightning composes handlers
        wrapped.append(signum)
        ours(signum, frame)

    signal.signal(signal.SIGTERM, wrapper)
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is wrapper
    assert (recorder.num_closed, len(wrapped), len(handler_calls)) == (1, 1, 1)
    signal.raise_signal(signal.SIGTERM)
    assert (recorder.num_closed, len(wrapped), len(handler_calls)) == (1, 2, 2)
    clock_guard.register(recorder)  # now ours stands before the wrapper, which calls ours
    signal.raise_signal(signal.SIGTERM)
    assert (recorder.num_closed, len(wrapped)) == (2, 3)


def test_other_threads_install_no_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    recorder = Recorder()
    thread = threading.Thread(target=clock_guard.register, args=(recorder,))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    clock_guard.unregister(recorder)
