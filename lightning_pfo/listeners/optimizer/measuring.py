"""Measures clocks one after the other, on all ranks alike: iterations at the top clocks, then probes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_pfo.core.errors import DeviceError, PfoError
from lightning_pfo.core.events import InstructionSource
from lightning_pfo.core.flags import is_unreached
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.listeners.agreement import name_of
from lightning_pfo.listeners.gpu_session import GpuSession
from lightning_pfo.listeners.meters.instructions import Kind, TooFewTicksError
from lightning_pfo.listeners.meters.rows import measured_rows
from lightning_pfo.listeners.meters.transfers import measured_transfers
from lightning_pfo.listeners.optimizer.probe import Probe, ProbeMeter, probe_of, probe_plan, whole_iterations
from lightning_pfo.listeners.optimizer.settings import OptimizerSettings
from lightning_pfo.listeners.profile_row import ProfileRow

_TOP_ITERATIONS = 2
_LATENCY_S, _SETTLED = 0.05, 2.0
"""How long a clock may take while nobody has seen it change; and how many of the usual latencies, afterwards."""

_NOTHING = Probe(0, 0, 0)
_KINDS = {kind.profile_name: kind for kind in InstructionType}

LatenciesByPair = tuple[tuple[int, int, tuple[float, ...]], ...]
"""Latencies of clock changes, s, by the clock before and after."""


@dataclass(frozen=True)
class Found:
    """What all ranks have measured together.

    Attributes:
        rows: The measurements.
        latencies_s: Latencies of clock changes that were seen so far, by clock before and after.
    """

    rows: tuple[ProfileRow, ...]
    latencies_s: LatenciesByPair


class Measuring:
    """The measurements to make; every method that is called at the end of an iteration is a collective call.

    Args:
        source: The pipeline rank.
        session: Its GPU.
        schedule: What is executed.
        tops_mhz: The top clock of each rank of the pipeline.
        settings: How exact and how slow measuring may be.
        slowdown: Says by what share iterations were slower so far; the same on all ranks.

    Attributes:
        plan: Clocks of the coming iteration; None for the top clocks.
        is_listening: Whether there is something to measure.
    """

    def __init__(
        self,
        source: InstructionSource,
        session: GpuSession,
        schedule: PipelineSchedule,
        tops_mhz: Sequence[int],
        settings: OptimizerSettings,
        slowdown: Callable[[], float],
    ) -> None:
        self._source, self._session, self._settings = source, session, settings
        self._slowdown = slowdown
        self._schedule, self._tops_mhz = schedule, tuple(tops_mhz)
        self._order = schedule.orders[source.rank]
        self._meter = ProbeMeter(session.gpu, source)
        self.is_listening = False
        self._queue: deque[tuple[int, ...]] = deque()
        self._probes: tuple[Probe, ...] = ()
        self._times_s: dict[Kind, float] = {}
        self._transfers_s: dict[Kind, float] = {}
        self._known_latencies_s: LatenciesByPair = ()
        self._usual_latency_s = 0.0
        self._num_done = 0  # iterations of the present measurement
        self._is_pausing = False
        self.plan: FrequencyPlan | None = None

    def close(self) -> None:
        """Stop measuring for good."""
        self.rest()
        self._meter.close()

    def rest(self) -> None:
        """Stop listening until there is more to measure."""
        if self.is_listening:
            self._source.remove_listener(self._meter)
        self.is_listening, self.plan = False, None
        self._queue.clear()

    def know(self, rows: Sequence[ProfileRow], latencies_s: LatenciesByPair = ()) -> None:
        """Take what was measured before, by this process or another one.

        Args:
            rows: The measurements.
            latencies_s: Latencies of clock changes that another process has seen.
        """
        self._known_latencies_s += latencies_s
        tops: dict[Kind, ProfileRow] = {}
        for row in rows:
            kind = row.stage, _KINDS[row.instruction]
            if kind not in tops or row.frequency > tops[kind].frequency:
                tops[kind] = row
        self._times_s.update({kind: row.time for kind, row in tops.items()})
        self._transfers_s.update({kind: row.transfer_time for kind, row in tops.items() if row.transfer_time})

    # ---- the top clocks ----

    def measure_tops(self) -> None:
        """Measure whole iterations at the top clocks, from the next one on."""
        self.rest()
        self._listen()
        self._meter.use(self._order, None)
        self._num_done = 0

    def after_top(self) -> Found | None:
        """What was found; None while there is more to do.

        Raises:
            PfoError: On all ranks, what the first one has met.
        """
        self._num_done += 1
        if self._num_done < _TOP_ITERATIONS or self._wants_more():
            return None
        self._transfers_s = measured_transfers(self._source, self._meter)
        found = self._exchange(self._tops_mhz[self._source.rank])
        self.know(found.rows)
        self.rest()
        return found

    # ---- probes ----

    def measure(self, clocks_mhz: Sequence[tuple[int, ...]]) -> None:
        """Measure these clocks, one for each rank in each of them."""
        self.rest()
        self._listen()
        self._queue.extend(clocks_mhz)
        settle_s = _SETTLED * self._usual_latency_s or _LATENCY_S
        if self._session.gpu.energy_is_continuous:
            self._probes = tuple(probe_of(order, self._times_s, settle_s) for order in self._schedule.orders)
        else:  # what a few instructions use cannot be told between ticks
            self._probes = tuple(whole_iterations(order) for order in self._schedule.orders)
        self._begin_probe()

    def _begin_probe(self) -> None:
        self._num_done = 0
        self._is_pausing = self._slowdown() > self._settings.measuring_slowdown
        if self._is_pausing:
            self.plan = None
            self._meter.use(self._order, _NOTHING)
            return
        self.plan = probe_plan(self._schedule, self._tops_mhz, self._queue[0], self._probes)
        self._use_probe()

    def _use_probe(self) -> None:
        """Measure from here on; of whole iterations everything counts, the waits too."""
        probe = self._probes[self._source.rank]
        self._meter.use(self._order, probe if probe.iterations == 1 else None)

    def after_probe(self) -> tuple[Found | None, bool]:
        """What was found, if anything, and whether all is done.

        Raises:
            PfoError: On all ranks, what the first one has met.
        """
        if self._is_pausing:
            self._begin_probe()
            return None, False
        self._num_done += 1
        if self._num_done < max(one.iterations for one in self._probes):
            self._use_probe()
            return None, False
        if self._wants_more():
            return None, False
        found = self._exchange(self._queue.popleft()[self._source.rank])
        if self._queue:
            self._begin_probe()
        else:
            self.rest()
        return found, not self.is_listening

    # ---- what both do ----

    def _listen(self) -> None:
        self._source.add_listener(self._meter)
        self.is_listening = True

    def _wants_more(self) -> bool:
        if self._num_done >= self._settings.most_repetitions:
            return False
        own = 0.0
        try:
            if not self._session.gpu.energy_is_continuous:
                own = max(
                    (one.energy_error for (stage, _), one in self._meter.measured().items() if stage >= 0), default=0.0
                )
        except TooFewTicksError:
            own = float("inf")
        except DeviceError:  # told with the measurements
            own = 0.0
        worst: float = max(self._source.all_gather(own, everywhere=True))
        return worst > self._settings.target_error

    def _exchange(self, clock_mhz: int) -> Found:
        rows: list[ProfileRow] = []
        problem: str | None = None
        try:
            rows = measured_rows(
                self._source,
                self._meter,
                clock_mhz,
                self._session.gpu.name,
                self._transfers_s,
                target_error=self._settings.target_error,
            )
        except PfoError as error:
            problem = str(error)
        if self._session.clocks.error is not None:
            problem = str(self._session.clocks.error)
        clocks = self._session.clocks
        mine = name_of(self._source), problem, rows, clocks.latencies_by_pair, clocks.usual_latency_s
        gathered = self._source.all_gather(mine, everywhere=True)
        for name, met, *_ in gathered:
            if met is not None:
                raise DeviceError(f"{name}: {met}")
        by_pair = {(before, after): list(some) for before, after, some in self._known_latencies_s}
        for _, _, _, latencies_s, usual_s in gathered:
            self._usual_latency_s = max(self._usual_latency_s, usual_s)
            for pair, some in latencies_s.items():
                by_pair.setdefault(pair, []).extend(some)
        top = max(self._tops_mhz)
        kept = tuple(
            row for _, _, of_rank, *_ in gathered for row in of_rank if row.frequency == top or _was_there(row)
        )
        return Found(kept, tuple((*pair, tuple(some)) for pair, some in by_pair.items()))


def _was_there(row: ProfileRow) -> bool:
    """Whether the clock was, and energy was seen; a power cap that held it is told by the measurement itself."""
    return row.energy > 0 and not is_unreached(row.flags.split())
