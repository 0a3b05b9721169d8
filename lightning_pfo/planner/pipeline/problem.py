"""A pipeline as an activity network whose costs are effective energies.

Energy of an iteration = sum of effective energies (energy - P2P blocking power x time) + blocking power x iteration
time, summed over ranks (Perseus, equation 3). Effective energies depend on the clocks only, so what remains is a
time-cost tradeoff: for each instruction an option, for each iteration time the cheapest assignment of options.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner.network.dag import ActivityNetwork, make_network
from lightning_pfo.planner.network.options import OptionSet, make_option_set
from lightning_pfo.planner.profile.blocking_power import BlockingPower
from lightning_pfo.planner.profile.profile import Profile

Rows = tuple[tuple[int, ...], ...]
"""A clock in MHz for each instruction, by rank in execution order."""


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be planned.

    Attributes:
        profile: Times and energies of each instruction at each clock.
        schedule: The order of instructions.
        blocking: Power of each rank's GPUs while they wait for a neighbour, by clock.
    """

    profile: Profile
    schedule: PipelineSchedule
    blocking: tuple[BlockingPower, ...]

    @cached_property
    def network(self) -> ActivityNetwork:
        """The precedences; activity i is `schedule.instructions[i]`."""
        return pipeline_network(self.profile, self.schedule)

    @property
    def power_w(self) -> float:
        """What a second of iteration time costs at the least: the least blocking power of all ranks together."""
        return sum(power.least_w for power in self.blocking)

    @property
    def has_wait_clocks(self) -> bool:
        """Whether it matters at which clock a GPU waits."""
        return any(power.varies for power in self.blocking)

    @cached_property
    def options(self) -> tuple[OptionSet, ...]:
        """The options of each activity: time, effective energy, clock.

        Where the blocking power depends on the clock, the least is taken: no wait draws less, so what is a lower bound
        under it is one in any case.
        """
        kinds: dict[tuple[int, int, str], OptionSet] = {}
        options = []
        for rank, (order, power) in enumerate(zip(self.schedule.orders, self.blocking, strict=True)):
            for inst in order:
                key = (rank, inst.stage, inst.type.value)
                if key not in kinds:
                    measured = self.profile.of(inst.stage, inst.type)
                    costs = [
                        energy - power.least_w * time
                        for time, energy in zip(measured.times_s, measured.energies_j, strict=True)
                    ]
                    kinds[key] = make_option_set(measured.times_s, costs, measured.clocks_mhz)
                options.append(kinds[key])
        return tuple(options)


def pipeline_network(profile: Profile, schedule: PipelineSchedule) -> ActivityNetwork:
    """The activity network of a schedule whose transfers take as long as they were measured to.

    Raises:
        ConfigurationError: If the schedule cannot be executed.
    """
    transfers_s = ((kind, profile.transfer_s(*kind)) for kind in profile.instructions)
    return schedule_network(schedule, tuple((kind, time_s) for kind, time_s in transfers_s if time_s))


@lru_cache(maxsize=4)
def schedule_network(
    schedule: PipelineSchedule, transfers_s: tuple[tuple[tuple[int, InstructionType], float], ...] = ()
) -> ActivityNetwork:
    """The activity network of a pipeline schedule; activity i is `schedule.instructions[i]`.

    Args:
        schedule: The order of instructions.
        transfers_s: Stages and kinds of instructions whose results take so many seconds to another rank.

    Raises:
        ConfigurationError: If the schedule cannot be executed.
    """
    schedule.validate()
    number = {instruction: i for i, instruction in enumerate(schedule.instructions)}
    edges = ((number[before], number[after]) for before, after in schedule.dependencies())
    delays, time_s = {}, dict(transfers_s)
    for before, after in schedule.handovers().items() if time_s else ():
        if schedule.rank_of(before.stage) != schedule.rank_of(after.stage):
            delays[number[before], number[after]] = time_s.get((before.stage, before.type), 0.0)
    return make_network(len(number), edges, delays)
