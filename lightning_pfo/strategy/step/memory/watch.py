"""The report of memory: made before the first training step, and on CUDA compared with what is measured later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.step.memory.forecast import MemoryForecast
from lightning_pfo.strategy.step.memory.report import MemoryReport, RankMemory

_MEASURED_STEP = 4
"""From the begin of this training step, the fifth, to that of the next is measured: neither batch is compared."""
_WORTH_IT = 16 << 20
"""So many bytes of parameters are enough for a report, which takes some tenths of a second."""


def is_worth_a_report(module: nn.Module) -> bool:
    """Whether a module, with placeholders for what other ranks hold, is large."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters()) >= _WORTH_IT


def report_of(engine: PipelineEngine, mine: RankMemory | None) -> MemoryReport | None:
    """The report of all ranks, from that of each; None if one has none. A collective call."""
    ranks = engine.all_gather(mine, everywhere=True)
    return None if None in ranks else MemoryReport(tuple(ranks))


class MemoryWatch:
    """Makes the report of one `fit`.

    Args:
        forecast: Foretells the memory of this rank.
        say: Says it to people; called on every rank.

    Attributes:
        report: The report, from the first step on.
    """

    def __init__(self, forecast: MemoryForecast, say: Callable[[str], object]) -> None:
        self.report: MemoryReport | None = None
        self._forecast = forecast
        self._say = say
        self._steps = 0

    def before_step(self, *args: Any, **kwargs: Any) -> None:
        """A training step is about to run; a collective call.

        Args:
            *args: What `MemoryForecast.of` takes.
            **kwargs: The same.
        """
        engine = self._forecast.engine
        if self.report is None:
            mine = self._forecast.of(*args, **kwargs)
            report = report_of(engine, mine)
            if report is None:
                return
            self._tell(report)
        if engine.device.type == "cuda":
            if self._steps == _MEASURED_STEP:
                torch.cuda.reset_peak_memory_stats(engine.device)
            elif self._steps == _MEASURED_STEP + 1:
                measured = torch.cuda.max_memory_allocated(engine.device)
                assert self.report is not None
                self._tell(self.report.with_measured(engine.all_gather(measured, everywhere=True)))
        self._steps += 1

    def _tell(self, report: MemoryReport) -> None:
        self.report = report
        self._say(str(report))
