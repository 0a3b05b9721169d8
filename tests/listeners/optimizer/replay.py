"""Measuring that is only looked up: what a choice of clocks leads to, compared with a scan of all of them.

`python -m tests.listeners.optimizer.replay PROFILE.csv ...` prints a table of emulated GPUs and of measured profiles.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_pfo.core.energy_valley import EnergyValley
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.device import load_gpu_config
from lightning_pfo.device.emulated.physics import GpuPhysics
from lightning_pfo.planner import InstructionProfile, PlanSettings, Profile, plan_frontier, read_profile, select_plan
from lightning_pfo.planner.adaptive.choice import bracket, choose, fit_curve, fitted_profile, is_worth_more, no_slowdown
from lightning_pfo.planner.pipeline.timeline import simulate_plan

MODELS = tuple(f"emulated_{name}" for name in ("a100", "a40", "a6000", "h100", "h200", "rtx3090", "v100"))

FIELDS = ("clocks_mhz", "times_s", "energies_j", "p2p_blocking_powers_w", "time_stderrs_s", "energy_stderrs_j")


def emulated_profile(config, work=(0.040, 0.046, 0.041, 0.052)):
    """What a scan of every clock of an emulated GPU finds, and the clock at which a power cap holds it."""
    physics = GpuPhysics(config)
    clocks = tuple(mhz for mhz in physics.supported_clocks_mhz if mhz >= 0.45 * config.top_clock_mhz)
    instructions = {}
    for stage, forward_s in enumerate(work):
        for kind, factor in ((InstructionType.FORWARD, 1.0), (InstructionType.BACKWARD, 2.0)):
            total_s = factor * forward_s
            memory_s = config.memory_share * total_s
            times_s = tuple(physics.time_s(mhz, total_s - memory_s, memory_s) for mhz in clocks)
            powers_w = [physics.computing_power_w(mhz) for mhz in clocks]
            energies_j = tuple(power * time_s for power, time_s in zip(powers_w, times_s, strict=True))
            exactly = (0.0,) * len(clocks)
            waiting_w = tuple(physics.blocked_power_w(mhz) for mhz in clocks)
            instructions[stage, kind] = InstructionProfile(clocks, times_s, energies_j, waiting_w, exactly, exactly)
    return Profile(instructions), physics.effective_clock_mhz(clocks[0])


def at_clocks(full, clocks_of_stage):
    """The part of a profile that was measured."""
    instructions = {}
    for (stage, kind), one in full.instructions.items():
        rows = [row for row, mhz in enumerate(one.clocks_mhz) if mhz in clocks_of_stage[stage]]
        kept = {name: tuple(getattr(one, name)[row] for row in rows) for name in FIELDS if getattr(one, name)}
        instructions[stage, kind] = InstructionProfile(**kept)
    return replace(full, instructions=instructions)


def clocks_of_scan(full, patience=5):
    """How many clocks `EnergyProfilerCallback` measures: until all energies have risen five times in a row."""
    valleys = {kind: EnergyValley(patience) for kind in full.instructions}
    energies_j = {
        kind: dict(zip(one.clocks_mhz, one.energies_j, strict=True)) for kind, one in full.instructions.items()
    }
    clocks = sorted({mhz for one in full.instructions.values() for mhz in one.clocks_mhz}, reverse=True)
    for count, mhz in enumerate(clocks):
        if all(valley.passed for valley in valleys.values()):
            return count
        for kind, valley in valleys.items():
            if mhz in energies_j[kind]:
                valley.add(energies_j[kind][mhz])
    return len(clocks)


WARM_UP, SETTLING, MEASURED = 2, 1, 3
"""Iterations: of a run at the top clocks; of a scan, by default, at each clock."""


@dataclass
class Outcome:
    num_clocks: int
    num_of_scan: int
    iterations: int
    iterations_of_scan: int
    more_energy: float  # than the least that is possible in its time
    more_time: float  # than the top clocks
    energy_of_scan: float  # the same of the plan of a full scan
    time_of_scan: float


def replayed(full, schedule, planning=None, held_mhz=None):
    """Measure as the optimizer does, until it has enough; judge its plan by all measurements.

    The judge is a curve through all measurements, as a plan that was chosen from noisy ones looks better by them than
    it is.
    """
    planning = planning or PlanSettings()
    clocks = sorted({mhz for one in full.instructions.values() for mhz in one.clocks_mhz}, reverse=True)
    measured = {stage: set(bracket(clocks)) for stage in range(full.num_stages)}
    most = len(clocks) // 4
    held = None if held_mhz is None else dict.fromkeys(full.instructions, held_mhz)
    of_scan_clocks = clocks_of_scan(full)
    iterations = WARM_UP + len(bracket(clocks)) - 1
    while True:
        iterations += 1  # at the top clocks, in which it is planned
        choice = choose(at_clocks(full, measured), schedule, clocks, settings=planning, held_mhz=held)
        count = max(map(len, measured.values()))
        if count + len(choice.next_mhz) > most or not is_worth_more(choice, None):
            break
        iterations += len(choice.next_mhz)
        for clocks_of_ranks in choice.next_mhz:
            for stage in measured:
                measured[stage].add(clocks_of_ranks[schedule.rank_of(stage)])
    judge = full
    if held_mhz is None:  # with noise
        judge = fitted_profile(full, {kind: fit_curve(one, clocks) for kind, one in full.instructions.items()}, 0)
    exact = plan_frontier(judge, planning, schedule=schedule)
    of_scan = no_slowdown(plan_frontier(full, planning, schedule=schedule))

    def excess(plan):
        """Energy above the least that is possible in its time."""
        seen = simulate_plan(judge, plan, exact.blocking)
        time_s = max(seen.iteration_time_s, exact.fastest.iteration_time_s)
        best = plan_frontier(judge, planning, schedule=schedule, deadlines_s=[time_s], num_plans=10)
        least_j = select_plan(best, f"{time_s!r}s").iteration_energy_j
        return seen.iteration_energy_j / least_j - 1, seen.iteration_time_s / exact.baseline.iteration_time_s - 1

    iterations_of_scan = of_scan_clocks * (SETTLING + MEASURED)
    return Outcome(count, of_scan_clocks, iterations, iterations_of_scan, *excess(choice.plan), *excess(of_scan))


def main(paths):
    """The table of docs/callbacks.md."""
    problems = [(model, *emulated_profile(load_gpu_config(model)), 4) for model in MODELS]
    problems += [(Path(path).stem, read_profile(path), None, 8) for path in paths]
    print(
        "| GPU, or measured profile | clocks | of a scan | iterations | of a scan "
        "| energy above the least | that of the scan's plan |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, full, held_mhz, ranks in problems:
        planning = PlanSettings(p2p_blocking_power_w=None if held_mhz else 85)
        one = replayed(full, make_schedule("1f1b", ranks, 8), planning, held_mhz=held_mhz)
        shares = f"{100 * one.more_energy:.2f} % | {100 * one.energy_of_scan:.2f} %"
        counts = f"{one.num_clocks} | {one.num_of_scan} | {one.iterations} | {one.iterations_of_scan}"
        print(f"| {name} | {counts} | {shares} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
