"""Where a network repeats itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PeriodicPath:
    """Activities that follow each other and recur: in a pipeline, the middle of a rank's steady state.

    Attributes:
        begin: First node.
        end: Node after the last.
        period: Every activity recurs so many nodes later; divides the length.
    """

    begin: int
    end: int
    period: int
