"""What a GPU draws at its own clock, and whether energy is attributed rightly there. No clock is changed.

    python benchmarks/own_clock.py [gpu=auto] [seconds=3] [instruction_ms=20] [repeats=120]

Steady loads first, each of some seconds, which any counter can tell: idle, blocked (a kernel that spins, as a receive
of nccl does; `lightning-pfo p2p-power` waits for a real neighbour where there are two GPUs), busy (matrix products).
Then instructions of `instruction_ms` with pauses of changing length between them. Their power is found as in profiling,
by least squares over the counter's ticks, and compared with that of the steady load, and all energy with the counter.
On CUDA the times of instructions by events are compared with those by the host's clock.

Prints one JSON line; `verdict` says whether the attributed power of instructions and pauses is that of the steady
loads, within two standard errors or 5 %, or that these are too large to tell. Exits with 1 if it is not. Emulated GPUs,
in virtual time, tick every 0.1 s.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import Any

from lightning_pfo.cli.settings import read_settings, without_dashes
from lightning_pfo.core.errors import DeviceError, PfoError
from lightning_pfo.core.ranges import check_above, check_between
from lightning_pfo.device import Gpu, load_gpu_config, open_gpu
from lightning_pfo.device.energy.attribution import mean_powers
from lightning_pfo.device.energy.sampler import EnergySampler
from lightning_pfo.device.time import time_of
from lightning_pfo.experiment.gpu_loads.load import Load, load_of

TOLERANCE = 0.05
SETTLES = 0.2
"""This share of a steady load, at its begin, is left out."""
UNDECIDED = 0.2
"""Powers that are known no better than by this share of the busy GPU's (two standard errors) decide nothing."""
PAUSES_MS = (3.0, 17.0, 8.0, 129.0, 12.0)
"""One is longer than the ticks of counters (100 ms on an H200), so that some of these tell of pauses alone."""
EMULATED_TICK_S = 0.1


@dataclass
class Settings:
    """What can be told on the command line."""

    gpu: str = "auto"
    seconds: float = 3.0
    instruction_ms: float = 20.0
    repeats: int = 120


def measure(gpu: Gpu, load: Load, settings: Settings) -> dict[str, Any]:
    """Put the loads on, one after the other, and compare."""
    now_s = time_of(gpu).now_s
    sampler = EnergySampler(gpu)
    sampler.start()
    try:
        steady_w = {}
        for name in ("idle", "blocked", "busy"):
            begin_s = now_s()
            getattr(load, name)(settings.seconds)
            steady_w[name] = _steady_power_w(sampler, begin_s + SETTLES * (now_s() - begin_s), now_s(), name)
        intervals: dict[str, list[tuple[float, float]]] = {"busy": [], "idle": []}
        by_events_s: list[float | None] = []
        for index in range(settings.repeats):
            moments_s = [now_s()]
            by_events_s.append(load.busy(settings.instruction_ms / 1000))
            moments_s.append(now_s())
            load.idle(PAUSES_MS[index % len(PAUSES_MS)] / 1000)
            moments_s.append(now_s())
            intervals["busy"].append((moments_s[0], moments_s[1]))
            intervals["idle"].append((moments_s[1], moments_s[2]))
        trace = sampler.trace(intervals["busy"][0][0])
        if sampler.error is not None:
            raise sampler.error
    finally:
        sampler.stop()
    found = mean_powers(trace, intervals)
    times_s = {kind: sum(end_s - begin_s for begin_s, end_s in these) for kind, these in intervals.items()}
    counted_j = trace.energies_j[-1] - trace.energies_j[0]
    attributed_j = sum(
        found[kind].power_w * max(0.0, min(end_s, trace.times_s[-1]) - max(begin_s, trace.times_s[0]))
        for kind in found
        for begin_s, end_s in intervals[kind]
    )
    is_right = all(
        abs(power.power_w - steady_w[kind]) <= max(2 * power.stderr_w, TOLERANCE * steady_w[kind])
        for kind, power in found.items()
    )
    is_known = all(2 * power.stderr_w <= UNDECIDED * steady_w["busy"] for power in found.values())
    if not is_right:
        verdict = "NOT AS UNDER STEADY LOADS"
    else:
        verdict = "as under steady loads" if is_known else "undecided: give more repeats"
    known_s = [seconds for seconds in by_events_s if seconds is not None]
    return {
        "gpu": gpu.name,
        "clock_mhz": gpu.graphics_clock_mhz(),
        **{f"{name}_w": round(power_w, 2) for name, power_w in steady_w.items()},
        **{f"attributed_{kind}_w": round(power.power_w, 2) for kind, power in found.items()},
        **{f"attributed_{kind}_stderr_w": round(power.stderr_w, 2) for kind, power in found.items()},
        "attributed_to_counted_percent": round(100 * (attributed_j / counted_j - 1), 3),
        "events_to_host_percent": round(100 * (sum(known_s) / times_s["busy"] - 1), 3) if known_s else None,
        "verdict": verdict,
    }


def _steady_power_w(sampler: EnergySampler, begin_s: float, end_s: float, name: str) -> float:
    trace = sampler.trace(begin_s)
    inside = [pair for pair in zip(trace.times_s, trace.energies_j, strict=True) if pair[0] <= end_s]
    if len(inside) < 3:
        raise sampler.error or DeviceError(
            f"Power is the energy between ticks of the counter; there were {len(inside)} while {name} in "
            f"{end_s - begin_s:.3g} s. Use more seconds."
        )
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


def main(arguments: list[str]) -> int:
    """Measure, print, judge."""
    try:
        settings: Settings = read_settings(Settings, without_dashes(arguments))
        check_above("seconds", settings.seconds, 0)
        check_above("instruction_ms", settings.instruction_ms, 0)
        check_between("repeats", settings.repeats, 20)
        config = replace(load_gpu_config(settings.gpu), dry_run=True)
        gpu = open_gpu(replace(config, counter_tick_s=config.counter_tick_s or EMULATED_TICK_S), 0)
        try:
            result = measure(gpu, load_of(gpu), settings)
        finally:
            gpu.close()
    except PfoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return int(result["verdict"].isupper())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
