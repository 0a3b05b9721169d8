"""Training under a frequency plan in any loop: what `FrequencyPlanCallback` does, without a Trainer."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

from lightning_pfo.core.errors import PlanMismatchError
from lightning_pfo.core.events import InstructionEvent, InstructionListener, InstructionSource
from lightning_pfo.core.frequency_plan import FrequencyPlan, uniform_plan
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.wording import counted
from lightning_pfo.device.clocks.transition import ClockStatistics
from lightning_pfo.device.time import HOST_TIME, time_of
from lightning_pfo.listeners.agreement import check_together, is_first, name_of
from lightning_pfo.listeners.clock_requests import ClockRequests
from lightning_pfo.listeners.gpu_session import (
    DEFAULT_CLUSTER,
    ClusterChoice,
    GpuChoice,
    open_session,
    ranks_on_this_node,
)
from lightning_pfo.listeners.meters.iterations import IterationMeasurement, IterationMeter
from lightning_pfo.listeners.online_envpipe import OnlineEnvPipe
from lightning_pfo.listeners.plan_cursor import PlanCursor
from lightning_pfo.planner.adaptive.windows import MeanEnergy
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.frontier.frontier_files import load_frontier
from lightning_pfo.planner.frontier.select import select_plan

log = logging.getLogger(__name__)

Key = TypeVar("Key")

_LAST_REQUEST_S = 2.0
"""At most so long the end of a training waits until the last clock is set, to know whether that fails."""

TOP_CLOCKS = "top_clocks"
"""In place of a plan, or selected instead of one: the highest clock everywhere."""

PlanOf = Callable[[int], FrequencyPlan | None]
"""Which plan an iteration has, by its number; None is the highest clock everywhere. The same on every rank."""

PlanChoice = str | os.PathLike[str] | Frontier | FrequencyPlan | PlanOf
"""A frontier file (`frontier.json` or its folder), a frontier, a plan, `TOP_CLOCKS`, or plans by iteration."""


def chosen_plan(choice: PlanChoice, select: str) -> FrequencyPlan | PlanOf | None:
    """Find the plan to train under; None for the top clocks, which are known when the GPUs are.

    Args:
        choice: The plan, or where to select it from.
        select: Which plan of a frontier; see `select_plan`.

    Raises:
        PlanError: If the file is malformed or the selection is impossible.
    """
    frontier = frontier_of(choice)
    if frontier is not None:
        return select_plan(frontier, select)
    return choice if isinstance(choice, FrequencyPlan) or callable(choice) else None


def frontier_of(choice: PlanChoice) -> Frontier | None:
    """The frontier that a plan is to be selected from; None of a plan, plans by iteration and the top clocks.

    Raises:
        PlanError: If the file is malformed.
    """
    if choice == TOP_CLOCKS or isinstance(choice, FrequencyPlan) or callable(choice):
        return None
    return choice if isinstance(choice, Frontier) else load_frontier(choice)


class PlannedRun(InstructionListener):
    """Sets the clock of every instruction as a plan says, and measures iterations; `close` it, or use it in `with`.

    Before the first instruction the plan is checked against the pipeline: stages, microbatches, order, and supported
    clocks where these may be set.

    Args:
        source: The pipeline rank, e.g. `PipelinedModel.instruction_source`.
        plan: The plan; None is the highest clock everywhere, the baseline to compare with. Or a function that says
            which of them an iteration has, by its number, the same on every rank.
        gpu: `auto` (NVML, else emulated), a name such as `nvml` or `emulated_a40`, a `GpuConfig`, or a `Gpu`.
        cluster: How emulated GPUs are connected: a name of conf/cluster such as `nvlink` or `ideal`, or a
            `ClusterConfig`.
        num_gpus: How many ranks of this node open a GPU; None: as torchrun says, else all ranks.
        measured_on: Names of the GPUs that the plan was measured on (`frontier.profile.gpus`); others are warned of.
        user: Who is named in messages; None is this object.
        report: Told about progress.

    Attributes:
        plan: The plan in use; None until the pipeline is known, if none was given, or plans by iteration.
        measurements: What the iterations of this run took so far.
        gpu_name: What was measured: the model of this rank's GPU, `(emulated)` where it is.

    Raises:
        ConfigurationError: If something else sets this GPU's clocks.
        DeviceError: If the GPU cannot be opened.
        PlanMismatchError: At the first iteration, on every rank, if the plan does not fit the pipeline.

    Example::

        with PlannedRun(model.instruction_source, select_plan(load_frontier("plans"), "no_slowdown")) as run:
            for x, y in loader:
                train_one_batch(x, y)
                run.measure()
        print(run.measurements[-1].time_s)
    """

    def __init__(
        self,
        source: InstructionSource,
        plan: FrequencyPlan | PlanOf | None,
        *,
        gpu: GpuChoice = "auto",
        cluster: ClusterChoice = DEFAULT_CLUSTER,
        num_gpus: int | None = None,
        measured_on: Sequence[str] = (),
        user: object = None,
        report: Callable[[str], None] = log.info,
    ) -> None:
        self._measured_on = tuple(measured_on)
        self.plan: FrequencyPlan | None = None if callable(plan) else plan
        self._plan_of: PlanOf = plan if callable(plan) else lambda iteration: plan
        self.measurements: list[IterationMeasurement] = []
        self._is_told = False
        self._source = source
        self._report = report
        self._user = self if user is None else user
        self._cursor: PlanCursor | None = None
        # As asked for, for which order, and as applied; the latest only, the same on every rank.
        self._checked: deque[tuple[FrequencyPlan | None, PipelineSchedule | None, FrequencyPlan]] = deque(maxlen=8)
        num_gpus = ranks_on_this_node(source) if num_gpus is None else num_gpus
        self._session = session = open_session(source, gpu, self._user, num_gpus=num_gpus, cluster=cluster)
        self.gpu_name = session.gpu.name
        self.is_open = True
        self._meter = IterationMeter(session.gpu, source, session.follower, is_ready=lambda: session.ready)
        self._requests = ClockRequests(
            session.clocks,
            session.follower,
            leads=session.config.lead_clocks,
            time_source=time_of(session.gpu),
        )
        try:
            session.own_clocks(self._user)
            self._is_told = session.clocks.error is not None
        except BaseException:
            session.release(self._user)
            raise
        source.add_listener(self._meter)
        source.add_listener(self)
        self._online = plan if isinstance(plan, OnlineEnvPipe) else None
        if self._online is not None:
            supported_mhz = session.gpu.supported_clocks_mhz()
            self._online.attach(source, session.follower, time_of(session.gpu), supported_mhz)

    def on_iteration_begin(self, iteration: int) -> None:
        """Ask for the first instruction's clock."""
        asked = self._plan_of(iteration)
        schedule = self._source.schedule
        plan = next((applied for known, of, applied in self._checked if known is asked and of is schedule), None)
        if plan is None:
            plan = self._checked_plan(asked)
            self._checked.append((asked, schedule, plan))
        if self._cursor is None or plan is not self.plan:
            self.plan, self._cursor = plan, PlanCursor(plan, self._source.rank, self._requests)
        self._cursor.on_iteration_begin(iteration)

    def on_instruction_begin(self, event: InstructionEvent) -> None:
        """End a wait's clock, and ask for the next instruction's already where requests lead."""
        if self._cursor is not None:
            self._cursor.on_instruction_begin(event)
        self._requests.on_instruction_begin(event)

    def on_instruction_end(self, event: InstructionEvent) -> None:
        """Ask for the next instruction's clock, or that of the wait before it."""
        if self._cursor is not None:
            self._cursor.on_instruction_end(event)

    def on_iteration_end(self, iteration: int) -> None:
        """End a wait's clock."""
        if self._cursor is not None:
            self._cursor.on_iteration_end(iteration)

    def _checked_plan(self, asked: FrequencyPlan | None) -> FrequencyPlan:
        source, gpu = self._source, self._session.gpu
        schedule = source.schedule
        assert schedule is not None  # an iteration has begun
        supported_mhz = gpu.supported_clocks_mhz()
        tops_mhz = source.all_gather(max(supported_mhz))
        if self._measured_on and not self._checked:
            self._tell_of_other_gpus()
        plan = uniform_plan(schedule, tops_mhz) if asked is None else asked

        def check() -> None:
            plan.check_fits(schedule)
            waiting_mhz = {wait.clock_mhz for wait in plan.wait_clocks if wait.rank == source.rank}
            if self._session.clocks.error is None:  # else none are set, and such a GPU may not tell which it supports
                _check_clocks({*plan.clocks_mhz[source.rank], *waiting_mhz}, supported_mhz, gpu.name)

        check_together(source, check)
        if self._online is not None and self._checked:
            return plan  # of many, the first has been told
        self._report(
            f"{counted(len(schedule.instructions), 'instruction')} on {gpu.name}, clocks "
            f"{min(map(min, plan.clocks_mhz))} to {max(map(max, plan.clocks_mhz))} MHz."
        )
        return plan

    def _tell_of_other_gpus(self) -> None:
        names = dict.fromkeys(self._source.all_gather(self.gpu_name, everywhere=True))
        known = {_model_of(name) for name in self._measured_on}
        others = [name for name in names if _model_of(name) not in known]
        if others and is_first(self._source):
            log.warning(
                "The plan was made of measurements on %s, and trains on %s: times and energies are others there, and "
                "what the plan promises does not hold. Profile on these, and plan again.",
                ", ".join(self._measured_on),
                ", ".join(others),
            )

    def measure(self, *, waits: bool = False) -> IterationMeasurement | None:
        """Return what the last iteration took, and append it to `measurements`; a collective call.

        None if it was not measured: an emulated GPU spends the first iteration counting work. On CUDA it is the
        iteration before the last one, for the host would have to wait for the GPU to know about the last.

        Args:
            waits: Wait for the GPU, as at the end of a training, and measure the last one too.
        """
        measurement = self._meter.take(self._news(), waits=waits)
        self._tell(self._meter.remarks)
        if measurement is not None:
            self.measurements.append(measurement)
        return measurement

    def tell_failures(self) -> None:
        """Let the first rank say what ranks have met since the last measurement; a collective call."""
        if time_of(self._session.gpu) is HOST_TIME:
            self._session.clocks.wait(_LAST_REQUEST_S)
        self._tell([said for said in self._source.all_gather(self._news(), everywhere=True) if said])

    def _tell(self, failures: Sequence[str]) -> None:
        if is_first(self._source):
            for failure in failures:
                log.warning("The plan is not what is trained under: no clocks are set by %s", failure)

    def _news(self) -> str:
        """Why this rank sets no clocks any more, once; the first rank and claims, which all share, are told already."""
        error = self._session.clocks.error
        if error is None or self._is_told or is_first(self._source):
            return ""
        self._is_told = True
        return f"{name_of(self._source)} ({self.gpu_name}): {error}"

    def mean_energies(self, group_of: Callable[[int], Key | None]) -> dict[Key, MeanEnergy]:
        """Mean energy of all GPUs in the iterations of each group, where counters tick; a collective call.

        More exact than `measurements`, whose iterations begin and end between ticks. Empty where these are exact.

        Args:
            group_of: The group of an iteration, by its number; None for those that nobody asks about.
        """
        of_gpus: list[dict[Key, MeanEnergy]] = self._source.all_gather(
            self._meter.mean_energies(group_of), everywhere=True
        )
        known_to_all = [group for group in of_gpus[0] if all(group in of_gpu for of_gpu in of_gpus)]
        return {
            group: MeanEnergy(
                math.fsum(of_gpu[group].energy_j for of_gpu in of_gpus),
                math.hypot(*(of_gpu[group].stderr_j for of_gpu in of_gpus)),
            )
            for group in known_to_all
        }

    def tick_s(self) -> float:
        """How often the energy counter of a GPU advances, the slowest; 0: all the time. A collective call."""
        ticks_s: list[float] = self._source.all_gather(self._meter.tick_s, everywhere=True)
        return max(ticks_s)

    def request_top_clock(self) -> None:
        """Ask for the highest clock until the next iteration, e.g. for evaluation, of which the plan knows nothing."""
        self._requests.request(max(self._session.gpu.supported_clocks_mhz()))

    @property
    def clock_statistics(self) -> ClockStatistics:
        """What became of this rank's clock changes: how quickly clocks were reached, and which were not."""
        return self._session.clocks.statistics()

    def clock_statistics_of_ranks(self) -> dict[str, ClockStatistics]:
        """The same of all ranks, by name, such as `rank 1 of replica 1`; a collective call."""
        return dict(self._source.all_gather((name_of(self._source), self.clock_statistics), everywhere=True))

    def close(self) -> None:
        """Stop listening and restore the clocks; a second call does nothing."""
        if not self.is_open:
            return
        self.is_open = False
        self._source.remove_listener(self)
        self._source.remove_listener(self._meter)
        if self._online is not None:
            self._online.detach()
        self._meter.close()
        if self.clock_statistics.num_changes:
            self._report(f"{self.gpu_name}: {self.clock_statistics}.")
        self._session.release(self._user)

    def __enter__(self) -> PlannedRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _check_clocks(planned_mhz: set[int], supported_mhz: Sequence[int], name: str) -> None:
    unsupported = sorted(planned_mhz - set(supported_mhz))
    if unsupported:
        raise PlanMismatchError(
            f"A plan uses clocks its GPU supports; {name} does not support {unsupported} MHz (it supports "
            f"{len(supported_mhz)} clocks from {min(supported_mhz)} to {max(supported_mhz)} MHz). Profile and plan on "
            f"the GPU model you train on."
        )


def _model_of(gpu_name: str) -> str:
    return gpu_name.partition(" (emulated")[0]
