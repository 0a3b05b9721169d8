"""EnvPipe's plans (Choi et al., USENIX ATC 2023), from a profile instead of training steps.

=========  =============================================================================================
type
=========  =============================================================================================
baseline   every instruction at the top clock
uniform    every stage at its own valley: the clock at which its GPU takes the least energy per iteration
envelope   the outer envelope at the top clock, all others at their stage's valley
=========  =============================================================================================

The plan so begun makes iterations longer, so it is *reconfigured* step by step: clocks on the critical path rise until
the path keeps to the envelope, or everything on it is at the top. `default` leaves the plan as it is; `greedy` raises
the latest instruction of the path that is below the top, by three steps of 30 MHz; `balanced`, which its authors
recommend, all those of the path at its lowest clock, by one step. Clocks only rise, so it ends.

Where the original reads the critical path off waiting times of single steps, here the instruction DAG tells it. Valleys
are its own: all stages are slowed together, so a GPU's energy has its waits in it, and one clock serves forward and
backward; the last stage is left at the top unless the type is `uniform`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_pfo.core.envpipe import RECONFIGURATIONS
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.ranges import CLOCK, check_whole
from lightning_pfo.core.wording import did_you_mean, shortened
from lightning_pfo.planner.pipeline.problem import Problem, Rows
from lightning_pfo.planner.pipeline.timeline import Simulator
from lightning_pfo.planner.policies.early_forwards import check_replaces, early_forwards
from lightning_pfo.planner.policies.envelope import outer_envelope
from lightning_pfo.planner.policies.policy import ListedPolicy
from lightning_pfo.planner.policies.reconfigure import reconfigure

TYPES = ("baseline", "uniform", "envelope")
SCHEDULINGS = ("1f1b", "ours")
EARLY = "_early_forwards"


@dataclass(frozen=True)
class EnvPipe(ListedPolicy):
    """EnvPipe by its own words.

    Attributes:
        type: One of `TYPES`.
        scheduling: `1f1b`: the order that is asked for, whatever it is; `ours`: EnvPipe's early forwards, in place of
            1F1B (see `early_forwards`); with all clocks at the top there are none.
        reconfig: One of `RECONFIGURATIONS`.
        max_in_flight: Most microbatches whose activations fit into a stage's memory; None for no limit.
        step_mhz: By how much a reconfiguration raises clocks; greedy takes three such steps at once.
        one_clock: Whether a stage has one valley, as in EnvPipe; else each kind of instruction has its own, the clock
            of least energy, as where the authors of Perseus compare with it.
    """

    type: str = "envelope"
    scheduling: str = "1f1b"
    reconfig: str = "balanced"
    max_in_flight: int | None = None
    step_mhz: int = 30
    one_clock: bool = True

    def __post_init__(self) -> None:
        for name, known in {"type": TYPES, "scheduling": SCHEDULINGS, "reconfig": RECONFIGURATIONS}.items():
            value = getattr(self, name)
            if value not in known:
                raise ConfigurationError(
                    f"EnvPipe's {name} is one of {', '.join(known)}; got {shortened(value)}."
                    f"{did_you_mean(str(value), known)}"
                )
        if not CLOCK.allows(self.step_mhz):
            raise ConfigurationError(f"EnvPipe's step_mhz is {CLOCK}, such as 30; got {shortened(self.step_mhz)}.")
        if self.max_in_flight is not None:
            check_whole("EnvPipe's max_in_flight", self.max_in_flight, 1, 1_000_000)

    @property
    def name(self) -> str:
        """Such as `envpipe_envelope_balanced`; with all clocks at the top there is nothing to reconfigure."""
        name = f"envpipe_{self.type}" if self.type == "baseline" else f"envpipe_{self.type}_{self.reconfig}"
        return name + EARLY if self.runs_early else name

    @property
    def runs_early(self) -> bool:
        """Whether it has an order of its own."""
        return self.scheduling == "ours" and self.type != "baseline"

    def check_schedule(self, name: str) -> None:
        """Early forwards are a variant of 1F1B.

        Raises:
            ConfigurationError: If they are wanted, and the schedule is another.
        """
        if self.runs_early:
            check_replaces(name)

    def problem_for(self, problem: Problem) -> Problem:
        """The pipeline under the early forwards, if these are wanted.

        Raises:
            ConfigurationError: If the order is not 1F1B, which they are a variant of.
        """
        if not self.runs_early:
            return problem
        valleys = stage_valleys(problem, keeps_last=self.type == "envelope")
        schedule = early_forwards(problem.profile, problem.schedule, valleys, self.max_in_flight)
        return replace(problem, schedule=schedule)

    def rows(self, problem: Problem, num_plans: int) -> Sequence[Rows]:
        """Its one plan."""
        clocks = self._begin(problem)
        if self.reconfig != "default":
            clocks = reconfigure(problem, clocks, self.reconfig, self.step_mhz)
        return [problem.schedule.by_rank(clocks)]

    def _begin(self, problem: Problem) -> list[int]:
        """The plan before reconfiguration: a clock for each instruction."""
        instructions = problem.schedule.instructions
        top = [problem.profile.top_clock_mhz(stage) for stage in range(problem.schedule.num_stages)]
        if self.type == "baseline":
            return [top[inst.stage] for inst in instructions]
        is_outer = outer_envelope(problem.schedule) if self.type == "envelope" else [False] * len(instructions)
        if self.one_clock:
            valleys = stage_valleys(problem, keeps_last=self.type == "envelope")
            low = [valleys[inst.stage] for inst in instructions]
        else:
            low = [_valley_of_kind(problem, inst.stage, inst.type, top[inst.stage]) for inst in instructions]
        pairs = zip(instructions, is_outer, low, strict=True)
        return [top[inst.stage] if outer else clock for inst, outer, clock in pairs]


def stage_valleys(problem: Problem, *, keeps_last: bool) -> list[int]:
    """The clock of each stage at which its GPU takes the least energy per iteration, in MHz.

    Every stage is run at its n-th clock at once, so the energy has in it what the GPU draws while it waits for others
    that are slow too.

    Args:
        problem: The pipeline.
        keeps_last: Whether the last stage is not tried, and stays at its top clock.
    """
    profile, schedule = problem.profile, problem.schedule
    ladders = [_common_clocks(problem, stage) for stage in range(schedule.num_stages)]
    if keeps_last:
        ladders[-1] = ladders[-1][:1]
    simulator = Simulator(profile, schedule, problem.blocking)
    best: list[tuple[float, int]] = [(float("inf"), ladder[0]) for ladder in ladders]
    for number in range(max(map(len, ladders))):
        clocks = [ladder[min(number, len(ladder) - 1)] for ladder in ladders]
        timeline = simulator.play(schedule.by_rank([clocks[inst.stage] for inst in schedule.instructions]))
        for rank, order in enumerate(schedule.orders):
            here = schedule.span(rank)
            energy_j = sum(timeline.energies_j[here])
            for (begin_s, end_s), next_inst in zip(timeline.waits_of(rank), (*order, order[0]), strict=True):
                energy_j += (end_s - begin_s) * problem.blocking[rank].at(clocks[next_inst.stage])
            for stage in schedule.stages_of(rank):
                best[stage] = min(best[stage], (energy_j, clocks[stage]))
    return [clock for _, clock in best]


def _common_clocks(problem: Problem, stage: int) -> list[int]:
    """Clocks at which all instructions of a stage were measured, the highest first."""
    kinds = [measured.clocks_mhz for (at, _), measured in problem.profile.instructions.items() if at == stage]
    return sorted(set.intersection(*map(set, kinds)), reverse=True)


def _valley_of_kind(problem: Problem, stage: int, kind: InstructionType, top_mhz: int) -> int:
    measured = problem.profile.of(stage, kind)
    rows = zip(measured.energies_j, measured.clocks_mhz, strict=True)
    return min(row for row in rows if row[1] <= top_mhz)[1]
