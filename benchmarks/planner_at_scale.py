"""The planner on very long pipelines: CPU time, memory and gaps, in one process on one core.

    python benchmarks/planner_at_scale.py PROFILE.csv [num_stages=64] [num_microbatches=512] [schedule=1f1b]
        [num_plans=10] [p2p_blocking_power_w=85] [spread=0.15] [seed=0]

The pipeline repeats the stages of the profile, each scaled in time and energy by a random factor within `spread`.
With `output_dir=DIR` the whole command is measured: files and pictures too. Prints one JSON line.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from pipelines import pick_stages

from lightning_pfo.cli.plan import Settings, run
from lightning_pfo.core.schedules.registry import num_ranks_for
from lightning_pfo.planner import Profile, plan_frontier, read_profile, write_profile


def scaled_profile(profile: Profile, num_stages: int, spread: float, seed: int) -> Profile:
    """A longer pipeline of unequal stages."""
    rng = random.Random(seed)
    stages = [stage % profile.num_stages for stage in range(num_stages)]
    return pick_stages(profile, stages, [rng.uniform(1 - spread, 1 + spread) for _ in stages])


def main() -> None:
    """Plan and print what it took."""
    settings = dict(argument.split("=", 1) for argument in sys.argv[2:])
    num_stages = int(settings.get("num_stages", 64))
    num_microbatches = int(settings.get("num_microbatches", 512))
    schedule = settings.get("schedule", "1f1b")
    num_plans = int(settings.get("num_plans", 10))
    power_w = float(settings.get("p2p_blocking_power_w", 85))
    spread, seed = float(settings.get("spread", 0.15)), int(settings.get("seed", 0))
    profile = scaled_profile(read_profile(Path(sys.argv[1])), num_stages, spread, seed)

    begin = time.process_time()
    if "output_dir" in settings:
        with tempfile.NamedTemporaryFile(suffix=".csv") as file:
            write_profile(
                file.name,
                (
                    {"stage": stage, "instruction": kind, "frequency": mhz, "time": time_s, "energy": energy_j}
                    for (stage, kind), m in profile.instructions.items()
                    for mhz, time_s, energy_j in zip(m.clocks_mhz, m.times_s, m.energies_j, strict=True)
                ),
            )
            run(
                Settings(
                    profile=file.name,
                    num_microbatches=num_microbatches,
                    output_dir=settings["output_dir"],
                    p2p_blocking_power_w=power_w,
                    schedule=schedule,
                    num_plans=num_plans,
                )
            )
        gaps = []
    else:
        frontier = plan_frontier(
            profile,
            num_microbatches=num_microbatches,
            schedule=schedule,
            p2p_blocking_power_w=power_w,
            num_plans=num_plans,
        )
        gaps = sorted(100 * plan.gap for plan in frontier.plans)
    result = {
        "pipeline": f"{schedule}, {num_stages} stages on {num_ranks_for(schedule, num_stages)} ranks x "
        f"{num_microbatches} microbatches",
        "cpu_s": round(time.process_time() - begin, 1),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    if gaps:
        result |= {
            "plans": len(gaps),
            "median_gap_percent": round(gaps[len(gaps) // 2], 3),
            "largest_gap_percent": round(gaps[-1], 3),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
