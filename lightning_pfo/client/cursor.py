"""The next clock of a plan, for a loop that may do something else than the plan says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from lightning_pfo.core.wording import counted

logger = logging.getLogger(__name__)


class RowCursor:
    """Asks for the clock of the next instruction as soon as the present one ends.

    Where the loop leaves the plan (it evaluates, or has another number of microbatches), the rest of the step runs at
    the top clock, and the next step begins with the plan again.

    Args:
        request: Asks for a clock in MHz; returns at once.
        top_mhz: The highest clock; 0 where none can be set.

    Attributes:
        is_on_plan: Whether this step has followed the plan so far.
    """

    def __init__(self, request: Callable[[int], None], top_mhz: int) -> None:
        self._request, self._top_mhz = request, top_mhz
        self._row: Sequence[tuple[str, int]] = ()
        self._position = 0
        self._has_warned = False
        self.is_on_plan = True

    def begin(self, row: Sequence[tuple[str, int]]) -> None:
        """A step begins, under this plan; an empty one has no clocks."""
        if row is not self._row:
            self._row, self._has_warned = row, False
        self._position, self.is_on_plan = 0, True
        self._ask()

    def begin_instruction(self, name: str) -> None:
        """An instruction begins."""
        if not self._row or not self.is_on_plan:
            return
        planned = self._row[self._position][0] if self._position < len(self._row) else "nothing more"
        if planned == name:
            return
        self.is_on_plan = False
        self._request(self._top_mhz)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The plan has %s as instruction %d of a step, the loop runs %s: the rest of the step runs at %s. "
                "(The plan is for %s in a step.)",
                planned,
                self._position + 1,
                name,
                f"{self._top_mhz} MHz" if self._top_mhz else "the GPU's own clocks",
                counted(len(self._row), "instruction"),
            )

    def end_instruction(self) -> None:
        """An instruction is over."""
        if self.is_on_plan and self._row:
            self._position += 1
            self._ask()

    @property
    def is_complete(self) -> bool:
        """Whether the step has run all that the plan has."""
        return self.is_on_plan and self._position == len(self._row) > 0

    def _ask(self) -> None:
        if self._row:
            clock_mhz = self._row[self._position % len(self._row)][1]  # after the last one comes the next step
            self._request(clock_mhz or self._top_mhz)  # Zeus: 0 is no clock
