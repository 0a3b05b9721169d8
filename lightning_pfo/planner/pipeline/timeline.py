"""What a choice of clocks costs: the timeline of one iteration under a profile's own times and energies.

Every instruction starts as early as possible: when the one before it on its rank has ended, and what it needs has come
from its neighbour. Sending takes no time of the sender; whoever waits for a message is blocked. An instruction's clock
is asked for when the one before it on its rank ends (as `callbacks.plan_cursor` does), so a wait passes at the clock of
the instruction that ends it, unless it has a clock of its own. Without switch latency clocks change at once;
`clock_signal` says what happens with it. Iterations follow each other: each begins at the clock of its first
instruction, which was asked for when the one before ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from lightning_pfo.core.frequency_plan import FrequencyPlan, WaitClock
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner.network.dag import ActivityNetwork
from lightning_pfo.planner.pipeline.clock_signal import ClockSignal
from lightning_pfo.planner.pipeline.problem import pipeline_network
from lightning_pfo.planner.profile.blocking_power import BlockingPower
from lightning_pfo.planner.profile.profile import Profile
from lightning_pfo.planner.profile.switch_latency import SwitchLatency, as_switch_latency


@dataclass(frozen=True)
class Timeline:
    """One iteration, every instruction started as early as possible.

    Attributes:
        schedule: The order; the sequences below are aligned with `schedule.instructions`.
        clocks_mhz: Clock of each instruction.
        starts_s: Start of each instruction.
        durations_s: Duration of each instruction.
        energies_j: Energy of each instruction.
        iteration_time_s: End of the last instruction.
        iteration_energy_j: Energy of all instructions and of all waiting.
        requests: When (s) which clock (MHz) is asked for, by rank, without repetitions.
        wait_clocks: Clocks of waits.
        dag: The precedences, and how long transfers between ranks delay them.
    """

    schedule: PipelineSchedule
    clocks_mhz: tuple[int, ...]
    starts_s: tuple[float, ...]
    durations_s: tuple[float, ...]
    energies_j: tuple[float, ...]
    iteration_time_s: float
    iteration_energy_j: float
    requests: tuple[tuple[tuple[float, int], ...], ...]
    wait_clocks: tuple[WaitClock, ...]
    dag: ActivityNetwork

    @property
    def clocks_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """Clock of each instruction (MHz), one row per rank."""
        return self.schedule.by_rank(self.clocks_mhz)

    @property
    def critical_path(self) -> list[int]:
        """Numbers of the instructions of one longest path, first to last."""
        return self.dag.critical_path(self.durations_s)

    def waits_of(self, rank: int) -> list[tuple[float, float]]:
        """Begin and end (s) of the waits of a rank: before each of its instructions, and until the end."""
        here = self.schedule.span(rank)
        starts, durations = self.starts_s[here], self.durations_s[here]
        ends = [0.0, *(start + duration for start, duration in zip(starts, durations, strict=True))]
        begins = [*starts, self.iteration_time_s]
        return [(begin, max(begin, end)) for begin, end in zip(ends, begins, strict=True)]


class Simulator:
    """Plays iterations of one schedule.

    Args:
        profile: Times and energies.
        schedule: Order of instructions.
        blocking: Blocking power of each rank.
        switch_latency_s: Time from a request until the clock changes, for all pairs of clocks or by pair.

    Raises:
        ProfileError: If the profile lacks an instruction.
    """

    def __init__(
        self,
        profile: Profile,
        schedule: PipelineSchedule,
        blocking: Sequence[BlockingPower],
        switch_latency_s: float | SwitchLatency = 0.0,
    ) -> None:
        self.dag = pipeline_network(profile, schedule)
        self.profile, self.schedule = profile, schedule
        self.blocking, self.latency = tuple(blocking), as_switch_latency(switch_latency_s)
        kinds = [(inst.stage, inst.type) for inst in schedule.instructions]
        measured = {kind: profile.of(*kind) for kind in dict.fromkeys(kinds)}
        at, near = ({kind: cache(getattr(m, name)) for kind, m in measured.items()} for name in ("at", "near"))
        self._measured_at = [at[kind] for kind in kinds]
        self._cost_at = [near[kind] for kind in kinds]
        self._power_at = [cache(power.at) for power in blocking]

    def time_s(self, node: int, clock_mhz: int) -> float:
        """Time of an instruction at a clock that it has from its begin on."""
        return float(self._cost_at[node](clock_mhz)[0])

    def play(self, clocks_mhz: Sequence[Sequence[int]], wait_clocks: Sequence[WaitClock] = ()) -> Timeline:
        """Lay out one iteration.

        Args:
            clocks_mhz: Clock of each instruction, one row per rank, aligned with `schedule.orders`.
            wait_clocks: Clocks of waits.

        Raises:
            ProfileError: If the profile lacks a clock.
        """
        clocks = [clock for row in clocks_mhz for clock in row]
        for measured_at, clock in zip(self._measured_at, clocks, strict=True):
            measured_at(clock)
        waiting = {(wait.rank, wait.position): wait for wait in wait_clocks}
        signals = [ClockSignal(row[0], self.latency) for row in clocks_mhz]
        num_nodes = len(clocks)
        starts, durations, finish, energies = ([0.0] * num_nodes for _ in range(4))
        rank_ends, wait_energies = [0.0] * len(signals), [0.0] * len(signals)
        incoming = self.dag.incoming
        for node in self.dag.order:
            rank, position = self.schedule.places[node]
            start = max([finish[before] + delay for before, delay in incoming[node]], default=0.0)
            signal, begin = signals[rank], rank_ends[rank]
            _request(signal, begin, start, clocks[node], waiting.get((rank, position)))
            wait_energies[rank] += signal.block(begin, start, self._power_at[rank])
            durations[node], energies[node] = signal.compute(start, self._cost_at[node])
            starts[node] = start
            finish[node] = rank_ends[rank] = start + durations[node]
        end = max(finish)
        for rank, signal in enumerate(signals):
            wait = waiting.get((rank, len(clocks_mhz[rank])))
            signal.request(rank_ends[rank], clocks_mhz[rank][0] if wait is None else wait.clock_mhz)
            wait_energies[rank] += signal.block(rank_ends[rank], end, self._power_at[rank])
        return Timeline(
            schedule=self.schedule,
            clocks_mhz=tuple(clocks),
            starts_s=tuple(starts),
            durations_s=tuple(durations),
            energies_j=tuple(energies),
            iteration_time_s=end,
            iteration_energy_j=sum(energies) + sum(wait_energies),
            requests=tuple(tuple(signal.requests) for signal in signals),
            wait_clocks=tuple(wait_clocks),
            dag=self.dag,
        )


def simulate(
    profile: Profile,
    schedule: PipelineSchedule,
    clocks_mhz: Sequence[Sequence[int]],
    p2p_blocking_powers_w: Sequence[float | BlockingPower],
    *,
    wait_clocks: Sequence[WaitClock] = (),
    switch_latency_s: float | SwitchLatency = 0.0,
) -> Timeline:
    """Lay out one iteration.

    Args:
        profile: Times and energies.
        schedule: Order of instructions.
        clocks_mhz: Clock of each instruction, one row per rank, aligned with `schedule.orders`.
        p2p_blocking_powers_w: Power of each rank's GPUs while they wait.
        wait_clocks: Clocks of waits.
        switch_latency_s: Time from a request until the clock changes, for all pairs of clocks or by pair.

    Raises:
        ProfileError: If the profile lacks an instruction or a clock.
    """
    blocking = [
        power if isinstance(power, BlockingPower) else BlockingPower((), (power,)) for power in p2p_blocking_powers_w
    ]
    return Simulator(profile, schedule, blocking, switch_latency_s).play(clocks_mhz, wait_clocks)


def simulate_plan(
    profile: Profile,
    plan: FrequencyPlan,
    p2p_blocking_powers_w: Sequence[float | BlockingPower],
    *,
    switch_latency_s: float | SwitchLatency = 0.0,
) -> Timeline:
    """Lay out one iteration of a plan; see `simulate`."""
    return simulate(
        profile,
        plan.schedule,
        plan.clocks_mhz,
        p2p_blocking_powers_w,
        wait_clocks=plan.wait_clocks,
        switch_latency_s=switch_latency_s,
    )


def _request(signal: ClockSignal, begin_s: float, end_s: float, clock_mhz: int, wait: WaitClock | None) -> None:
    """Ask for the clock of the instruction that begins at `end_s`, when the one before has ended."""
    if wait is not None:
        signal.request(begin_s, wait.clock_mhz)
        begin_s = min(begin_s + wait.hold_s, end_s)  # asked for at its begin at the latest
    signal.request(begin_s, clock_mhz)
