"""What ranks call together outside runs, in a script after `fit`: without one that has ended it comes to no end.

Between runs a rank may end as it likes. It says so while it can, with what its script has ended by, and all say how
many calls they have come to the end of::

    rank 2 --called 1--> hub
    rank 2 --ended--> hub --ended, after call 1--> rank 1, rank 3      if these are in call 2, it ends with an error

Who waits for the very rank that has ended gets an error of the transfer. Who waits for another one, which has that
error and goes on, would wait for ever, so that its call is broken off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from lightning_pfo.core.errors import PfoError
from lightning_pfo.strategy.watch.errors import RankDiedError, tells_of_others

_NEWS_S = 2.0
"""How long to wait for the news: what fails because another rank is gone may fail a little before."""
_BY_ITSELF_S = 2.0
"""How long a call may take to fail by itself, as it does where it waits for the very rank that has ended."""


class _End(NamedTuple):
    """The end of another rank.

    Attributes:
        text: What is said of it.
        calls: How many calls it had come to the end of.
    """

    text: str
    calls: int


class Calls:
    """The calls of this rank outside runs, each of which all ranks make, in the same order.

    Args:
        changed: Guards what is known of other ranks, and tells of changes.
        death: Which rank is known to be dead.
        break_off: Declares a rank dead, for a reason, and makes transfers fail.
        end_process: Ends this process for a reason.
        grace_s: How long a call may take to end when transfers have failed.

    Attributes:
        under_way: Whether one is.
        completed: The number of the last one that has come to its end.
    """

    def __init__(
        self,
        changed: threading.Condition,
        death: Callable[[], str | None],
        break_off: Callable[[str], None],
        end_process: Callable[[str], None],
        grace_s: float,
    ) -> None:
        self.under_way = False
        self.completed = 0
        self._number = 0
        self._changed = changed
        self._death = death
        self._break_off = break_off
        self._end_process = end_process
        self._grace_s = grace_s
        self._ends: dict[str, _End] = {}  # by names of ranks, the first one first

    @contextmanager
    def call(self) -> Iterator[None]:
        """While the context is open, a call is under way.

        Raises:
            RankDiedError: If it cannot come to an end because a rank has ended.
        """
        with self._changed:
            self._number += 1
            if (cause := self._death() or self._missing()) is not None:
                raise RankDiedError(cause)
            self.under_way = True
        try:
            yield
        except PfoError:
            raise
        except Exception as error:
            if (cause := self._cause_of(error)) is not None:
                raise RankDiedError(cause) from error
            raise
        else:
            self.completed = self._number
        finally:
            with self._changed:
                self.under_way = False
                self._changed.notify_all()

    def note_end(self, name: str, error: str, calls: int) -> None:
        """Note that another rank has ended; the first news of that counts.

        Args:
            name: The rank.
            error: What its script has ended by, as far as that is known.
            calls: How many calls it had come to the end of.
        """
        if name in self._ends:
            return
        how = f"with {error}" if error else "(if by an error, its own output has that)"
        text = f"{name} has ended {how}. What all ranks call together cannot be done without it."
        self._ends[name] = _End(text, calls)
        self._changed.notify_all()
        if self.under_way and (missing := self._missing()) is not None:
            self._break_off_soon(missing)

    def first_end(self) -> str | None:
        """What is said of the first other rank that has ended, after a moment for the news; None if none has."""
        with self._changed:
            self._changed.wait_for(lambda: self._ends, _NEWS_S)
            return next((end.text for end in self._ends.values()), None)

    def _missing(self) -> str | None:
        """Which rank will not come to the present call any more."""
        return next((end.text for end in self._ends.values() if end.calls < self._number), None)

    def _cause_of(self, error: Exception) -> str | None:
        with self._changed:
            if tells_of_others(error):
                self._changed.wait_for(lambda: self._missing() or self._death(), _NEWS_S)
                return self._death() or self._missing()
            return self._death()  # what is broken off has other errors, too

    def _break_off_soon(self, missing: str) -> None:
        number = self._number

        def is_over() -> bool:
            return not self.under_way or self._number != number

        def wait() -> None:
            with self._changed:
                if self._changed.wait_for(is_over, _BY_ITSELF_S):
                    return
                self._break_off(missing)
                if not self._changed.wait_for(is_over, self._grace_s):
                    self._end_process(missing)

        threading.Thread(target=wait, name="pfo-rank-watch-call", daemon=True).start()
