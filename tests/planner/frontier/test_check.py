"""Whether altered times and energies are found, and predictions of many plans at once are those of the simulation."""

import json
import math
import random
from dataclasses import replace

import pytest

from lightning_pfo.core.errors import PlanError
from lightning_pfo.core.frequency_plan import FrequencyPlan, WaitClock
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner import load_frontier, plan_frontier, save_frontier, simulate_plan
from lightning_pfo.planner.pipeline.predictions import predict_plans
from lightning_pfo.planner.profile.blocking_power import BlockingPower

FORMS = {
    "plain": {},
    "power by clock": {"p2p_blocking_power_w": {1400: 90, 800: 60}},
    "dwell": {"least_dwell_s": 0.05},
    "latency": {"switch_latency_s": 0.005, "p2p_blocking_power_w": {1400: 90, 800: 60}},
}


@pytest.fixture(scope="module", params=FORMS)
def saved(request, make_profile, tmp_path_factory):
    frontier = plan_frontier(make_profile([0.03, 0.05]), num_microbatches=4, num_plans=4, **FORMS[request.param])
    folder = tmp_path_factory.mktemp("plans")
    save_frontier(frontier, folder)
    return frontier, json.loads((folder / "frontier.json").read_text())


@pytest.mark.parametrize("factor", [0.5, 0.999999, 1.000001, 2.0])
@pytest.mark.parametrize(
    ("name", "message"),
    [("iteration_time_s", "Iteration times are the longest path"), ("iteration_energy_j", "Iteration energies follow")],
)
@pytest.mark.parametrize("which", ["baseline", "plan"])
def test_an_altered_time_or_energy_is_found(saved, tmp_path, which, name, message, factor):
    frontier, data = saved
    path = tmp_path / "frontier.json"
    path.write_text(json.dumps(data))
    assert load_frontier(path) == frontier
    altered = json.loads(path.read_text())
    record = altered["baseline"] if which == "baseline" else altered["plans"][0]
    record[name] *= factor
    record["lower_bound_j"] = 0.0
    path.write_text(json.dumps(altered))
    with pytest.raises(PlanError, match=rf"{message}|to the fastest|without needing less energy") as error:
        load_frontier(path)
    if which == "baseline":
        assert f"for the baseline, not {record[name]!r}" in str(error.value)


def test_an_altered_measurement_or_clock_is_found(saved, tmp_path):
    path = tmp_path / "frontier.json"
    for change in (
        lambda d: d["profile"][0]["times_s"].__setitem__(0, 0.9),
        lambda d: d["profile"][0]["energies_j"].__setitem__(0, 0.9),
        lambda d: d["plans"][0]["clocks_mhz"][0].__setitem__(0, 1350),
        lambda d: d["p2p_blocking"][0].update(clocks_mhz=[], powers_w=[1.0]),
    ):
        data = json.loads(json.dumps(saved[1]))
        change(data)
        path.write_text(json.dumps(data))
        with pytest.raises(PlanError, match=r"Iteration (times|energies)"):
            load_frontier(path)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zbv", "interleaved_1f1b"])
@pytest.mark.parametrize("seed", range(5))
def test_many_plans_at_once_are_predicted_as_they_are_simulated(make_profile, name, seed):
    draw = random.Random(seed)
    num_ranks = draw.randint(1, 3)
    schedule = make_schedule(name, num_ranks, draw.choice([4, 6]))
    work = [draw.uniform(0.01, 0.03) for _ in range(schedule.num_stages)]
    profile = make_profile(work)
    for stage, kind in {(inst.stage, inst.type) for inst in schedule.instructions} - set(profile.instructions):
        profile = replace(
            profile, instructions={**profile.instructions, (stage, kind): profile.of(stage, InstructionType.FORWARD)}
        )
    blocking = [
        BlockingPower((1400, 1000, 800), tuple(draw.uniform(50, 90) for _ in range(3))) for _ in schedule.orders
    ]
    clocks = profile.of(0, schedule.instructions[0].type).clocks_mhz
    plans = []
    for _ in range(6):
        rows = tuple(tuple(draw.choice(clocks) for _ in order) for order in schedule.orders)
        waits = tuple(
            WaitClock(rank, position, draw.randint(700, 1500), draw.choice([0.0, 0.003, draw.uniform(0, 0.1), 1e9]))
            for rank, order in enumerate(schedule.orders)
            for position in range(len(order) + 1)
            if draw.random() < 0.3
        )
        plans.append(FrequencyPlan(schedule, rows, math.nan, math.nan, wait_clocks=waits))
    times_s, energies_j = predict_plans(profile, schedule, blocking, plans)
    for plan, time_s, energy_j in zip(plans, times_s, energies_j, strict=True):
        timeline = simulate_plan(profile, plan, blocking)
        assert time_s == pytest.approx(timeline.iteration_time_s, rel=1e-12)
        assert energy_j == pytest.approx(timeline.iteration_energy_j, rel=1e-12)
