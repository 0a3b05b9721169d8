"""One line of the profile CSV, as a scan writes it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class ProfileRow:
    """One line of the profile CSV; units as there: MHz, s and J per microbatch and GPU, W.

    `clock_seen_mhz` is the mean clock at which the GPU ran, nan where it does not tell. `transfer_time` is None where
    the instruction sends nothing, or nobody waited for it. `temperature_c` (degrees Celsius) and `power_seen_w` are
    what the driver told meanwhile, nan where it does not; `energy` is the counter's. `switch_latency`: see
    `planner.profile.switch_latency`. The ranks of replicas and of tensor parallelism are columns only where there are
    several.
    """

    stage: int
    instruction: str
    frequency: int
    time: float
    energy: float
    time_stderr: float
    energy_stderr: float
    samples: int
    p2p_blocking_power_w: float
    transfer_time: float | None = None
    flags: str = ""
    clock_seen_mhz: float = math.nan
    temperature_c: float = math.nan
    power_seen_w: float = math.nan
    p2p_blocking_power_stderr: float = math.nan
    switch_latency: str = ""
    gpu: str = ""
    dp_rank: int = 0
    tp_rank: int = 0


def profile_records(rows: Sequence[ProfileRow]) -> list[dict[str, Any]]:
    """The lines of the file, by stage: with the columns that say something, and a power of waiting everywhere."""
    by_stage = sorted(rows, key=lambda row: (row.stage, row.instruction != "forward"))
    return _with_needed_columns(_fill_blocked_power(by_stage))


def _with_needed_columns(rows: Sequence[ProfileRow]) -> list[dict[str, Any]]:
    """Leave out the ranks of replicas, or of tensor parallelism, where there is one, and latencies that nobody saw."""
    records = [asdict(row) for row in rows]
    optional = ("dp_rank", "tp_rank", "switch_latency")
    single = [column for column in optional if not any(record[column] for record in records)]
    return [{key: value for key, value in record.items() if key not in single} for record in records]


def _fill_blocked_power(rows: Sequence[ProfileRow]) -> Sequence[ProfileRow]:
    """Where a stage never waited, take the mean of the others at that clock; where nobody waits, 0 W."""
    known: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if not math.isnan(row.p2p_blocking_power_w):
            known[row.frequency].append(row.p2p_blocking_power_w)
    means = {clock: math.fsum(powers) / len(powers) for clock, powers in known.items()}
    overall = math.fsum(means.values()) / len(means) if means else 0.0  # in a pipeline of one stage nobody waits
    return [
        replace(row, p2p_blocking_power_w=means.get(row.frequency, overall))
        if math.isnan(row.p2p_blocking_power_w)
        else row
        for row in rows
    ]
