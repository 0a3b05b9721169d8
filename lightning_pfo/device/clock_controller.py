"""Set GPU clocks off the training thread.

::

    training thread   request(1410)  request(1200) request(1305)        request(1305)   close()
    worker thread            lock 1410............|lock 1305 (1200 is skipped)          restore

NVML needs milliseconds for a change, so a queue of old requests would leave the clock ever further behind: only the
latest one counts.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from types import TracebackType

from lightning_pfo.core.errors import ClockPermissionError, DeviceError
from lightning_pfo.device import clock_guard
from lightning_pfo.device.gpu import Gpu

logger = logging.getLogger(__name__)

_POLL_S = 0.0002
_CLOSE_TIMEOUT_S = 5.0


class ClockController:
    """Applies clock requests to one GPU, in order, the latest first; restores the clocks at the end.

    Only the worker thread changes clocks, `restore` included, and the two sides share no lock: `close` may be called
    from a signal handler that has interrupted `request` at any point. From the first request on, `clock_guard` closes
    the controller at exit and on signals; `with ClockController(gpu) as clocks` closes it earlier.

    Attributes:
        gpu: The GPU, which stays open.
        error: The first failure, after which the clocks are restored and no more are set. None while all is well.
        num_changes: How often a clock was set (repeated and overtaken requests do not count).
    """

    def __init__(self, gpu: Gpu, *, is_quiet: bool = False) -> None:
        """Set nothing yet.

        Args:
            gpu: The GPU.
            is_quiet: Do not warn when the clocks cannot be set; another process of this node does.
        """
        self.gpu = gpu
        self._warning_level = logging.DEBUG if is_quiet else logging.WARNING
        self.error: Exception | None = None
        self.num_changes = 0
        self._wake_ups: queue.SimpleQueue[None] = queue.SimpleQueue()  # the only queue that is safe in signal handlers
        self._requested_mhz: int | None = None
        self._applied_mhz: int | None = None
        self._is_closed = False
        self._is_stopped = False
        self._worker: threading.Thread | None = None

    def request(self, clock_mhz: int) -> None:
        """Ask for a clock and return at once. A repeated value costs nothing; after an error or `close`, neither."""
        if clock_mhz == self._requested_mhz or self._is_closed or self.error is not None:
            return
        if self._worker is None:
            # Guard first: from here on there is something to restore. Also late enough to be installed over Lightning's
            # own SIGTERM handler, which waits for other ranks before it calls the handlers it replaced.
            clock_guard.register(self)
            self._worker = threading.Thread(target=self._work, name="pfo-clock-controller", daemon=True)
            self._worker.start()
        self._requested_mhz = clock_mhz
        self._wake_ups.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the latest request has been applied.

        Returns:
            Whether the GPU has been set to it; False after `timeout_s`, an error or `close`.
        """
        deadline_s = time.monotonic() + timeout_s
        while self._applied_mhz != self._requested_mhz:
            if self.error is not None or self._is_closed or time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        return self.error is None and not self._is_closed

    def close(self) -> None:
        """Stop and restore the clocks; later requests are ignored. May be called twice, and from signal handlers."""
        self._is_closed = True
        self._wake_ups.put(None)
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        while self._worker is not None and not self._is_stopped and self._worker.is_alive():
            if time.monotonic() >= deadline_s:
                logger.error(
                    "%s did not answer within %.0f s, so its clocks may still be locked. Unlock them with: "
                    "nvidia-smi --reset-gpu-clocks",
                    self.gpu.name,
                    _CLOSE_TIMEOUT_S,
                )
                break
            time.sleep(_POLL_S)  # no join(): it is not safe when a signal handler interrupts one
        clock_guard.unregister(self)

    def __enter__(self) -> ClockController:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        """Apply requests until closed, or until the first failure: better the GPU's own clocks than a stale one."""
        try:
            while True:
                self._wake_ups.get()
                clock_mhz = self._requested_mhz
                if self._is_closed:
                    return
                if clock_mhz is not None and clock_mhz != self._applied_mhz:
                    self.gpu.lock_graphics_clock(clock_mhz)
                    self.num_changes += 1
                    self._applied_mhz = clock_mhz
        except Exception as error:  # surfaces as `error`; a dead worker would hide it
            self.error = error
            self._say(error)
        finally:
            self._restore()
            self._is_stopped = True

    def _say(self, error: Exception) -> None:
        if isinstance(error, ClockPermissionError):
            logger.log(
                self._warning_level, "Training goes on without clock control, at the GPU's own clocks. %s", error
            )
        elif isinstance(error, DeviceError):
            logger.warning("Clock control of %s stops; training goes on. %s", self.gpu.name, error)
        else:
            logger.error("Clock control of %s stops because of a bug.", self.gpu.name, exc_info=error)

    def _restore(self) -> None:
        try:
            self.gpu.restore()
        except Exception as error:
            self.error = self.error or error
            logger.error("The clocks of %s could not be restored: %s", self.gpu.name, error)
