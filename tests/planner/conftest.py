from pathlib import Path

import pytest

from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.planner import InstructionProfile, Profile, plan_frontier

MEASURED = Path(__file__).resolve().parents[2].parent / "shared" / "profiles"


def physical_profile(work, clocks=tuple(range(1400, 790, -50)), knee=900, static_w=90.0, dynamic_w=310.0):
    """A profile by the textbook: t = compute/f + memory, power = static + dynamic f V(f)^2 with a voltage knee."""
    top = clocks[0]
    instructions = {}
    for stage, seconds in enumerate(work):
        for kind, factor in ((InstructionType.FORWARD, 1.0), (InstructionType.BACKWARD, 1.9)):
            times = tuple(factor * seconds * (0.8 * top / clock + 0.2) for clock in clocks)
            volts = [max(clock, knee) / top for clock in clocks]
            powers = [static_w + dynamic_w * clock / top * v * v for clock, v in zip(clocks, volts, strict=True)]
            energies = tuple(power * time for power, time in zip(powers, times, strict=True))
            instructions[stage, kind] = InstructionProfile(clocks, times, energies, tuple(70.0 for _ in clocks))
    return Profile(instructions)


@pytest.fixture(scope="session")
def make_profile():
    return physical_profile


@pytest.fixture(scope="session")
def profile():
    return physical_profile([0.020, 0.024, 0.021, 0.028])


@pytest.fixture(scope="session")
def frontier(profile):
    return plan_frontier(profile, num_microbatches=6, num_plans=12)


@pytest.fixture(scope="session")
def measured():
    """Path of a measured profile by file name; the test is skipped where it is not there."""

    def find(name):
        if not (MEASURED / name).exists():
            pytest.skip(f"the measured profile {name} is not beside the project")
        return MEASURED / name

    return find
