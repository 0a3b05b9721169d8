"""A pipeline as an activity network whose costs are effective energies.

Energy of an iteration = sum of effective energies (energy - P2P blocking power x time) + blocking power x iteration
time, summed over ranks (Perseus, equation 3). Effective energies depend on the clocks only, so what remains is a
time-cost tradeoff: for each instruction an option, for each iteration time the cheapest assignment of options.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

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

    @property
    def network(self) -> ActivityNetwork:
        """The precedences; activity i is `schedule.instructions[i]`."""
        return schedule_network(self.schedule)

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


@lru_cache(maxsize=4)
def schedule_network(schedule: PipelineSchedule) -> ActivityNetwork:
    """The activity network of a pipeline schedule; activity i is `schedule.instructions[i]`.

    Raises:
        ConfigurationError: If the schedule cannot be executed.
    """
    schedule.validate()
    number = {instruction: i for i, instruction in enumerate(schedule.instructions)}
    return make_network(len(number), ((number[before], number[after]) for before, after in schedule.dependencies()))
