"""Set GPU clocks off the training thread.

::

    training thread   request(1410)  request(1200) request(1305)        request(1305)   close()
    worker thread            lock 1410............|lock 1305 (1200 is skipped), watch   restore

NVML needs milliseconds for a change, so a queue of old requests would leave the clock ever further behind: only the
latest one counts. After a change the clock is read back (`transition`), until the next change is due. In virtual time
there is no thread: a request is applied at the moment at which it is made.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from types import TracebackType

from lightning_pfo.core.errors import ClockPermissionError, DeviceError, NotSupportedError
from lightning_pfo.device.clocks.transition import ClockStatistics, TransitionLog
from lightning_pfo.device.gpu import Gpu
from lightning_pfo.device.safety import guard
from lightning_pfo.device.time import HOST_TIME, Process, Task, time_of

logger = logging.getLogger(__name__)

_POLL_S = 0.0002
_CHECK_S = 1.0
_CLOSE_TIMEOUT_S = 5.0
_RESTORES_AFTER_S = (0.05, 0.2, 0.5)  # together well within that time
_RESTORES_EVERY_S = 5.0


@dataclass(frozen=True)
class _Target:
    """What is wanted: a clock since a moment, and perhaps another one from a later moment on, by the GPU's time."""

    clock_mhz: int | None = None
    since_s: float = 0.0
    next_mhz: int | None = None
    next_s: float = math.inf

    def at(self, now_s: float) -> tuple[int | None, float]:
        """The clock wanted now, and since when."""
        return (self.next_mhz, self.next_s) if now_s >= self.next_s else (self.clock_mhz, self.since_s)


class ClockController:
    """Applies clock requests to one GPU, in order, the latest first; restores the clocks at the end.

    A real GPU is asked every second whether its lock would still be undone (`check_lock`), however constant its clock.

    Only the worker thread changes clocks, `restore` included, and the two sides share no lock: `close` may be called
    from a signal handler that has interrupted `request` at any point. From `guard` on, `safety.guard` closes the
    controller at exit and on signals; `with ClockController(gpu) as clocks` closes it earlier.

    Attributes:
        gpu: The GPU, which stays open.
        error: The first failure, after which the clocks are restored and no more are set. None while all is well.
        is_quiet: Whether somebody else says it where clocks may not be set at all.
        num_changes: How often a clock was set (repeated and overtaken requests do not count).
    """

    def __init__(self, gpu: Gpu, *, is_quiet: bool = False) -> None:
        """Set nothing yet.

        Args:
            gpu: The GPU.
            is_quiet: Do not warn when the clocks cannot be set; another process of this node does.
        """
        self.gpu = gpu
        self.is_quiet = is_quiet
        self.error: Exception | None = None
        self.num_changes = 0
        self._time = time_of(gpu)
        self._target = _Target()  # replaced as a whole, by the requesting side only
        self._applied_mhz: int | None = None
        self._transitions = TransitionLog(gpu)
        self._landed_mhz: int | None = None  # the last clock that was seen
        self._check_lock: Callable[[], None] | None = getattr(gpu, "check_lock", None)
        self._is_guarded = False
        self._is_closed = False
        self._is_stopped = False
        self._worker: Task | None = None

    def guard(self) -> None:
        """Have the clocks restored at exit and on signals, at the latest from the first request on.

        Requests may come from another thread; signals are caught only if this is called on the main thread before.
        """
        if not self._is_guarded and not self._is_closed:
            self._is_guarded = True
            guard.register(self, any_thread=self._time is HOST_TIME)  # virtual time passes in one thread only

    def refuse(self, error: Exception) -> None:
        """Set no clocks any more, for this reason; what is set stays until `close`."""
        self.error = self.error or error

    def end(self, error: Exception) -> None:
        """Restore the clocks and set no more, for this reason; it may be none of the driver's."""
        self.refuse(error)
        self.close()

    def request(self, clock_mhz: int) -> None:
        """Ask for a clock and return at once. A repeated value costs nothing; after an error or `close`, neither."""
        if clock_mhz != self._target.clock_mhz or self._target.next_mhz is not None:
            self._want(_Target(clock_mhz, self._time.now_s()))

    def request_at(self, clock_mhz: int, due_s: float) -> None:
        """Ask for a clock from a moment of the GPU's time on, unless another request comes before it."""
        now_mhz, since_s = self._wanted()
        self._want(_Target(now_mhz, since_s, clock_mhz, due_s))

    def _want(self, target: _Target) -> None:
        if self._is_closed or self.error is not None:
            return
        self._target = target
        if self._worker is None:
            self.guard()  # first: from here on there is something to restore
            self._worker = self._time.spawn(self._work(), "pfo-clock-controller")
        else:
            self._worker.wake()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the latest request has been applied.

        Returns:
            Whether the GPU has been set to it; False after `timeout_s`, an error or `close`.
        """
        deadline_s = time.monotonic() + timeout_s
        while self._applied_mhz != self._wanted()[0]:
            if self.error is not None or self._is_closed or time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        return self.error is None and not self._is_closed

    @property
    def usual_latency_s(self) -> float:
        """Median time from a request until the GPU was seen at its clock; 0 until a few changes were seen to land."""
        return self._transitions.usual_latency_s

    @property
    def latencies_by_pair(self) -> dict[tuple[int, int], list[float]]:
        """Latencies (s) of the changes seen to land, by the clock before and the one asked for (MHz)."""
        return self._transitions.by_pair

    def statistics(self) -> ClockStatistics:
        """What became of the changes so far: how quickly clocks were reached, and which were not."""
        failure = "" if self.error is None else str(self.error)
        return replace(self._transitions.statistics(self.num_changes), failure=failure)

    def close(self) -> None:
        """Stop and restore the clocks; later requests are ignored. May be called twice, and from signal handlers."""
        self._is_closed = True
        if self._worker is not None:
            self._worker.wake()
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        while self._worker is not None and not self._is_stopped and self._worker.is_running:
            if time.monotonic() >= deadline_s:
                logger.error(
                    "%s did not answer within %.0f s, so its clocks may still be locked. Unlock them with: "
                    "nvidia-smi --reset-gpu-clocks",
                    self.gpu.name,
                    _CLOSE_TIMEOUT_S,
                )
                break
            time.sleep(_POLL_S)  # no join(): it is not safe when a signal handler interrupts one
        guard.unregister(self)

    def __enter__(self) -> ClockController:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> Process[None]:
        """Apply requests until closed, or until the first failure: better the GPU's own clocks than a stale one."""
        try:
            while not self._is_closed:
                clock_mhz, since_s = self._wanted()
                if clock_mhz is None or clock_mhz == self._applied_mhz:
                    yield from self._pause(math.inf if self._check_lock is None else _CHECK_S)
                    if self._check_lock is not None and not self._is_closed:
                        self._check_lock()
                    continue
                self.gpu.lock_graphics_clock(clock_mhz)
                is_watched = self._transitions.is_due(self.num_changes)
                self.num_changes += 1
                self._applied_mhz = clock_mhz
                before_mhz, self._landed_mhz = self._landed_mhz, None
                if not is_watched:
                    continue
                with contextlib.suppress(NotSupportedError):  # clocks can be set, but not read
                    seen = yield from self._transitions.watch(clock_mhz, since_s, self._pause, before_mhz)
                    self._landed_mhz = clock_mhz if seen.latency_s is not None else None
        except Exception as error:  # surfaces as `error`; a dead worker would hide it
            self.error = error
            self._say(error)
        finally:
            yield from self._restore()
            self._is_stopped = True

    def _wanted(self) -> tuple[int | None, float]:
        return self._target.at(self._time.now_s())

    def _pause(self, duration_s: float) -> Generator[float, None, bool]:
        """Sleep, at most until something is to be done; returns whether that is so."""
        now_s, target = self._time.now_s(), self._target
        if not self._is_closed and target.at(now_s)[0] == self._applied_mhz and duration_s > 0:
            yield min(duration_s, target.next_s - now_s) if target.next_s > now_s else duration_s
        return self._is_closed or self._wanted()[0] != self._applied_mhz

    def _say(self, error: Exception) -> None:
        if isinstance(error, ClockPermissionError):
            level = logging.DEBUG if self.is_quiet else logging.WARNING
            logger.log(level, "Training goes on without clock control, at the GPU's own clocks. %s", error)
        elif isinstance(error, DeviceError):
            logger.warning("Clock control of %s stops; training goes on. %s", self.gpu.name, error)
        else:
            logger.error("Clock control of %s stops because of a bug.", self.gpu.name, exc_info=error)

    def _restore(self) -> Process[None]:
        """Restore, tried again until closed: what the driver refuses now it may do later, and a lock would stay."""
        refusal: Exception | None = None
        for attempt, pause_s in enumerate(itertools.chain(_RESTORES_AFTER_S, itertools.repeat(_RESTORES_EVERY_S))):
            try:
                self.gpu.restore()
            except Exception as error:
                if self.error is None:
                    self.error = refusal = error
                if attempt == len(_RESTORES_AFTER_S):
                    again = "" if self._is_closed else f" This is tried again every {_RESTORES_EVERY_S:g} s."
                    logger.error("The clocks of %s could not be restored: %s%s", self.gpu.name, error, again)
                if attempt >= len(_RESTORES_AFTER_S) and self._is_closed:
                    return
                yield from self._wait_to_restore(pause_s)
            else:
                if self.error is refusal:  # what was refused is done
                    self.error = None
                if attempt:
                    logger.warning("The clocks of %s were restored at attempt %d.", self.gpu.name, attempt + 1)
                return

    def _wait_to_restore(self, duration_s: float) -> Process[None]:
        """Sleep, though requests made before may wake the worker; only `close` comes at once."""
        end_s, was_closed = self._time.now_s() + duration_s, self._is_closed
        while self._is_closed == was_closed and (left_s := end_s - self._time.now_s()) > 0:
            yield left_s
