"""Of plans that are equal in time and energy, the one that changes clocks least.

Two moves leave the energy as it is: an instruction takes another clock at which it was measured to take the same time
and energy, and two instructions of a kind on one rank exchange their clocks. Exchanges are tried between neighbours of
a kind, for all plans side by side, and made where the iteration takes as long as before. It is a local search: there
may be equal plans with still fewer changes.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np

from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner.network.arrays import Floats, Integers
from lightning_pfo.planner.network.assignments import Assignments, OptionTable
from lightning_pfo.planner.profile.profile import Profile

_ROUNDS = 8
"""An exchange per plan in each."""

_MOST_TRIED = 20_000
"""Nodes times exchanges tried in a round."""

_EQUAL_TIMES = 1e-12

Rows = tuple[tuple[int, ...], ...]


def exchange_clocks(schedule: PipelineSchedule, table: OptionTable, choices: Assignments, times: Floats) -> Assignments:
    """Exchange options within kinds of instructions where clocks then change less often in the same time.

    Args:
        schedule: The order.
        table: Options of each instruction; their knobs are clocks.
        choices: The options of each plan, shape (n, plans).
        times: Longest path of each plan in seconds.
    """
    choices, (first, second) = choices.copy(), _neighbours_of_a_kind(schedule)
    for _ in range(_ROUNDS):
        pair, plan = _worthwhile(schedule, table.knobs(choices), first, second)
        some = slice(max(_MOST_TRIED // len(choices), 1))
        pair, plan = pair[some], plan[some]
        tried, columns = choices[:, plan], np.arange(len(plan))
        tried[first[pair], columns] = choices[second[pair], plan]
        tried[second[pair], columns] = choices[first[pair], plan]
        equal = np.flatnonzero(np.abs(table.longest_paths(tried) / times[plan] - 1) <= _EQUAL_TIMES)
        if not len(equal):
            break
        equal = equal[np.unique(plan[equal], return_index=True)[1]]  # two in a plan may not go together
        choices[:, plan[equal]] = tried[:, equal]
    return choices


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


def _neighbours_of_a_kind(schedule: PipelineSchedule) -> tuple[Integers, Integers]:
    """Numbers of instructions, and of the next ones of their kinds on their ranks."""
    numbers: dict[tuple[int, InstructionType], list[int]] = {}
    for number, inst in enumerate(schedule.instructions):
        numbers.setdefault((inst.stage, inst.type), []).append(number)
    pairs = np.array([pair for row in numbers.values() for pair in pairwise(row)], dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _worthwhile(
    schedule: PipelineSchedule, clocks: Integers, first: Integers, second: Integers
) -> tuple[Integers, Integers]:
    """Numbers of the pairs and plans whose exchange saves changes, those that save most first."""
    bounds = np.array([*accumulate(map(len, schedule.orders), initial=0)])
    ahead, behind = np.arange(-1, len(clocks) - 1), np.arange(1, len(clocks) + 1)
    ahead[bounds[:-1]], behind[bounds[1:] - 1] = bounds[1:] - 1, bounds[:-1]  # iterations follow each other
    saved = np.zeros((len(first), clocks.shape[1]), dtype=np.int64)
    for one, other in ((first, second), (second, first)):
        for near in (ahead[one], behind[one]):
            exchanged = np.where((near == other)[:, None], clocks[one], clocks[near])
            saved += clocks[near] != clocks[one]
            saved -= exchanged != clocks[other]
    pair, plan = np.nonzero(saved > 0)
    best = np.argsort(-saved[pair, plan], kind="stable")
    return pair[best], plan[best]
