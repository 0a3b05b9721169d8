"""When a rank asks for plans, and how many steps ahead.

The server promises a rank that nothing changes up to some step; the rank begins no step beyond it without asking. A new
plan begins after all promises, so it begins the sooner the later ranks ask and the less they ask for. Steps that are
long enough are asked for one by one, each so late in the one before that the answer is there just in time::

    step          7                  8                  9
    asks     ..........8?        .........9?        ........10?
                   ^ a new plan: from step 8      ^ here: from step 10, as step 9 is promised

Shorter steps are asked for several at a time, so that a server can answer many ranks.
"""

from __future__ import annotations

import math

_LEAST_PAUSE_S, _ROUND_TRIPS_PAUSE = 0.1, 20
"""Time between two questions; a server that answers slowly is asked seldom."""
_LEAST_MARGIN_S, _ROUND_TRIPS_MARGIN = 0.02, 4
"""Time for an answer."""
_MOST_AHEAD = 1_000


class Pace:
    """Told of steps by the training, and of answers by the thread that asks.

    Attributes:
        step: The step that the rank is at.
    """

    def __init__(self) -> None:
        self.step = 0
        self._step_s, self._began_s, self._asked_s = math.inf, -math.inf, -math.inf
        self._round_trip_s = 0.0
        self._has_news = False

    def begin(self, step: int, now_s: float) -> None:
        """A step begins."""
        if step > self.step:
            self._step_s = now_s - self._began_s
        self.step, self._began_s, self._has_news = step, now_s, True

    def asked(self, now_s: float) -> None:
        """A question is sent."""
        self._asked_s, self._has_news = now_s, False

    def answered(self, round_trip_s: float) -> None:
        """An answer took so long."""
        self._round_trip_s = round_trip_s

    @property
    def ask_at_s(self) -> float:
        """When to ask next; infinity where that depends on the next step."""
        if not self._has_news:
            return math.inf
        return max(self._asked_s + self._pause_s, self._began_s + self._step_s - self._margin_s)

    @property
    def ahead(self) -> int:
        """How many steps to ask for: as many as begin before the next answer, and one more."""
        step_s = max(self._step_s, 1e-4)
        if step_s >= self._pause_s:
            return 1
        return min(1 + math.ceil((self._pause_s + self._margin_s) / step_s), _MOST_AHEAD)

    @property
    def _pause_s(self) -> float:
        return max(_LEAST_PAUSE_S, _ROUND_TRIPS_PAUSE * self._round_trip_s)

    @property
    def _margin_s(self) -> float:
        return max(_LEAST_MARGIN_S, _ROUND_TRIPS_MARGIN * self._round_trip_s)
