"""Asks for plans beside the training, and brings reports; without a server the last plan stays.

::

    training thread   step 7 | step 8 | step 9 | ...        tells `at_step`, looks at `plan_at`
    follower thread        ask      ask      ask            "at step 8"; the server: "nothing changes up to step 9"

A step that the server's promise does not reach is the only one that waits, for a second at most, and only once: then
the server is away until it is heard of again, and the last plan stays. `pace` says when to ask.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from lightning_pfo.client.answers import ReceivedPlan, promised_step, received_plan
from lightning_pfo.client.pace import Pace
from lightning_pfo.client.server_link import ServerAwayError, ServerLink, ServerRefusalError, quoted

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, _TIMEOUT_S = 0.2, 30.0, 10.0
"""A server that is away is asked again after so long, and twice as long each time."""
_IDLE_S = 20.0
"""A job whose steps are long says so often that it is still there."""
_LONGEST_HOLD_S = 1.0
_CLOSE_TIMEOUT_S = 2.0


class PlanFollower:
    """Keeps the plans of one rank.

    Args:
        link: The server.
        job_id: The job.
        rank: The rank.
    """

    def __init__(self, link: ServerLink, job_id: str, rank: int) -> None:
        self._link, self._rank = link, rank
        self._path = quoted(job_id)
        self._plans: tuple[ReceivedPlan, ...] = (ReceivedPlan(),)
        self._pace = Pace()
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
            if self.latest.version == 0:  # some servers, or proxies, wait for nothing
                time.sleep(min(left_s, _SHORTEST_PAUSE_S))
        return self.latest.version > 0

    @property
    def latest(self) -> ReceivedPlan:
        """The latest plan that was received."""
        return self._plans[-1]

    def plan_at(self, step: int) -> ReceivedPlan:
        """The plan of a step, which begins."""
        return max((plan for plan in self._plans if plan.from_step <= step), key=lambda plan: plan.version)

    def start(self) -> None:
        """Ask at each step from now on, on a thread of its own."""
        self._thread = threading.Thread(target=self._work, name="pfo-plans", daemon=True)
        self._thread.start()

    def at_step(self, step: int) -> None:
        """A step begins."""
        now_s = time.monotonic()
        self._pace.begin(step, now_s)
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
        away_s, is_due = 0.0, True
        while not self._is_closed:
            try:
                self._send_reports()
                if is_due:
                    self._ask()
                    if self._is_away:
                        logger.info("The server is back.")
                    self._is_away = False
                away_s = 0.0
            except ServerAwayError as error:
                self._say_away(error)
                away_s = min(max(2 * away_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
            except ServerRefusalError as error:
                if not self._is_closed:
                    logger.warning("No more plans are asked for; training goes on under the last one. %s", error)
                return
            is_due = self._wait(away_s)

    def _wait(self, away_s: float) -> bool:
        """Until it is time to ask, or there is a report to bring; returns whether it is time to ask.

        Args:
            away_s: At least so long.
        """
        now_s = time.monotonic()
        not_before_s, idle_until_s = now_s + away_s, now_s + _IDLE_S
        while not self._is_closed:
            at_s = max(min(self._pace.ask_at_s, idle_until_s), not_before_s)
            now_s = time.monotonic()
            if now_s >= at_s:
                return True
            try:
                if self._wake.get(timeout=at_s - now_s):
                    return True
            except queue.Empty:
                continue
            if not self._reports.empty() and time.monotonic() >= not_before_s:
                return False
        return False

    def _send_reports(self) -> None:
        while self._unsent is not None or not self._reports.empty():
            self._unsent = self._unsent or self._reports.get()
            try:
                self._link.post(f"/result/{self._path}", self._unsent, timeout_s=_TIMEOUT_S)
            except ServerRefusalError as error:
                logger.warning("The server does not take what was measured: %s", error)
            self._unsent = None

    def _ask(self, wait_s: float = 0.0) -> None:
        asked_s = time.monotonic()
        self._pace.asked(asked_s)
        step = self._pace.step
        query = {
            "rank": self._rank,
            "step": step,
            "version": self.latest.version,
            "ahead": max(self._pace.ahead, self._promised_step - step),  # a server that was started anew forgets
            "wait_s": f"{wait_s:.3f}",
        }
        answer = self._link.get(f"/jobs/{self._path}/plan", query, timeout_s=wait_s + _TIMEOUT_S)
        if not wait_s:
            self._pace.answered(time.monotonic() - asked_s)
        received, promised = received_plan(answer), promised_step(answer)
        if received is not None and received.version > self.latest.version:
            self._take(received)
        self._promised_step = max(self._promised_step, promised)
        self._heard.set()

    def _take(self, received: ReceivedPlan) -> None:
        pairs = zip(self._plans, (*self._plans[1:], received), strict=True)
        self._plans = (*(plan for plan, after in pairs if after.from_step > self._pace.step), received)

    def _say_away(self, error: Exception) -> None:
        if not self._is_away and not self._is_closed:
            logger.warning("Training goes on without the server, under the last plan it has sent. %s", error)
        self._is_away = True
