"""Pipelines to try the planner on: profiles measured elsewhere, and made ones that stand for any profile.

`evaluation_set()` lists them, each with a name such as `a40 7+1 8x96`: GPU, what was done to its stages, size. The two
measured profiles are found beside the project (`../shared/profiles`); without them only emulated GPUs remain.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.registry import SCHEDULES, make_schedule
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner import InstructionProfile, Profile, read_profile

MEASURED_DIR = Path(__file__).resolve().parents[2] / "shared" / "profiles"
MEASURED = {"a100": ("gpt3-175b_a100-sxm_bf16.csv", 83.64), "a40": ("bloom-176b_a40_bf16.csv", 70.38)}
"""Files and powers in watts while blocked (Perseus, SOSP 2024)."""

SPLIT = {InstructionType.INPUT_GRADIENT: 0.55, InstructionType.WEIGHT_GRADIENT: 0.45}
"""Parts of a full backward, for schedules that run them apart."""


@dataclass(frozen=True)
class Pipeline:
    """What is planned.

    Attributes:
        name: Says how it was made.
        profile: Times and energies.
        schedule: Order of instructions.
        power_w: P2P blocking power.
    """

    name: str
    profile: Profile
    schedule: PipelineSchedule
    power_w: float


def has_measured() -> bool:
    """Whether the measured profiles are beside the project."""
    return all((MEASURED_DIR / file).exists() for file, _ in MEASURED.values())


def pick_stages(profile: Profile, stages: Sequence[int], factors: Sequence[float] | None = None) -> Profile:
    """A pipeline of some stages of another, each taking a multiple of the time and energy; halves of backwards too."""
    instructions = {}
    for number, (stage, factor) in enumerate(zip(stages, factors or [1.0] * len(stages), strict=True)):
        for kind in (InstructionType.FORWARD, InstructionType.BACKWARD):
            measured = profile.of(stage, kind)
            parts = {kind: 1.0, **(SPLIT if kind is InstructionType.BACKWARD else {})}
            for part, share in parts.items():
                instructions[number, part] = InstructionProfile(
                    measured.clocks_mhz,
                    tuple(factor * share * time_s for time_s in measured.times_s),
                    tuple(factor * share * energy_j for energy_j in measured.energies_j),
                )
    return Profile(instructions)


def scale_stages(profile: Profile, least: float, most: float, seed: int = 0) -> Profile:
    """Every stage takes another multiple of its time and energy, between the least and the most."""
    rng = random.Random(seed)
    stages = range(profile.num_stages)
    return pick_stages(profile, stages, [rng.uniform(least, most) for _ in stages])


def map_points(profile: Profile, change: Callable[[InstructionProfile], InstructionProfile]) -> Profile:
    """Change the measurements of every instruction."""
    return Profile({key: change(measured) for key, measured in profile.instructions.items()})


def coarsen(profile: Profile, every: int) -> Profile:
    """Keep each so manieth clock, from the top."""
    return map_points(
        profile,
        lambda m: InstructionProfile(m.clocks_mhz[::every], m.times_s[::every], m.energies_j[::every]),
    )


def add_noise(profile: Profile, deviation: float, seed: int = 0) -> Profile:
    """Times and energies as if measured with a relative error."""
    rng = random.Random(seed)

    def noisy(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(value * rng.gauss(1.0, deviation) for value in values)

    return map_points(profile, lambda m: InstructionProfile(m.clocks_mhz, noisy(m.times_s), noisy(m.energies_j)))


def emulate(gpu: str, stage_factors: Sequence[float], forward_s: float = 0.05) -> tuple[Profile, float]:
    """The profile of an emulated GPU (`conf/gpu/emulated_GPU.yaml`) and its power in watts while blocked."""
    from lightning_pfo.device.config import load_gpu_config
    from lightning_pfo.device.emulated.physics import GpuPhysics

    physics = GpuPhysics(load_gpu_config(f"emulated_{gpu}"))
    config = physics.config
    clocks = [clock for clock in physics.supported_clocks_mhz if clock >= 0.4 * config.top_clock_mhz]
    instructions = {}
    for stage, factor in enumerate(stage_factors):
        for kind, length in ((InstructionType.FORWARD, 1.0), (InstructionType.BACKWARD, 1.9)):
            whole_s = factor * length * forward_s
            parts = (1 - config.memory_share) * whole_s, config.memory_share * whole_s
            instructions[stage, kind] = InstructionProfile(
                tuple(clocks),
                tuple(physics.time_s(clock, *parts) for clock in clocks),
                tuple(physics.time_s(clock, *parts) * physics.computing_power_w(clock) for clock in clocks),
            )
    return pick_stages(Profile(instructions), range(len(stage_factors))), physics.blocked_power_w(config.top_clock_mhz)


@lru_cache
def measured_profile(gpu: str) -> Profile:
    """One of the measured profiles."""
    return read_profile(MEASURED_DIR / MEASURED[gpu][0])


def evaluation_set(wanted: Sequence[str] = ()) -> list[Pipeline]:
    """The pipelines whose names contain one of the words wanted, all of them if there are none."""
    made = [pipeline for pipeline in _all_pipelines() if not wanted or any(word in pipeline.name for word in wanted)]
    return made


def _all_pipelines() -> Iterator[Pipeline]:
    for gpu in MEASURED if has_measured() else ():
        yield from _from_measured(gpu)
    stages = {"even": [1.0] * 8, "uneven": _between(0.97, 1.03, 8, 5), "7+1": [1.0] * 7 + [1.2]}
    for gpu in ("h100", "v100", "a6000"):
        for name, factors in stages.items():
            profile, power_w = emulate(gpu, factors)
            yield _pipeline(f"emulated {gpu} {name}", profile, power_w, 12 if name == "even" else 24)
    for gpu in ("a100", "a40"):
        for count in (12, 96):
            yield _pipeline(f"emulated {gpu} 7+1", *emulate(gpu, stages["7+1"]), count)


def _from_measured(gpu: str) -> Iterator[Pipeline]:
    profile, power_w = measured_profile(gpu), MEASURED[gpu][1]
    whole = pick_stages(profile, range(8))
    changed = {
        "as measured": (profile, (12, 24, 48, 96)),
        "1 %": (scale_stages(whole, 0.99, 1.01, 1), (12, 96)),
        "3 %": (scale_stages(whole, 0.97, 1.03, 2), (12, 24, 96)),
        "0.8..1.25": (scale_stages(whole, 0.8, 1.25, 3), (12, 96)),
        "heavy head": (pick_stages(profile, range(8), [1.0] * 7 + [1.3]), (12, 48)),
        "7+1": (pick_stages(profile, [1] * 7 + [7]), (12, 96)),
        "reversed": (pick_stages(profile, range(7, -1, -1)), (24,)),
        "shuffled": (pick_stages(profile, [3, 7, 0, 5, 1, 6, 2, 4]), (12,)),
        "2 stages": (pick_stages(profile, [0, 7]), (12,)),
        "4 stages": (pick_stages(profile, [0, 1, 2, 7]), (12,)),
        "one stage": (pick_stages(profile, [3] * 8), (12, 24)),
        "noise": (add_noise(whole, 0.01, 4), (12, 24)),
        "30 MHz": (coarsen(whole, 2), (12,)),
        "60 MHz": (coarsen(whole, 4), (12, 24)),
        "16 stages": (scale_stages(pick_stages(profile, [*range(8), *range(8)]), 0.97, 1.03, 6), (24,)),
    }
    for name, (pipeline, counts) in changed.items():
        for count in counts:
            yield _pipeline(f"{gpu} {name}", pipeline, power_w, count)
    uneven = changed["3 %"][0]
    for schedule in ("gpipe", "interleaved_1f1b", "zbv", "envpipe"):
        yield _pipeline(f"{gpu} 3 % {schedule}", uneven, power_w, 12, schedule)
    yield _pipeline(f"{gpu} 3 % gpipe", uneven, power_w, 24, "gpipe")


def _between(least: float, most: float, number: int, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [rng.uniform(least, most) for _ in range(number)]


def _pipeline(name: str, profile: Profile, power_w: float, num_microbatches: int, schedule: str = "1f1b") -> Pipeline:
    stages_per_rank = SCHEDULES[schedule].stages_per_rank
    order = make_schedule(schedule, profile.num_stages // stages_per_rank, num_microbatches, stages_per_rank)
    return Pipeline(f"{name} {profile.num_stages}x{num_microbatches}", profile, order, power_w)
