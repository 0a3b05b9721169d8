"""What waits and what takes a while, around a registry that does neither; all of it on one event loop."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from lightning_pfo.core.errors import PfoError, PlanError
from lightning_pfo.server.jobs.answers import NotYet, UnavailableError
from lightning_pfo.server.jobs.director import Work
from lightning_pfo.server.jobs.messages import PlanRows
from lightning_pfo.server.jobs.registry import JobRegistry

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_S = 5.0
"""How often a request that waits looks whether its client is still there."""
_LONGEST_SWEEP_S = 60.0


class ClientLeftError(Exception):
    """Nobody waits for the answer any more."""


class Service:
    """Answers requests from a registry.

    Args:
        registry: The jobs.
        wait_s: A request waits so long for other ranks.
        sweep_s: How often to look for jobs that are over.

    Attributes:
        num_waiting: Requests that wait now.
    """

    def __init__(self, registry: JobRegistry, *, wait_s: float, sweep_s: float = _LONGEST_SWEEP_S) -> None:
        self.registry = registry
        self.num_waiting = 0
        self._wait_s, self._sweep_s = wait_s, sweep_s
        self._changes: dict[str, asyncio.Event] = {}
        self._is_ending = False
        self._making: set[str] = set()
        registry.on_change(self._wake)

    def now(self, attempt: Callable[[], T]) -> T:
        """Answer at once.

        Raises:
            Refusal: What the registry refuses, and what cannot be kept.
        """
        try:
            return attempt()
        except sqlite3.Error as error:
            logger.error("The state cannot be written: %s", error)
            raise UnavailableError("The server cannot keep what it is told; its log says why. Try again.") from error
        finally:
            self._start_due()

    async def when_there(
        self,
        job_id: str,
        attempt: Callable[[], T],
        has_left: Callable[[], Awaitable[bool]],
        wait_s: float | None = None,
    ) -> T:
        """Answer when the answer is there.

        Args:
            job_id: The job it depends on.
            attempt: Answers, or raises `NotYet`.
            has_left: Whether the client is not there any more.
            wait_s: How long to wait; None as this service does.

        Raises:
            Refusal: What the registry refuses; or if the answer is not there in time, or the server ends.
            ClientLeftError: If the client has left.
        """
        clock = asyncio.get_running_loop().time
        wait_s = self._wait_s if wait_s is None else wait_s
        deadline_s = clock() + wait_s
        self.num_waiting += 1
        try:
            while True:
                change = self._changes.setdefault(job_id, asyncio.Event())
                try:
                    return self.now(attempt)
                except NotYet as missing:
                    reason = str(missing)
                if self._is_ending:
                    raise UnavailableError(f"The server ends; it waited for: {reason}. Ask again when it is back.")
                left_s = deadline_s - clock()
                if left_s <= 0:
                    raise UnavailableError(
                        f"Waited {wait_s:g} s: {reason}. Start the ranks that are missing, and ask again."
                    )
                try:
                    await asyncio.wait_for(change.wait(), min(left_s, _LOOK_S))
                except asyncio.TimeoutError:
                    if await has_left():
                        raise ClientLeftError from None
        finally:
            self.num_waiting -= 1
            if job_id not in self.registry.jobs:
                self._changes.pop(job_id, None)

    def end(self) -> None:
        """Answer all that wait, and let nobody wait any more."""
        self._is_ending = True
        for job_id in [*self._changes]:
            self._wake(job_id)

    async def sweep(self) -> None:
        """Look for jobs that are over, for ever."""
        while True:
            await asyncio.sleep(self._sweep_s)
            for job_id in self.now(self.registry.sweep):
                logger.info("Job %s is over: nothing is heard of it.", job_id)

    def _wake(self, job_id: str) -> None:
        change = self._changes.pop(job_id, None)
        if change is not None:
            change.set()

    def _start_due(self) -> None:
        for job_id, work in self.registry.due.items():
            if job_id not in self._making:
                self._making.add(job_id)
                loop = asyncio.get_running_loop()
                # a daemon: the end of the server does not wait for a plan, which is made again when it is back
                threading.Thread(
                    target=self._make, args=(job_id, work, loop), name=f"plan-{job_id}", daemon=True
                ).start()

    def _make(self, job_id: str, work: Work, loop: asyncio.AbstractEventLoop) -> None:
        made: PlanRows | PfoError
        try:
            made = work()
        except PfoError as error:
            made = error
        except Exception as error:
            logger.exception("A plan for job %s could not be made because of a bug.", job_id)
            made = PlanError(f"Planning failed because of a bug: {type(error).__name__}. The server's log has more.")
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._made, job_id, made)

    def _made(self, job_id: str, made: PlanRows | PfoError) -> None:
        self._making.discard(job_id)
        self.now(lambda: self.registry.planned(job_id, made))
