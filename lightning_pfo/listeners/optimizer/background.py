"""Work on the first rank beside the training, whose result all ranks get at the end of the same iteration."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from lightning_pfo.core.errors import PfoError
from lightning_pfo.core.events import InstructionSource
from lightning_pfo.listeners.agreement import is_first

log = logging.getLogger(__name__)

T = TypeVar("T")
_CLOSE_TIMEOUT_S = 10.0


class Background(Generic[T]):
    """One job at a time, on a thread of the first rank.

    Args:
        source: The pipeline rank.
        waits: Whether the first rank waits for the job where it is asked for the result. In virtual time it does, as
            iterations take no time there: the plan must not come sooner or later with the speed of the machine.
    """

    def __init__(self, source: InstructionSource, *, waits: bool) -> None:
        self._source = source
        self._waits = waits
        self._thread: threading.Thread | None = None
        self._outcome: tuple[T | None, str] | None = None

    def start(self, job: Callable[[], T]) -> None:
        """Start a job; other ranks than the first do nothing."""
        if not is_first(self._source):
            return
        self._outcome = None
        self._thread = threading.Thread(target=self._work, args=(job,), name="pfo-planner", daemon=True)
        self._thread.start()

    def _work(self, job: Callable[[], T]) -> None:
        try:
            self._outcome = job(), ""
        except PfoError as error:
            self._outcome = None, str(error)
        except Exception as error:  # training goes on without a plan
            log.error("Planning has failed because of a bug.", exc_info=error)
            self._outcome = None, f"{type(error).__name__}: {error}"

    def finish(self) -> None:
        """Let the job be done before anything else."""
        if self._thread is not None:
            self._thread.join()

    def result(self) -> tuple[T | None, str] | None:
        """The result and "", or None and why there is none; None while it is not there. A collective call."""
        if self._waits:
            self.finish()
        told: list[Any] = self._source.all_gather(self._outcome, everywhere=True)
        outcome: tuple[T | None, str] | None = next((one for one in told if one is not None), None)
        if outcome is not None:
            self._thread = self._outcome = None
        return outcome

    def close(self) -> None:
        """Wait for a job that is under way, as the interpreter must not end in the midst of it."""
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
