"""What ranks have reported, round by round, as measurements: of clocks, of waiting, of whole iterations.

A round is an entry of `Job.measured`. Time that a rank does not compute is waiting, and what it uses then is the
blocking power.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.wording import counted
from lightning_pfo.server.jobs.messages import RankInfo

Round = Mapping[str, Any]

_NAMES = ("forward", "backward")
_LEAST_WAITING = 0.01
"""Where a rank waits for less than this share of an iteration, what it uses meanwhile is not told by a difference."""


def clock_of(entry: Round, info: RankInfo) -> int:
    """The clock (MHz) that a rank had in a round of a scan."""
    clocks_mhz: Sequence[int] = entry["clocks_mhz"]
    return clocks_mhz[info.pp_rank]


def profile_rows(rounds: Sequence[Round], ranks: Mapping[int, RankInfo]) -> list[dict[str, Any]]:
    """The lines of a profile: what each rank has measured at each clock, the last time it did.

    Where a rank did not wait, the power of waiting is that of the others at the clock, else at all clocks.

    Args:
        rounds: Those of a scan.
        ranks: All ranks, by number.
    """
    latest = {(clock_of(entry, ranks[rank]), rank): means for entry in rounds for rank, means in entry["ranks"].items()}
    waiting_w = {key: _waiting_power_w(means) for key, means in latest.items()}
    known_w = defaultdict(list)
    for (clock_mhz, _), power_w in waiting_w.items():
        if power_w is not None:
            known_w[clock_mhz].append(power_w)
    usual_w = {clock_mhz: _mean(powers_w) for clock_mhz, powers_w in known_w.items()}
    overall_w = _mean([*usual_w.values()])
    rows = []
    for (clock_mhz, rank), means in latest.items():
        info, power_w = ranks[rank], waiting_w[clock_mhz, rank]
        for name, (time_s, energy_j) in _instructions(means):
            rows.append(
                {
                    "rank": rank,
                    "dp_rank": info.dp_rank,
                    "pp_rank": info.pp_rank,
                    "tp_rank": info.tp_rank,
                    "stage": info.pp_rank,
                    "instruction": name,
                    "frequency": clock_mhz,
                    "time": time_s,
                    "energy": energy_j,
                    "time_stderr": _known(means["stderrs"][name][0]),
                    "energy_stderr": _known(means["stderrs"][name][1]),
                    "samples": means["counts"][name],
                    "p2p_blocking_power_w": usual_w.get(clock_mhz, overall_w) if power_w is None else power_w,
                }
            )
    return sorted(rows, key=lambda row: (row["stage"], row["rank"], row["instruction"] != "forward", -row["frequency"]))


def energies_of(rounds: Sequence[Round]) -> Iterator[tuple[tuple[int, str], float]]:
    """Energies (J) of instructions with their ranks and names, round by round."""
    for entry in rounds:
        for rank, means in entry["ranks"].items():
            for name, (_, energy_j) in _instructions(means):
                yield (rank, name), energy_j


def iteration_of(entry: Round) -> tuple[float, float] | None:
    """Time (s) and energy (J, all GPUs) of an iteration: ranks that are done before the last one wait for it.

    None where a rank has not told its times and energies.
    """
    means = [*entry["ranks"].values()]
    told = [one["iteration"] for one in means]
    if any(not time_s or energy_j is None for time_s, energy_j in told):
        return None
    longest_s = max(time_s for time_s, _ in told)
    waiting_w = [_waiting_power_w(one) for one in means]
    usual_w = _mean([power_w for power_w in waiting_w if power_w is not None])
    waited_j = math.fsum(
        (usual_w if power_w is None else power_w) * (longest_s - time_s)
        for power_w, (time_s, _) in zip(waiting_w, told, strict=True)
    )
    return longest_s, math.fsum(energy_j for _, energy_j in told) + waited_j


def what_is_missing(entry: Round, schedule: PipelineSchedule) -> str:
    """Why a round of reports is no measurement of a clock; empty if it is one."""
    for rank, means in sorted(entry["ranks"].items()):
        for name in _NAMES:
            time_s, energy_j = means["instructions"].get(name, (None, None))
            if not time_s or energy_j is None:
                return f"rank {rank} reports no time_breakdown and energy_breakdown of {name!r}."
            expected = schedule.num_microbatches * means["iterations"]
            if means["counts"][name] != expected:
                return (
                    f"rank {rank} reports {counted(means['counts'][name], name)} in "
                    f"{counted(means['iterations'], 'iteration')}, but num_microbatches={schedule.num_microbatches}."
                )
    return ""


def _waiting_power_w(means: Mapping[str, Any]) -> float | None:
    """Power while a rank waits: what an iteration takes and uses beyond its instructions; None where that is little."""
    waited_s, waited_j = time_s, energy_j = means["iteration"]
    if time_s is None or energy_j is None or not means["iterations"]:
        return None
    for name, (each_s, each_j) in means["instructions"].items():
        if each_s is None or each_j is None:
            return None
        number = means["counts"][name] / means["iterations"]
        waited_s -= number * each_s
        waited_j -= number * each_j
    return max(waited_j, 0.0) / waited_s if waited_s > _LEAST_WAITING * time_s else None


def _instructions(means: Mapping[str, Any]) -> Iterator[tuple[str, tuple[float, float]]]:
    for name in _NAMES:
        yield name, means["instructions"][name]


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
