"""The numbers in frontier.csv, recomputed from plan files and profile by code that uses nothing of the planner."""

import ast
import csv
import random
import re
from functools import cache

import pytest

from lightning_pfo.planner import plan_frontier, save_frontier, write_profile

A100 = "gpt3-175b_a100-sxm_bf16.csv"


def recompute(plan_file, profile_file, power_w):
    """Time and energy of a 1F1B plan file in Zeus form: the longest path by recursion, the energy summed by state."""
    with profile_file.open(newline="") as lines:
        measured = {
            (int(row["stage"]), row["instruction"], int(row["frequency"])): (float(row["time"]), float(row["energy"]))
            for row in csv.DictReader(lines)
        }
    rows = ast.literal_eval(plan_file.read_text())
    cost = {}  # (stage, name, microbatch) -> (time, energy)
    before = {}  # what runs before it on the same stage
    for stage, row in enumerate(rows):
        seen, last = {"forward": 0, "backward": 0}, None
        for name, mhz in row:
            key = (stage, name, seen[name])
            seen[name] += 1
            cost[key], before[key], last = measured[stage, name, mhz], last, key

    @cache
    def finish(key):
        stage, name, microbatch = key
        neighbour = (stage + (-1 if name == "forward" else 1), name, microbatch)
        starts = [finish(other) for other in (before[key], neighbour) if other in cost]
        return max(starts, default=0.0) + cost[key][0]

    time = max(map(finish, cost))
    computing = sum(seconds for seconds, _ in cost.values())
    return time, sum(joules for _, joules in cost.values()) + power_w * (len(rows) * time - computing)


def check(folder, profile_file, power_w):
    with (folder / "frontier.csv").open(newline="") as lines:
        plans = list(csv.DictReader(lines))
    files = sorted(path.name for path in folder.glob("freqs_pipeline_*.py"))
    assert files == [f"freqs_pipeline_{number:05d}.py" for number in range(len(plans))]
    assert [int(plan["plan"]) for plan in plans] == list(range(len(plans)))
    for plan, name in zip(plans, files, strict=True):
        time_s, energy_j = recompute(folder / name, profile_file, power_w)
        assert float(plan["iteration_time_s"]) == pytest.approx(time_s, rel=1e-9)
        assert float(plan["iteration_energy_j"]) == pytest.approx(energy_j, rel=1e-9)
        assert float(plan["lower_bound_j"]) <= energy_j * (1 + 1e-9)
        assert float(plan["gap"]) == pytest.approx(energy_j / float(plan["lower_bound_j"]) - 1, abs=1e-9)
        said = re.match(
            r"# Plan (\d+): iteration time ([\d.]+) s, iteration energy ([\d.]+) J", (folder / name).read_text()
        )
        assert [float(number) for number in said.groups()] == pytest.approx(
            [int(plan["plan"]), time_s, energy_j], abs=1e-3
        )
    return len(plans)


@pytest.mark.parametrize("seed", range(3))
def test_the_files_of_a_noisy_profile_say_what_anybody_can_recompute(tmp_path, seed):
    draw = random.Random(seed)
    rows = []
    for stage in range(3):
        for kind, seconds in (("forward", 0.03), ("backward", 0.055)):
            for mhz in range(1410, 800, -90):  # noise lets slower clocks be faster, and energies be of any shape
                time = seconds * (0.7 * 1410 / mhz + 0.3) * draw.uniform(0.95, 1.05)
                energy = time * (90 + 300 * (mhz / 1410) ** 2.2) * draw.uniform(0.95, 1.05)
                rows.append({"stage": stage, "instruction": kind, "frequency": mhz, "time": time, "energy": energy})
    write_profile(tmp_path / "profile.csv", rows)
    frontier = plan_frontier(tmp_path / "profile.csv", num_microbatches=5, p2p_blocking_power_w=70, num_plans=12)
    save_frontier(frontier, tmp_path / "plans")
    assert check(tmp_path / "plans", tmp_path / "profile.csv", 70) > 5


def test_the_files_of_a_measured_profile_say_what_anybody_can_recompute(measured, tmp_path):
    deadlines_s = [2.84, 2.87, 3.0]
    frontier = plan_frontier(measured(A100), num_microbatches=12, p2p_blocking_power_w=85, deadlines_s=deadlines_s)
    save_frontier(frontier, tmp_path)
    assert check(tmp_path, measured(A100), 85) > 40
