"""Two replicas, one of which gets slower: the other follows the frontier, and goes back."""

from pathlib import Path

import pytest

from lightning_pfo.planner import load_frontier, select_plan
from tests.launch import of_ranks, run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "stragglers.py"
FACTORS = [1.05, 1.2, 1.5, 1.0]


def test_energy_follows_the_frontier_beside_a_straggler(tmp_path):
    run_script(SCRIPT, tmp_path)
    ranks = of_ranks(tmp_path, 8)
    by_stage = sorted(ranks, key=lambda seen: seen["rank"])
    frontier = load_frontier(tmp_path / "pfo" / "plans")
    own_s = select_plan(frontier, "no_slowdown").iteration_time_s
    top_w = frontier.p2p_blocking_power_w * len(frontier.blocking) / 2  # of one replica that waits
    for number, factor in enumerate(FACTORS):
        of_replicas = [[seen["phases"][number] for seen in by_stage if seen["place"][0] == dp] for dp in (0, 1)]
        for replica, phases in enumerate(of_replicas):
            one = phases[0]
            assert one["factor"] == factor
            is_beside = replica == 0 and factor > 1
            expected = select_plan(frontier, f"T'={one['time_s']}s" if is_beside else "no_slowdown")
            assert one["plan_s"] == pytest.approx(expected.iteration_time_s, rel=2e-3)
            assert one["time_s"] == pytest.approx(factor * own_s, rel=0.002)  # nobody makes it slower still
            if replica == 0:
                energy_j = sum(phase["energy_j"] for phase in phases)
                waiting_w = sum(frontier.blocking[n].at(phase["last_mhz"]) / 2 for n, phase in enumerate(phases))
                predicted_j = one["plan_j"] / 2 + waiting_w * (one["time_s"] - one["plan_s"])
                assert energy_j == pytest.approx(predicted_j, rel=0.01)
                if factor > 1:
                    usual_j = select_plan(frontier, "no_slowdown").iteration_energy_j / 2
                    assert energy_j < 0.98 * (usual_j + top_w * (one["time_s"] - own_s))
