"""What a rank measures under a plan: a few steps, then nothing until the next plan."""

from __future__ import annotations

import logging
import math
from typing import Any

from lightning_pfo.client.answers import ReceivedPlan
from lightning_pfo.core.errors import DeviceError
from lightning_pfo.core.events import InstructionSource
from lightning_pfo.device import Gpu
from lightning_pfo.listeners.meters.instructions import InstructionMeter

logger = logging.getLogger(__name__)

_WARMUP_STEPS, _MOST_REPETITIONS, _TARGET_ERROR = 1, 10, 0.02


class PlanMeasurement:
    """Measures the first steps under a plan, and makes a report of them.

    Args:
        plan: The plan.
        rank: The rank.
        gpu: Its GPU.
        source: Its loop.
        num_steps: Steps to measure, at least; ten times as many at most, while energies are uncertain.
    """

    def __init__(self, plan: ReceivedPlan, rank: int, gpu: Gpu, source: InstructionSource, num_steps: int) -> None:
        self._plan, self._rank, self._source = plan, rank, source
        self._num_steps, self._seen = num_steps, -_WARMUP_STEPS
        self._meter = InstructionMeter(gpu, source)
        source.add_listener(self._meter)

    def step_is_over(self, is_complete: bool) -> dict[str, Any] | None:
        """A step has ended; returns the report when enough were measured.

        Args:
            is_complete: Whether it has run what the plan says; otherwise all begins anew.
        """
        self._seen = self._seen + 1 if is_complete else -_WARMUP_STEPS
        if self._seen <= 0:
            self._meter.reset()
            return None
        if self._seen < self._num_steps or (
            self._meter.energy_error() > _TARGET_ERROR and self._seen < _MOST_REPETITIONS * self._num_steps
        ):
            return None
        return self._report()

    def close(self) -> None:
        """Measure no more. May be called twice."""
        self._source.remove_listener(self._meter)
        self._meter.close()

    def _report(self) -> dict[str, Any]:
        meter, num = self._meter, self._seen
        times_s = {kind.profile_name: samples.times_s for (_, kind), samples in meter.instructions.items()}
        parts_s = [_by_step(each, num) for each in (meter.blocked.times_s, *times_s.values())]
        report: dict[str, Any] = {
            "rank": self._rank,
            "version": self._plan.version,
            "iter_time": [math.fsum(time_s for part in step for time_s in part) for step in zip(*parts_s, strict=True)],
            "iter_energy": [],
            "time_breakdown": {name: _by_step(each, num) for name, each in times_s.items()},
        }
        try:
            measured = {kind.profile_name: one for (_, kind), one in meter.measured().items()}
        except DeviceError as error:
            logger.warning("Energies were not measured: %s", error)
            return report
        waiting_w = meter.blocked_power().power_w
        waited_j = 0.0 if math.isnan(waiting_w) else waiting_w * math.fsum(meter.blocked.times_s)
        total_j = waited_j + math.fsum(one.energy_j * one.samples for one in measured.values())
        report["iter_energy"] = [total_j / num] * num
        report["energy_breakdown"] = {
            name: _by_step([one.energy_j] * len(times_s[name]), num) for name, one in measured.items()
        }
        report["energy_stderr"] = {name: one.energy_stderr_j for name, one in measured.items()}
        return report


def _by_step(values: list[float], num_steps: int) -> list[list[float]]:
    each = len(values) // num_steps
    return [values[step * each : (step + 1) * each] for step in range(num_steps)]
