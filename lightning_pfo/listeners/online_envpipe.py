"""EnvPipe's reconfiguration as it was published: during training, from measured waits.

After each iteration all ranks tell how long they waited before each instruction. From the last backward of the first
stage backwards, the critical path goes on with whatever the instruction waited for: the neighbour's, if the wait was
longer than a threshold, else the instruction before it on its rank. Clocks on the path rise (`core.envpipe`); after 11
iterations without a change the plan stays for good.

The threshold tells waiting for a neighbour from a mere transfer: the shortest wait on the last stage in the first
iteration, times a scale. Where transfers are instant, as on some emulated clusters, that would be a real wait; so it is
a tenth of the shortest instruction at most.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from lightning_pfo.core.envpipe import RECONFIGURATIONS, clocks_to_raise, is_outer
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.events import InstructionEvent, InstructionListener, InstructionSource
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.ranges import check_above
from lightning_pfo.core.wording import did_you_mean, shortened
from lightning_pfo.device.time import TimeSource
from lightning_pfo.listeners.device_follower import DeviceFollower

_PATIENCE = 11
_SHARE_OF_SHORTEST = 0.1


class OnlineEnvPipe(InstructionListener):
    """Plans by iteration, for `PlannedRun` and `FrequencyPlanCallback`: each is the one before with clocks raised.

    Args:
        plan: Where to begin, e.g. that of the policy `envpipe_envelope_default`.
        top_mhz: The highest clock that an instruction may get; None is the highest of the plan.
        reconfig: `greedy` or `balanced`.
        step_mhz: By how much clocks rise; to the next clock that the GPU supports.
        threshold_scale: On the shortest wait of the last stage; more where transfers vary.
        clocks_mhz: Of the clocks that the GPU supports those that may be taken, such as all that were measured; None:
            all.

    Attributes:
        plan: The plan of the next iteration.
        num_changes: Iterations after which clocks have risen.
        finished: Whether the plan stays.

    Example::

        frontier = plan_frontier("profile.csv", policy="envpipe_envelope_default", num_microbatches=8)
        online = OnlineEnvPipe(frontier.own_choice, top_mhz=1410)
        Trainer(..., callbacks=[FrequencyPlanCallback(online)]).fit(model, train_loader)
    """

    def __init__(
        self,
        plan: FrequencyPlan,
        *,
        top_mhz: int | None = None,
        reconfig: str = "balanced",
        step_mhz: int = 30,
        threshold_scale: float = 4.0,
        clocks_mhz: Collection[int] | None = None,
    ) -> None:
        if reconfig not in RECONFIGURATIONS[1:]:
            raise ConfigurationError(
                f"A reconfiguration during training is {' or '.join(RECONFIGURATIONS[1:])}; got {shortened(reconfig)}."
                f"{did_you_mean(str(reconfig), RECONFIGURATIONS[1:])}"
            )
        check_above("step_mhz", step_mhz, 0)
        check_above("threshold_scale", threshold_scale, 0)
        self.plan, self.num_changes, self.finished = plan, 0, False
        self._top_mhz = max(map(max, plan.clocks_mhz)) if top_mhz is None else top_mhz
        self._how, self._step_mhz, self._scale = reconfig, step_mhz, threshold_scale
        self._allowed_mhz = clocks_mhz
        self._threshold_s: float | None = None
        self._num_quiet, self._since = 0, 0
        schedule = plan.schedule
        self._outer = [is_outer(inst, schedule.num_stages, schedule.num_microbatches) for inst in schedule.instructions]
        self._moments: list[float] = []
        self._last: tuple[int, list[float]] | None = None

    def attach(
        self, source: InstructionSource, follower: DeviceFollower, time: TimeSource, supported_mhz: Sequence[int]
    ) -> None:
        """Listen to a rank; `PlannedRun` does it.

        Args:
            source: The pipeline rank.
            follower: Knows when the device begins and ends an instruction.
            time: The GPU's time.
            supported_mhz: Clocks that this rank's GPU supports.
        """
        self._source, self._follower, self._time = source, follower, time
        allowed = self._allowed_mhz
        self._supported_mhz = [mhz for mhz in supported_mhz if allowed is None or mhz in allowed]
        self._ladders: list[list[int]] = []
        source.add_listener(self)

    def detach(self) -> None:
        """Listen no more."""
        self._source.remove_listener(self)

    def on_instruction_begin(self, event: InstructionEvent) -> None:
        """Note the time."""
        self._note()

    def on_instruction_end(self, event: InstructionEvent) -> None:
        """Note the time."""
        self._note()

    def on_iteration_end(self, iteration: int) -> None:
        """The moments noted are those of an iteration."""
        if not self.finished:
            self._follower.when_reached(partial(self._reached_end, iteration))

    def _note(self) -> None:
        if not self.finished:
            self._follower.when_reached(lambda: self._moments.append(self._time.now_s()))

    def _reached_end(self, iteration: int) -> None:
        self._last, self._moments = (iteration, self._moments), []

    def __call__(self, iteration: int) -> FrequencyPlan:
        """The plan of an iteration; a collective call until the plan stays."""
        if not self.finished:
            if not self._ladders:
                every = self._source.all_gather(sorted(self._supported_mhz))
                self._ladders = [[mhz for mhz in clocks if mhz <= self._top_mhz] or clocks[:1] for clocks in every]
            told = self._source.all_gather((self._source.rank, self._source.place, self._last), everywhere=True)
            # Replicas have one plan: that of the first.
            first = [(rank, last) for rank, place, last in told if tuple(place) == (0, 0)]
            seen = {-1 if last is None else last[0] for _, last in first}
            if len(seen) == 1 and min(seen) >= self._since:  # all have met the same iteration, under this plan
                self._since = min(seen) + 1
                self._reconfigure(iteration, [last[1] for _, last in sorted(first, key=lambda one: one[0])])
        return self.plan

    def _reconfigure(self, iteration: int, moments_of: Sequence[Sequence[float]]) -> None:
        orders = self.plan.schedule.orders
        if any(len(moments) != 2 * len(order) for moments, order in zip(moments_of, orders, strict=True)):
            return  # the device has not been followed from the begin
        waits_s, lengths_s = _waits_and_lengths(moments_of)
        if min(map(min, lengths_s)) <= 0:
            return  # an emulated GPU counts work in the first iteration
        if self._threshold_s is None:
            self._threshold_s = self._find_threshold(waits_s, lengths_s)
        clocks = [mhz for row in self.plan.clocks_mhz for mhz in row]
        ladder_of = [self._ladders[rank] for rank, order in enumerate(orders) for _ in order]
        tops = [ladder[-1] for ladder in ladder_of]
        path = self._critical_path([wait for row in waits_s for wait in row])
        raised, steps = clocks_to_raise(path, clocks, tops, self._outer, self._how)
        if not raised:
            self._num_quiet += 1
            self.finished = self._num_quiet >= _PATIENCE
            return
        for node in raised:
            wanted = clocks[node] + steps * self._step_mhz
            clocks[node] = next((mhz for mhz in ladder_of[node] if mhz >= wanted), tops[node])
        rows = self.plan.schedule.by_rank(clocks)
        unknown = float("nan")
        self.plan = replace(self.plan, clocks_mhz=rows, iteration_time_s=unknown, iteration_energy_j=unknown)
        self.num_changes += 1
        self._num_quiet, self._since = 0, iteration

    def _find_threshold(self, waits_s: Sequence[Sequence[float]], lengths_s: Sequence[Sequence[float]]) -> float:
        schedule = self.plan.schedule
        last = schedule.rank_of(schedule.num_stages - 1)
        shortest_s = min(length for row in lengths_s for length in row)
        transfers_s = [wait for wait in waits_s[last] if wait > 0]
        return min(self._scale * min(transfers_s, default=0.0), _SHARE_OF_SHORTEST * shortest_s)

    def _critical_path(self, waits_s: Sequence[float]) -> list[int]:
        """Numbers of the instructions, last to first."""
        schedule = self.plan.schedule
        numbers = {inst: node for node, inst in enumerate(schedule.instructions)}
        needed = {after: before for before, after in schedule.handovers().items()}
        threshold_s = self._threshold_s or 0.0
        node = schedule.span(schedule.rank_of(0)).stop - 1
        path = [node]
        while True:  # to what ended before, so to an end
            inst = schedule.instructions[node]
            _, position = schedule.places[node]
            sent = needed.get(inst)
            if sent is not None and (waits_s[node] > threshold_s or position == 0):
                node = numbers[sent]
            elif position > 0:
                node -= 1
            else:
                break
            path.append(node)
        return path


def _waits_and_lengths(moments_of: Sequence[Sequence[float]]) -> tuple[list[list[float]], list[list[float]]]:
    """Time before each instruction since the end of the one before it, and its own, by rank.

    The wait before the first is not known, as iterations begin at different times; nor does it matter.
    """
    waits, lengths = [], []
    for moments in moments_of:
        begins, ends = moments[::2], moments[1::2]
        waits.append([0.0, *(begin - end for begin, end in zip(begins[1:], ends[:-1], strict=True))])
        lengths.append([end - begin for begin, end in zip(begins, ends, strict=True)])
    return waits, lengths
