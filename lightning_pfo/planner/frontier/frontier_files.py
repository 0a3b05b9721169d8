"""Frontier files: `frontier.json` (everything), `frontier.csv` (the numbers) and Zeus plan files.

`frontier.json` is versioned and self-contained: the order of instructions, the measurements, the blocking power, the
top-clock baseline and the clocks of every plan, so that it can be applied, drawn and checked without other files.
Instructions are written as text (`2F0`), sequences on one line. Version 1, which is still read, has one blocking power
per rank, and no clocks of waits, latency or dwell. The form of Zeus has no place for clocks of waits; they are in the
JSON file only.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_pfo.core.errors import PfoError, PlanError
from lightning_pfo.core.files import write_text_atomically
from lightning_pfo.core.frequency_plan import FrequencyPlan, WaitClock
from lightning_pfo.core.instruction import Instruction, InstructionType
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.frontier.zeus_files import zeus_text
from lightning_pfo.planner.profile.blocking_power import BlockingPower
from lightning_pfo.planner.profile.profile import InstructionProfile, Profile

FORMAT = "lightning_pfo.frontier"
VERSION, _READ_VERSIONS = 2, (1, 2)
JSON_NAME, CSV_NAME = "frontier.json", "frontier.csv"
_MEASURED = ("times_s", "energies_j", "p2p_blocking_powers_w", "time_stderrs_s", "energy_stderrs_j")
_PREDICTED = ("iteration_time_s", "iteration_energy_j", "lower_bound_j")
_WAIT_COLUMNS = ("rank", "position", "clock_mhz", "hold_s")
_ZEUS_NAME = "freqs_pipeline_{:05d}.py"
_ZEUS_PATTERN = re.compile(r"freqs_pipeline_(\d{5})\.py")
_INNERMOST_LIST = re.compile(r"\[\s+([^\[\]{}]*?)\s+\]")


def save_frontier(frontier: Frontier, directory: str | os.PathLike[str]) -> None:
    """Write `frontier.json`, `frontier.csv` and one `freqs_pipeline_%05d.py` per plan into `directory`.

    Zeus plan files of an earlier, longer frontier are removed, so that the directory holds one frontier.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(folder / CSV_NAME, _csv_text(frontier))
    for number, plan in enumerate(reversed(frontier.plans)):
        write_text_atomically(folder / _ZEUS_NAME.format(number), zeus_text(plan, number))
    for path in folder.iterdir():
        match = _ZEUS_PATTERN.fullmatch(path.name)
        if match and int(match[1]) >= len(frontier.plans):
            path.unlink()
    write_text_atomically(folder / JSON_NAME, _json_text(frontier))


def load_frontier(path: str | os.PathLike[str]) -> Frontier:
    """Read a `frontier.json`, given by its path or by its directory.

    Raises:
        PlanError: If there is none, it has another version, or it is malformed.
    """
    where = Path(path)
    if where.is_dir():
        where = where / JSON_NAME
    try:
        data = json.loads(where.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise PlanError(
            f"There is no frontier at {where}. Make one with `lightning-pfo plan ... output_dir={where.parent}`."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"{where} cannot be read as JSON ({error}). Plan again to write it anew.") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError(f'{where} is not a frontier file: it must be a JSON object with "format": "{FORMAT}".')
    version = data.get("version")
    if isinstance(version, bool) or version not in _READ_VERSIONS:
        raise PlanError(
            f"{where} has version {version!r} of the frontier format; this release reads versions "
            f"{' and '.join(map(str, _READ_VERSIONS))}. Plan again with this release."
        )
    try:
        return _frontier_from(data)
    except (PfoError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise PlanError(f"{where} is malformed: {what} Plan again to write it anew.") from error


def _json_text(frontier: Frontier) -> str:
    schedule = frontier.schedule
    data = {
        "format": FORMAT,
        "version": VERSION,
        "schedule": {
            "name": schedule.name,
            "num_stages": schedule.num_stages,
            "num_microbatches": schedule.num_microbatches,
            "orders": [" ".join(map(str, order)) for order in schedule.orders],
        },
        "p2p_blocking": [asdict(power) for power in frontier.blocking],
        "switch_latency_s": frontier.switch_latency_s,
        "least_dwell_s": frontier.least_dwell_s,
        "gpus_per_stage": frontier.profile.gpus_per_stage,
        "gpus": frontier.profile.gpus,
        "profile": [
            {
                "stage": stage,
                "instruction": kind.profile_name,
                **{column: getattr(measured, column) for column in ("clocks_mhz", *_MEASURED)},
            }
            for (stage, kind), measured in frontier.profile.instructions.items()
        ],
        "baseline": _plan_record(frontier.baseline),
        "plans": [{"plan": number, **_plan_record(plan)} for number, plan in enumerate(reversed(frontier.plans))],
    }
    text = json.dumps(data, indent=1, allow_nan=False)
    return _INNERMOST_LIST.sub(lambda match: "[" + re.sub(r"\s*\n\s*", " ", match[1]) + "]", text) + "\n"


def _plan_record(plan: FrequencyPlan) -> dict[str, Any]:
    return {
        **{name: getattr(plan, name) for name in _PREDICTED},
        "switching_cost_j": plan.switching_cost_j,
        "clock_changes": plan.num_clock_changes,
        "clocks_mhz": plan.clocks_mhz,
        "wait_clocks": {name: [getattr(wait, name) for wait in plan.wait_clocks] for name in _WAIT_COLUMNS},
    }


def _csv_text(frontier: Frontier) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = (*_PREDICTED, "gap")
    writer.writerow(["plan", *names, "clock_changes", "switching_cost_j"])
    for number, plan in enumerate(reversed(frontier.plans)):
        numbers = [getattr(plan, name) for name in names]
        writer.writerow([number, *numbers, plan.num_clock_changes, plan.switching_cost_j])
    return text.getvalue()


def _frontier_from(data: Mapping[str, Any]) -> Frontier:
    orders = tuple(tuple(map(Instruction.parse, order.split())) for order in data["schedule"]["orders"])
    schedule = PipelineSchedule(
        str(data["schedule"]["name"]),
        _whole(data["schedule"]["num_stages"]),
        _whole(data["schedule"]["num_microbatches"]),
        orders,
    )
    schedule.validate()
    profile = Profile(
        {
            (_whole(row["stage"]), InstructionType.from_profile_name(row["instruction"])): InstructionProfile(
                tuple(map(_whole, row["clocks_mhz"])), *(_numbers(row[column]) for column in _MEASURED)
            )
            for row in data["profile"]
        },
        _whole(data["gpus_per_stage"]),
        _names(data.get("gpus", ())),
    )
    blocking = _blocking_from(data)
    if len(blocking) != len(orders):
        raise PlanError(f"The blocking power needs one entry for each of {len(orders)} ranks, got {len(blocking)}.")
    plans = tuple(_plan_from(record, schedule, profile) for record in reversed(data["plans"]))
    if not plans:
        raise PlanError("It contains no plan.")
    if any(a.iteration_time_s > b.iteration_time_s for a, b in pairwise(plans)):
        raise PlanError("Its plans must be listed from the slowest to the fastest.")
    if any(a.iteration_energy_j <= b.iteration_energy_j for a, b in pairwise(plans)):
        raise PlanError("None of its plans may be slower than another without needing less energy.")
    if any(plan.lower_bound_j > plan.iteration_energy_j for plan in plans):
        raise PlanError("No plan can need less energy than its lower bound.")
    baseline = _plan_from(data["baseline"], schedule, profile)
    limits = _numbers([data.get(name, 0.0) for name in ("switch_latency_s", "least_dwell_s")])
    return Frontier(schedule, profile, blocking, baseline, plans, *limits)


def _blocking_from(data: Mapping[str, Any]) -> tuple[BlockingPower, ...]:
    if data["version"] == 1:
        return tuple(BlockingPower((), (power,)) for power in _numbers(data["p2p_blocking_powers_w"]))
    return tuple(
        BlockingPower(tuple(map(_whole, power["clocks_mhz"])), _numbers(power["powers_w"]))
        for power in data["p2p_blocking"]
    )


def _plan_from(record: Mapping[str, Any], schedule: PipelineSchedule, profile: Profile) -> FrequencyPlan:
    waits = record.get("wait_clocks", {name: [] for name in _WAIT_COLUMNS})
    rows = zip(*(waits[name] for name in _WAIT_COLUMNS), strict=True)
    switching_cost_j = record.get("switching_cost_j", 0.0)
    if not _is_number(switching_cost_j):
        raise PlanError(f"Expected a finite number, got {switching_cost_j!r}.")
    time_s, energy_j, bound_j = _numbers([record[name] for name in _PREDICTED])
    plan = FrequencyPlan(
        schedule,
        tuple(tuple(map(_whole, row)) for row in record["clocks_mhz"]),
        time_s,
        energy_j,
        bound_j,
        wait_clocks=tuple(WaitClock(*map(_whole, row[:3]), *_numbers(row[3:])) for row in rows),
        switching_cost_j=float(switching_cost_j),
    )
    if not plan.iteration_time_s > 0:
        raise PlanError(f"An iteration takes time; got iteration_time_s={plan.iteration_time_s}.")
    for instruction, clock in plan.clock_of().items():
        profile.of(instruction.stage, instruction.type).at(clock)
    return plan


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PlanError(f"Expected a whole number, at least 0, got {value!r}.")
    return value


def _names(values: Sequence[Any]) -> tuple[str, ...]:
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
        raise PlanError(f"Expected a list of names, got {values!r}.")
    return tuple(values)


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    for value in values:
        if not _is_number(value) or value < 0:
            raise PlanError(f"Expected a finite number, at least 0, got {value!r}.")
    return tuple(map(float, values))


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
