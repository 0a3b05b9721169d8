"""A frontier as the text of `frontier.json`, and back.

Self-contained: the order of instructions, the measurements, the blocking power, the top-clock baseline and the clocks
of every plan. Instructions are written as text (`2F0`), sequences on one line. Version 1, which is still read, has one
blocking power per rank, and no clocks of waits, latency or dwell. Version 3 has times of transfers, which no release
must leave out because it does not know them; version 4 switch latencies of pairs of clocks. Files are of the lowest
version that has what they need. `policy` and `own_choice` are there where the plans are not the planner's own;
releases that do not know them read the plans all the same. So are `straggler_plans`, fast to slow, where they were
planned.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

from lightning_pfo.core.errors import PlanError
from lightning_pfo.core.frequency_plan import FrequencyPlan, WaitClock
from lightning_pfo.core.instruction import Instruction, InstructionType
from lightning_pfo.core.ranges import is_number
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.wording import shortened
from lightning_pfo.planner.frontier.data import OURS, PREDICTED, Frontier
from lightning_pfo.planner.profile.blocking_power import BlockingPower
from lightning_pfo.planner.profile.profile import COLUMNS, InstructionProfile, Profile
from lightning_pfo.planner.profile.switch_latency import SwitchLatency

FORMAT = "lightning_pfo.frontier"
VERSION, READ_VERSIONS = 4, (1, 2, 3, 4)
_WITHOUT_PAIRS, _WITHOUT_TRANSFERS = 3, 2
_MEASURED = [name for name in COLUMNS if name != "clocks_mhz"]
_BESIDE_BOUND = "beside_straggler_bound_j"  # files without it have it as lower_bound_j
_WAIT_COLUMNS = ("rank", "position", "clock_mhz", "hold_s")


def frontier_text(frontier: Frontier) -> str:
    """The text of the file.

    Raises:
        PlanError: If a plan has no predicted time and energy.
    """
    schedule, measurements = frontier.schedule, frontier.profile.instructions
    pairs_s = frontier.switch_pairs_s
    has_transfers = any(measured.transfer_s is not None for measured in measurements.values())
    data = {
        "format": FORMAT,
        "version": VERSION if pairs_s else _WITHOUT_PAIRS if has_transfers else _WITHOUT_TRANSFERS,
        "schedule": {
            "name": schedule.name,
            "num_stages": schedule.num_stages,
            "num_microbatches": schedule.num_microbatches,
            "orders": [" ".join(map(str, order)) for order in schedule.orders],
        },
        "p2p_blocking": [asdict(power) for power in frontier.blocking],
        "switch_latency_s": frontier.switch_latency_s,
        **({"switch_pairs_s": pairs_s} if pairs_s else {}),
        "least_dwell_s": frontier.least_dwell_s,
        **({"policy": frontier.policy} if frontier.policy != OURS else {}),
        **({"own_choice": frontier.number_of(frontier.own_choice)} if frontier.own_choice is not None else {}),
        "gpus_per_stage": frontier.profile.gpus_per_stage,
        "gpus": frontier.profile.gpus,
        "profile": [
            {
                "stage": stage,
                "instruction": kind.profile_name,
                **{column: getattr(measured, column) for column in ("clocks_mhz", *_MEASURED)},
                **({"transfer_s": measured.transfer_s} if has_transfers else {}),
                **({"unreached_mhz": measured.unreached_mhz} if measured.unreached_mhz else {}),
            }
            for (stage, kind), measured in measurements.items()
        ],
        "baseline": _plan_record(frontier.baseline),
        "plans": [{"plan": number, **_plan_record(plan)} for number, plan in enumerate(reversed(frontier.plans))],
        **(
            {"straggler_plans": list(map(_straggler_record, frontier.straggler_plans))}
            if frontier.straggler_plans
            else {}
        ),
    }
    try:
        return _laid_out(data) + "\n"
    except ValueError as error:
        raise PlanError(
            f"Only plans whose time and energy are predicted can be written, see `simulate`: {error}."
        ) from None


def _laid_out(value: Any, indent: str = "\n") -> str:
    """JSON with every list that holds no other on a line of its own."""
    inner = indent + " "
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {_laid_out(entry, inner)}" for key, entry in value.items()]
        return "{" + inner + f",{inner}".join(entries) + indent + "}"
    if isinstance(value, (list, tuple)) and any(isinstance(entry, (dict, list, tuple)) for entry in value):
        return "[" + inner + f",{inner}".join(_laid_out(entry, inner) for entry in value) + indent + "]"
    return json.dumps(value, allow_nan=False)


def _plan_record(plan: FrequencyPlan) -> dict[str, Any]:
    return {
        **{name: getattr(plan, name) for name in PREDICTED},
        "switching_cost_j": plan.switching_cost_j,
        "clock_changes": plan.num_clock_changes,
        "clocks_mhz": plan.clocks_mhz,
        "wait_clocks": {name: [getattr(wait, name) for wait in plan.wait_clocks] for name in _WAIT_COLUMNS},
    }


def _straggler_record(plan: FrequencyPlan) -> dict[str, Any]:
    return _plan_record(plan) | {_BESIDE_BOUND: plan.beside_straggler_bound_j}


def frontier_from(data: Mapping[str, Any]) -> Frontier:
    """The frontier of a file that was read as JSON; a file may hold anything, so many kinds of errors are possible.

    Raises:
        PfoError: If a value cannot be used.
        KeyError, TypeError, ValueError, AttributeError, OverflowError: If one is missing or of another kind.
    """
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
                tuple(map(_whole, row["clocks_mhz"])),
                **_columns(row),
                transfer_s=row.get("transfer_s"),
                unreached_mhz=tuple(map(_whole, row.get("unreached_mhz", ()))),
            )
            for row in data["profile"]
        },
        _whole(data["gpus_per_stage"]),
        _names(data.get("gpus", ())),
    )
    blocking = _blocking_from(data)
    if len(blocking) != len(orders):
        raise PlanError(f"The blocking power needs one entry for each of {len(orders)} ranks, got {len(blocking)}.")
    plans = tuple(_plan_from(record, schedule) for record in reversed(data["plans"]))
    if not plans:
        raise PlanError("It contains no plan.")
    if any(a.iteration_time_s > b.iteration_time_s for a, b in pairwise(plans)):
        raise PlanError("Its plans must be listed from the slowest to the fastest.")
    if any(a.iteration_energy_j <= b.iteration_energy_j for a, b in pairwise(plans)):
        raise PlanError("None of its plans may be slower than another without needing less energy.")
    slower = tuple(_straggler_plan_from(record, schedule) for record in data.get("straggler_plans", ()))
    if any(
        max(plan.lower_bound_j, plan.beside_straggler_bound_j) > plan.iteration_energy_j for plan in (*plans, *slower)
    ):
        raise PlanError("No plan can need less energy than its lower bound.")
    baseline = _plan_from(data["baseline"], schedule)
    latency_s, dwell_s = _numbers([data.get(name, 0.0) for name in ("switch_latency_s", "least_dwell_s")])
    pairs_s = SwitchLatency(0.0, data.get("switch_pairs_s", ())).pairs_s
    policy, number = data.get("policy", OURS), data.get("own_choice")
    if not isinstance(policy, str):
        raise PlanError(f"Expected the name of a policy, got {shortened(policy)}.")
    own_choice = None if number is None else plans[_place(number, len(plans))]
    frontier = Frontier(
        schedule, profile, blocking, baseline, plans, latency_s, dwell_s, pairs_s, policy, own_choice, slower
    )
    for fast, slow in pairwise((frontier.least_energy, *slower)):
        until_s = slow.iteration_time_s
        if fast.iteration_time_s > until_s or frontier.beside_straggler_j(fast, until_s) <= slow.iteration_energy_j:
            raise PlanError(
                "Its straggler plans must be listed from the fastest to the slowest, each cheaper than the one before "
                "where its time is waited for anyway."
            )
    return frontier


def _blocking_from(data: Mapping[str, Any]) -> tuple[BlockingPower, ...]:
    if data["version"] == 1:
        return tuple(BlockingPower((), (power,)) for power in _numbers(data["p2p_blocking_powers_w"]))
    return tuple(
        BlockingPower(tuple(map(_whole, power["clocks_mhz"])), _numbers(power["powers_w"]))
        for power in data["p2p_blocking"]
    )


def _plan_from(record: Mapping[str, Any], schedule: PipelineSchedule) -> FrequencyPlan:
    waits = record.get("wait_clocks", {name: [] for name in _WAIT_COLUMNS})
    rows = zip(*(waits[name] for name in _WAIT_COLUMNS), strict=True)
    switching_cost_j = record.get("switching_cost_j", 0.0)
    if not _is_finite(switching_cost_j):
        raise PlanError(f"Expected a finite number, got {shortened(switching_cost_j)}.")
    time_s, energy_j, bound_j = _numbers([record[name] for name in PREDICTED])
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
    return plan


def _straggler_plan_from(record: Mapping[str, Any], schedule: PipelineSchedule) -> FrequencyPlan:
    plan = _plan_from(record, schedule)
    if _BESIDE_BOUND in record:
        return replace(plan, beside_straggler_bound_j=_numbers([record[_BESIDE_BOUND]])[0])
    return replace(plan, lower_bound_j=0.0, beside_straggler_bound_j=plan.lower_bound_j)


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    return {column: _numbers(row[column]) for column in _MEASURED}


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PlanError(f"Expected a whole number, at least 0, got {shortened(value)}.")
    return value


def _place(number: Any, num_plans: int) -> int:
    """Where the plan of a number is, fast to slow."""
    if _whole(number) >= num_plans:
        raise PlanError(f"There is no plan {number}; plans are numbered 0 to {num_plans - 1}.")
    return int(num_plans - 1 - number)


def _names(values: Sequence[Any]) -> tuple[str, ...]:
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
        raise PlanError(f"Expected a list of names, got {shortened(values)}.")
    return tuple(values)


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    for value in values:
        if not _is_finite(value) or value < 0:
            raise PlanError(f"Expected a finite number, at least 0, got {shortened(value)}.")
    return tuple(map(float, values))


def _is_finite(value: Any) -> bool:
    return is_number(value) and abs(value) < math.inf
