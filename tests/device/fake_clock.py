"""Time that passes only when somebody waits."""

from __future__ import annotations

import queue
from collections.abc import Callable


class FakeClock:
    """A `TimeSource` in which waiting costs nothing; actions can be scheduled to happen in the middle of a wait."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self._actions: list[tuple[float, Callable[[], object]]] = []

    def now_s(self) -> float:
        return self.time_s

    def at(self, time_s: float, action: Callable[[], object]) -> None:
        """Run `action` when time gets to `time_s`."""
        self._actions.append((time_s, action))
        self._actions.sort(key=lambda pair: pair[0])

    def advance(self, duration_s: float) -> None:
        self._advance_to(self.time_s + duration_s)

    def wait(self, wake_ups: queue.SimpleQueue[None], timeout_s: float) -> None:
        end_s = self.time_s + timeout_s
        while wake_ups.empty():
            if not (self._actions and self._actions[0][0] <= end_s):
                self._advance_to(end_s)
                return
            self._advance_to(self._actions[0][0])
        wake_ups.get()

    def _advance_to(self, end_s: float) -> None:
        while self._actions and self._actions[0][0] <= end_s:
            time_s, action = self._actions.pop(0)
            self.time_s = max(self.time_s, time_s)
            action()
        self.time_s = max(self.time_s, end_s)
