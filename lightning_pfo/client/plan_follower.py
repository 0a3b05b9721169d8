"""Asks for plans beside the training, and brings reports; without a server the last plan stays.

::

    training thread   step 7 | step 8 | step 9 | ...        looks at `latest`, tells `at_step`
    follower thread     ask      ask      ask               "at step 8"; the server: "nothing changes up to step 11"

A step that the server's promise does not reach is the only one that waits, for a second at most, and only once: then
the server is away until it is heard of again, and the last plan stays.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_pfo.client.server_link import Answer, ServerAwayError, ServerLink, ServerRefusalError, quoted

logger = logging.getLogger(__name__)

_EVERY_S, _LONGEST_PAUSE_S, _TIMEOUT_S = 0.2, 30.0, 10.0
_IDLE_S = 20.0
"""A job whose steps are long says so often that it is still there."""
_LEAST_AHEAD, _MOST_AHEAD = 2, 1_000
_LONGEST_HOLD_S = 1.0
_CLOSE_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class ReceivedPlan:
    """A plan as the server has sent it.

    Attributes:
        version: 1, 2, ...; 0 before there is one.
        from_step: From this step on it is followed.
        row: Names of instructions and clocks in MHz.
        purpose: `scan` if it is there to be measured, else `plan`.
        label: How it was chosen.
    """

    version: int = 0
    from_step: int = 0
    row: tuple[tuple[str, int], ...] = ()
    purpose: str = "plan"
    label: str = ""


class PlanFollower:
    """Keeps the latest plan of one rank.

    Args:
        link: The server.
        job_id: The job.
        rank: The rank.

    Attributes:
        latest: The latest plan that was received; replaced as a whole.
    """

    def __init__(self, link: ServerLink, job_id: str, rank: int) -> None:
        self._link, self._rank = link, rank
        self._path = quoted(job_id)
        self.latest = ReceivedPlan()
        self._step, self._step_s, self._began_s = 0, math.inf, 0.0
        self._round_trip_s = 0.0
        self._promised_step = 0
        self._heard = threading.Event()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()  # whether to ask at once
        self._reports: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._unsent: Mapping[str, Any] | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = self._is_away = False

    def wait_for_first(self, timeout_s: float) -> bool:
        """Wait for a first plan; returns whether there is one.

        Raises:
            ServerRefusalError: If there will be none.
        """
        deadline_s = time.monotonic() + timeout_s
        while self.latest.version == 0 and (left_s := deadline_s - time.monotonic()) > 0:
            try:
                self._ask(wait_s=min(left_s, 20.0))
            except ServerAwayError as error:
                self._say_away(error)
                time.sleep(min(left_s, 1.0))
        return self.latest.version > 0

    def start(self) -> None:
        """Ask at each step from now on, on a thread of its own."""
        self._thread = threading.Thread(target=self._work, name="pfo-plans", daemon=True)
        self._thread.start()

    def at_step(self, step: int) -> None:
        """A step begins."""
        now_s = time.monotonic()
        if step > self._step:
            self._step_s = now_s - self._began_s
        self._step, self._began_s = step, now_s
        is_urgent = step > self._promised_step and not self._is_away and self._thread is not None
        self._heard.clear()
        self._wake.put(is_urgent)
        if is_urgent and self._thread is not None and self._thread.is_alive():
            deadline_s = now_s + _LONGEST_HOLD_S
            while step > self._promised_step and not self._is_away:
                if not self._heard.wait(max(0.0, deadline_s - time.monotonic())):
                    self._is_away = True
                self._heard.clear()

    def report(self, body: Mapping[str, Any]) -> None:
        """Send what was measured; it is sent again until the server has it."""
        self._reports.put(body)
        self._wake.put(False)

    def close(self) -> None:
        """Stop asking. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake.put(True)
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        pause_s = _EVERY_S
        while not self._is_closed:
            try:
                self._send_reports()
                self._ask()
                if self._is_away:
                    logger.info("The server is back.")
                self._is_away, pause_s = False, _EVERY_S
            except ServerAwayError as error:
                self._say_away(error)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except ServerRefusalError as error:
                if not self._is_closed:
                    logger.warning("No more plans are asked for; training goes on under the last one. %s", error)
                return
            self._sleep(pause_s)

    def _sleep(self, least_s: float) -> None:
        """At least so long, and until a step begins; what is urgent ends it at once."""
        until_s = time.monotonic() + least_s
        has_news = False
        while not self._is_closed:
            left_s = until_s - time.monotonic()
            if left_s <= 0 and has_news:
                return
            try:
                if self._wake.get(timeout=left_s if left_s > 0 else _IDLE_S):
                    return
                has_news = True
            except queue.Empty:
                if left_s <= 0:
                    return

    def _send_reports(self) -> None:
        while self._unsent is not None or not self._reports.empty():
            self._unsent = self._unsent or self._reports.get()
            try:
                self._link.post(f"/result/{self._path}", self._unsent, timeout_s=_TIMEOUT_S)
            except ServerRefusalError as error:
                logger.warning("The server does not take what was measured: %s", error)
            self._unsent = None

    def _ask(self, wait_s: float = 0.0) -> None:
        # a rank that is told "nothing changes before" has asked again by then
        between_s = 2 * (_EVERY_S + self._round_trip_s)
        ahead = _LEAST_AHEAD + math.ceil(between_s / max(self._step_s, 1e-4))
        query = {
            "rank": self._rank,
            "step": self._step,
            "version": self.latest.version,
            "ahead": min(ahead, _MOST_AHEAD),
            "wait_s": f"{wait_s:.3f}",
        }
        asked_s = time.monotonic()
        answer = self._link.get(f"/jobs/{self._path}/plan", query, timeout_s=wait_s + _TIMEOUT_S)
        if not wait_s:
            self._round_trip_s = time.monotonic() - asked_s
        self._take(answer)
        self._promised_step = max(self._promised_step, int(answer.headers.get("unchanged-until-step", 0)))
        self._heard.set()

    def _take(self, answer: Answer) -> None:
        if answer.status == 204:
            return
        try:
            plan = answer.content
            received = ReceivedPlan(
                int(plan["version"]),
                int(plan["from_step"]),
                tuple((str(name), int(mhz)) for name, mhz in plan["frequencies"]),
                str(plan["purpose"]),
                str(plan["label"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ServerAwayError(f"The server's answer is no plan ({type(error).__name__}: {error}).") from None
        if received.version > self.latest.version:
            self.latest = received

    def _say_away(self, error: Exception) -> None:
        if not self._is_away and not self._is_closed:
            logger.warning("Training goes on without the server, under the last plan it has sent. %s", error)
        self._is_away = True
