"""Where lower clocks begin to cost energy: a scan from the highest clock down need not go further."""

from __future__ import annotations

import math


class EnergyValley:
    """Decides when an instruction has been scanned far enough.

    Args:
        patience: Rises of energy in a row after which it will not fall again.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._last_j = math.inf
        self._num_rises = 0

    @property
    def passed(self) -> bool:
        """Whether energy has risen `patience` times in a row."""
        return self._num_rises >= self._patience

    def add(self, energy_j: float) -> None:
        """Take the energy at the next lower clock."""
        self._num_rises = self._num_rises + 1 if energy_j > self._last_j else 0
        self._last_j = energy_j
