"""What the training of an experiment has measured: its windows, its losses, its clocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_pfo.planner.adaptive.windows import Windowed


@dataclass(frozen=True)
class Training:
    """The training in windows.

    Attributes:
        baseline: Windows at the top clocks.
        plan: Windows under the plan, as many: those of equal place make a pair.
        losses: Training loss of every step.
        val_loss: Validation loss after the last step; None without validation.
        clocks_of_ranks: What became of every rank's clock changes, by its name; see `ClockStatistics.as_dict`.
    """

    baseline: Windowed
    plan: Windowed
    losses: tuple[float, ...]
    val_loss: float | None = None
    clocks_of_ranks: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def clock_failures(self) -> dict[str, str]:
        """Why ranks did not set their clocks, by rank: the plan was not what was trained under then."""
        return {rank: clocks["failure"] for rank, clocks in self.clocks_of_ranks.items() if "failure" in clocks}

    def as_dict(self) -> dict[str, Any]:
        """The content of `training` in `report.json`."""
        clocks = next(iter(self.clocks_of_ranks.values()), {})
        return {
            "final_loss": self.losses[-1],
            "val_loss": self.val_loss,
            "clocks": clocks,
            "clocks_of_ranks": self.clocks_of_ranks,
        }
