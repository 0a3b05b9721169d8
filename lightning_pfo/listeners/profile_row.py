"""One line of the profile CSV, as a scan writes it."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
