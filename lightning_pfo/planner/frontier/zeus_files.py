"""Plan files of Zeus, `freqs_pipeline_%05d.py`: a Python literal with a row per stage, in execution order.

Two forms are known: `("forward", 1410)` pairs (Zeus, Kareus), which are also written, and bare clocks (the Perseus
artifact). Files are parsed as literals and never executed.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

from lightning_pfo.core.errors import PlanError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.instruction import Instruction, InstructionType
from lightning_pfo.core.ranges import CLOCK
from lightning_pfo.core.schedules.registry import one_f_one_b
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.wording import cut, pipeline_size, shortened

_CHARACTERS, _CHARACTERS_PER_CLOCK, _MOST_CHARACTERS = 10_000, 100, 10_000_000
"""Characters that a file may have: for comments, for each instruction, and where nobody knows how many there are.
Reading takes time and memory by them."""


def zeus_text(plan: FrequencyPlan, number: int) -> str:
    """The file of a plan; `number` is its number in the frontier."""
    time_s, energy_j = plan.iteration_time_s, plan.iteration_energy_j
    lines = [f"# Plan {number}: iteration time {time_s:.6f} s, iteration energy {energy_j:.3f} J", "["]
    for order, clocks in zip(plan.schedule.orders, plan.clocks_mhz, strict=True):
        pairs = (f'("{inst.type.profile_name}", {mhz})' for inst, mhz in zip(order, clocks, strict=True))
        lines.append(f"    [{', '.join(pairs)}],")
    return "\n".join([*lines, "]"]) + "\n"


def read_zeus_plan(path: str | os.PathLike[str], schedule: PipelineSchedule) -> FrequencyPlan:
    """Read a plan file of either form.

    Args:
        path: File to read.
        schedule: The order the file was written for; Zeus and Perseus know 1F1B only.

    Returns:
        The plan; its time and energy are not in the file (nan), see `simulate`.

    Raises:
        PlanError: If the file cannot be read, is no such literal, or does not fit the schedule.
    """
    where = cut(str(path))
    most = _CHARACTERS + _CHARACTERS_PER_CLOCK * len(schedule.instructions)
    rows = _literal(path, most)
    if rows is None:
        raise PlanError(
            f"{where} has more than {most:,} characters, too many for the {len(schedule.instructions):,} instructions "
            f"of schedule {schedule.name!r}. Read it with the schedule it was written for."
        )
    expected = [len(order) for order in schedule.orders]
    if [len(row) for row in rows] != expected:
        raise PlanError(
            f"{where} has {shortened([len(row) for row in rows])} clocks by row, but schedule {schedule.name!r} with "
            f"{pipeline_size(schedule.num_stages, schedule.num_microbatches)} runs {shortened(expected)} instructions."
        )
    clocks = tuple(
        tuple(_clock(where, entry, inst) for entry, inst in zip(row, order, strict=True))
        for row, order in zip(rows, schedule.orders, strict=True)
    )
    return FrequencyPlan(schedule, clocks, float("nan"), float("nan"))


def _clock(where: str, entry: Any, instruction: Instruction) -> int:
    name, mhz = entry if isinstance(entry, (list, tuple)) and len(entry) == 2 else (None, entry)
    if name not in (None, instruction.type.profile_name):
        raise PlanError(
            f"{where} has {shortened(name)} where the schedule runs {instruction} ({instruction.type.profile_name}). "
            "Read it with the schedule it was written for."
        )
    if not CLOCK.allows(mhz):
        raise PlanError(f"{where}: the entry of {instruction} must be {CLOCK}, got {shortened(entry)}.")
    return int(mhz)


def read_zeus_rows(path: str | os.PathLike[str]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Read a plan file of either form without knowing the schedule: names and clocks as they stand there.

    Bare clocks have no names; they are those of 1F1B, the only schedule that such files were written for.

    Args:
        path: File to read: a row per stage, or per rank.

    Raises:
        PlanError: If the file cannot be read or is no such literal.
    """
    where = cut(str(path))
    rows = _literal(path, _MOST_CHARACTERS)
    if rows is None:
        raise PlanError(f"{where} has more than {_MOST_CHARACTERS:,} characters, too many for a plan.")
    if not rows or not all(rows):
        raise PlanError(f"{where} must have a row per stage, and in each a clock per instruction; one is empty.")
    if all(isinstance(entry, (list, tuple)) for row in rows for entry in row):
        return tuple(tuple(_named(where, entry) for entry in row) for row in rows)
    num_microbatches, rest = divmod(len(rows[0]), 2)
    if rest:
        raise PlanError(
            f"{where} has bare clocks, which are for 1F1B: an even number of them in each row; got {len(rows[0])}."
        )
    plan = read_zeus_plan(path, one_f_one_b(len(rows), num_microbatches))
    return tuple(
        tuple((inst.type.profile_name, mhz) for inst, mhz in zip(order, clocks, strict=True))
        for order, clocks in zip(plan.schedule.orders, plan.clocks_mhz, strict=True)
    )


def _literal(path: str | os.PathLike[str], most: int) -> Any:
    """The rows of a file; None if it has more than `most` characters."""
    where = cut(str(path))
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            text = file.read(most + 1)
        if len(text) > most:
            return None
        rows = ast.literal_eval(text.strip())
    except (OSError, ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        reason = f"{type(error).__name__}: {cut(str(error))}"
        raise PlanError(f"{where} cannot be read as a plan, a Python list with a row per stage: {reason}.") from error
    if not isinstance(rows, (list, tuple)) or not all(isinstance(row, (list, tuple)) for row in rows):
        raise PlanError(f"{where} must be a list with a list per stage, got {shortened(rows)}.")
    return rows


def _named(where: str, entry: Any) -> tuple[str, int]:
    name, mhz = entry if len(entry) == 2 else ("", 0)
    known = [kind.profile_name for kind in InstructionType]
    if name not in known or not CLOCK.allows(mhz):
        raise PlanError(f"{where}: each entry is a name ({', '.join(known)}) and {CLOCK}; got {shortened(entry)}.")
    return name, int(mhz)
