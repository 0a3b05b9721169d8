"""Windows at the top clocks and under a plan, and what has changed since clocks were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lightning_pfo.core.events import InstructionSource
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.listeners.gpu_session import GpuSession
from lightning_pfo.listeners.meters.instructions import mean_and_stderr
from lightning_pfo.listeners.optimizer.probe import Probe, ProbeMeter
from lightning_pfo.listeners.planned_run import PlannedRun
from lightning_pfo.listeners.profile_row import ProfileRow
from lightning_pfo.planner.adaptive.verification import Verified, verified
from lightning_pfo.planner.adaptive.windows import Windows

_CHANGED = 0.03
"""Time or energy of an instruction at the top clock that differs by more has changed."""

_NOTHING = Probe(0, 0, 0)


class Checking:
    """Some pairs of windows, from one iteration on.

    Args:
        source: The pipeline rank.
        session: Its GPU.
        schedule: What is executed.
        windows: How the iterations are divided.
        first: Number of the first of them.
        tops: What this rank measured at the top clock before, by stage and name of instruction; none: what has changed
            is not looked for.
    """

    def __init__(
        self,
        source: InstructionSource,
        session: GpuSession,
        schedule: PipelineSchedule,
        windows: Windows,
        first: int,
        tops: Mapping[tuple[int, str], ProfileRow],
    ) -> None:
        self._source, self._order = source, schedule.orders[source.rank]
        self._windows, self._first, self._tops = windows, first, tops
        self._meter = ProbeMeter(session.gpu, source) if tops else None
        self._reads_energy = session.gpu.energy_is_continuous
        self._seen: list[tuple[int, str, float, float]] = []
        if self._meter is not None:
            self._meter.use(self._order, _NOTHING)
            source.add_listener(self._meter)

    def is_under_plan(self, iteration: int) -> bool:
        """Which of both an iteration is for."""
        step = iteration - self._first
        return not 0 <= step < self._windows.num_steps or self._windows.place_of(step)[1]

    def is_over(self, measured: int) -> bool:
        """Whether all iterations up to this one, which was measured last, are enough."""
        return measured >= self._first + self._windows.num_steps - 1

    def after(self, iteration: int) -> None:
        """Look at what an iteration was, before the next begins."""
        if self._meter is None:
            return
        if self._is_top(iteration):
            for (stage, kind), samples in self._meter.instructions.items():
                if stage in self._source.stages and len(samples):
                    # between ticks of a counter, energies of a few instructions are not known
                    energy_j = mean_and_stderr(samples.energies_j)[0] if self._reads_energy else math.nan
                    self._seen.append((stage, kind.profile_name, mean_and_stderr(samples.times_s)[0], energy_j))
        self._meter.use(self._order, None if self._is_top(iteration + 1) else _NOTHING)

    def _is_top(self, iteration: int) -> bool:
        step = iteration - self._first
        return (
            0 <= step < self._windows.num_steps
            and not self._windows.place_of(step)[1]
            and self._windows.is_measured(step)
        )

    def changed_stages(self) -> tuple[int, ...]:
        """Stages whose time or energy at the top clock is not what it was, on any GPU; a collective call."""
        own = set()
        for key, row in self._tops.items():
            seen = [(time_s, energy_j) for stage, name, time_s, energy_j in self._seen if (stage, name) == key]
            if seen and all(
                abs(time_s / row.time - 1) > _CHANGED or abs(energy_j / row.energy - 1) > _CHANGED
                for time_s, energy_j in seen
            ):
                own.add(key[0])
        told: Sequence[set[int]] = self._source.all_gather(own, everywhere=True)
        return tuple(sorted(set().union(*told)))

    def found(self, run: PlannedRun) -> Verified | None:
        """What the windows say; a collective call."""
        return verified(self._windows, self._first, run.measurements, run.mean_energies(self._group_of))

    def _group_of(self, iteration: int) -> tuple[int, bool, bool] | None:
        step = iteration - self._first
        return self._windows.group_of(step) if 0 <= step < self._windows.num_steps else None

    def close(self) -> None:
        """Stop looking."""
        if self._meter is not None:
            self._source.remove_listener(self._meter)
            self._meter.close()
            self._meter = None
