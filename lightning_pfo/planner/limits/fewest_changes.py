"""Of plans that are equal in time and energy, the one that changes clocks least.

An instruction may take another clock at which it was measured to take the same time and energy, as happens under a
power cap. (Exchanging the clocks of two instructions of a kind saved nothing on nearly all pipelines tried, 3 % of the
changes at most.)
"""

from __future__ import annotations

from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner.profile.profile import Profile

Rows = tuple[tuple[int, ...], ...]


EqualClocks = dict[tuple[int, InstructionType, int], frozenset[int]]
"""By stage, type and clock in MHz: the clocks of the same time and energy, where there are several."""


def equal_clocks(profile: Profile) -> EqualClocks:
    """Find the clocks at which an instruction was measured to take the same time and the same energy."""
    equal: EqualClocks = {}
    for (stage, kind), measured in profile.instructions.items():
        clocks_of: dict[tuple[float, float], list[int]] = {}
        for clock, *point in zip(measured.clocks_mhz, measured.times_s, measured.energies_j, strict=True):
            clocks_of.setdefault((point[0], point[1]), []).append(clock)
        if len(clocks_of) < len(measured.clocks_mhz):
            for clocks in clocks_of.values():
                equal.update(dict.fromkeys(((stage, kind, clock) for clock in clocks), frozenset(clocks)))
    return equal


def share_clocks(schedule: PipelineSchedule, equal: EqualClocks, clocks_mhz: Rows) -> Rows:
    """Where instructions may as well take the clock of their neighbours, they do; the lowest of equal ones.

    Args:
        schedule: The order.
        equal: Which clocks are equal.
        clocks_mhz: Clock of each instruction by rank.
    """
    if not equal:
        return clocks_mhz
    rows = []
    for order, row in zip(schedule.orders, clocks_mhz, strict=True):
        # As long as one clock will do, it is kept: no choice of clocks changes less often within an iteration.
        runs: list[tuple[frozenset[int], int]] = []
        for inst, clock in zip(order, row, strict=True):
            menu = equal.get((inst.stage, inst.type, clock), frozenset({clock}))
            if runs and runs[-1][0] & menu:
                runs[-1] = runs[-1][0] & menu, runs[-1][1] + 1
            else:
                runs.append((menu, 1))
        # Iterations follow each other.
        ends = runs[0][0] & runs[-1][0]
        chosen = [min(menu & ends or menu) for menu, _ in runs]
        rows.append(tuple(clock for clock, (_, length) in zip(chosen, runs, strict=True) for _ in range(length)))
    return tuple(rows)
