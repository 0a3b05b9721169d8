"""What is decided from numbers: objectives, stragglers, fallbacks, what is kept."""

import json
import math
from dataclasses import replace

import pytest

from lightning_pfo.core.errors import ConfigurationError, PlanError
from lightning_pfo.core.frequency_plan import uniform_plan
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.listeners.meters.iterations import IterationMeasurement
from lightning_pfo.listeners.optimizer.choosing.decision import with_waiting_power
from lightning_pfo.listeners.optimizer.choosing.objectives import EnergyPrice, JobDeadline, Moment, Selection
from lightning_pfo.listeners.optimizer.ledger import Cost, Ledger, State
from lightning_pfo.listeners.optimizer.memory import FILE_NAME, Keeper, Memory, load_memory, memory_of
from lightning_pfo.listeners.optimizer.replicas import Busy, t_prime_of
from lightning_pfo.listeners.optimizer.settings import OptimizerSettings
from lightning_pfo.listeners.optimizer.verifying.trial import window_steps
from lightning_pfo.listeners.profile_row import ProfileRow
from lightning_pfo.planner.adaptive.verification import faster_by, lateness_s, verified
from lightning_pfo.planner.adaptive.windows import Windows
from lightning_pfo.planner.settings import PlanSettings
from tests.planner.conftest import frontier, profile  # noqa: F401


def row(stage=0, clock_mhz=1410, power_w=70.0, **changes):
    return ProfileRow(stage, "forward", clock_mhz, 0.05, 20.0, 0.0, 0.1, 4, power_w, **changes)


# ---- objectives ----


def test_a_deadline_of_the_job_spends_its_slack(frontier):  # noqa: F811
    top_s, least_s = frontier.baseline.iteration_time_s, frontier.least_energy.iteration_time_s
    for share in (0.0, 0.3, 0.7, 1.0):
        each_s = top_s + share * (least_s - top_s)
        plan = JobDeadline(1000 + each_s * 500 / 0.99).plan_of(frontier, Moment(1000, 500))
        fitting = [one for one in frontier.plans if one.iteration_time_s <= each_s * (1 + 1e-9)]
        assert plan.iteration_energy_j == min(one.iteration_energy_j for one in fitting)
    assert JobDeadline(1000).plan_of(frontier, Moment(2000, 500)) is frontier.fastest  # too late anyway
    assert JobDeadline(9e9).plan_of(frontier, Moment(2000, None)).iteration_time_s <= top_s * (1 + 1e-9)


def test_dear_energy_is_saved_and_cheap_energy_is_spent(frontier):  # noqa: F811
    objective = EnergyPrice(lambda now_s: 0.0 if now_s < 100 else 1e6, per_gpu_hour=2.0)
    assert objective.plan_of(frontier, Moment(0)) is frontier.fastest
    assert objective.plan_of(frontier, Moment(200)) is frontier.least_energy


def test_an_expression_is_checked_before_anything_runs():
    with pytest.raises(PlanError, match="Cannot select a plan by"):
        Selection("no_slowdwn")
    with pytest.raises(PlanError, match="Cannot select a plan by"):
        OptimizerSettings(select="fast")
    with pytest.raises(ConfigurationError, match="tolerance is a share above 0"):
        OptimizerSettings(tolerance=0)
    with pytest.raises(ConfigurationError, match="its policy is ours; got policy='perseus'"):
        OptimizerSettings(planning=PlanSettings(policy="perseus"))


# ---- stragglers ----


def test_who_waits_follows_the_slowest_and_nobody_waits_for_those_who_wait():
    slow = [Busy(0, 1.0, 1.0, 1.0), Busy(1, 1.3, 1.0, 1.0)]
    assert t_prime_of(0, slow) == 1.3
    assert t_prime_of(1, slow) is None
    following = [Busy(0, 1.29, 1.3, 1.0), Busy(1, 1.3, 1.0, 1.0)]
    assert t_prime_of(0, following) == 1.3
    recovered = [Busy(0, 1.29, 1.3, 1.0), Busy(1, 1.0, 1.0, 1.0)]
    assert t_prime_of(1, recovered) is None
    assert t_prime_of(0, recovered) is None
    noise = [Busy(0, 1.0, 1.0, 1.0), Busy(1, 1.01, 1.0, 1.0)]
    assert t_prime_of(0, noise) is None


def test_a_scheduler_may_know():
    told = [Busy(0, 1.0, 1.0, 1.0, t_prime_s=1.2), Busy(1, 1.0, 1.0, 1.0)]
    assert [t_prime_of(replica, told) for replica in (0, 1)] == [1.2, 1.2]


# ---- verification ----


def windows_of(plan_s, pairs=6):
    windows = Windows(pairs, 2, 1)
    measured = [
        IterationMeasurement(
            100 + step, plan_s if windows.place_of(step)[1] else 1.0, 80.0 if windows.place_of(step)[1] else 100.0
        )
        for step in range(windows.num_steps)
    ]
    return verified(windows, 100, measured, {})


def test_windows_are_compared_in_pairs():
    found = windows_of(1.02)
    assert found.saving_percent == pytest.approx(20)
    assert found.slowdown_percent == pytest.approx(2)
    assert found.saving_interval_percent == pytest.approx((20, 20))
    assert len(found.and_more(windows_of(1.02, 2)).savings_percent) == 8
    assert verified(Windows(2, 2, 1), 0, [], {}) is None


def test_a_late_plan_falls_back_by_as_much_as_it_is_late(frontier):  # noqa: F811
    plan = frontier.least_energy
    top_s = frontier.baseline.iteration_time_s
    promised = plan.iteration_time_s / top_s
    assert lateness_s(frontier, plan.iteration_time_s, windows_of(promised + 0.004), 0.005) == 0
    late_s = lateness_s(frontier, plan.iteration_time_s, windows_of(promised + 0.02), 0.005)
    assert late_s == pytest.approx(0.02 * top_s)
    faster = faster_by(frontier, plan, late_s)
    assert faster.iteration_time_s <= plan.iteration_time_s - 0.02 * top_s
    between = [
        one
        for one in frontier.plans
        if faster.iteration_time_s < one.iteration_time_s < plan.iteration_time_s - 0.02 * top_s
    ]
    assert between == []
    assert faster_by(frontier, plan, plan.iteration_time_s - faster.iteration_time_s) is faster
    assert faster_by(frontier, plan, 0.0) is plan
    assert faster_by(frontier, frontier.fastest, 1.0) is frontier.baseline


def test_windows_are_longer_where_counters_tick():
    settings = OptimizerSettings()
    assert window_steps(settings, 0.0, 0.5) == settings.window_steps
    assert window_steps(settings, 0.1, 0.5) == 1 + 10
    assert window_steps(settings, 0.1, 4.0) == 1 + 2
    assert window_steps(settings, 0.1, 0.001) == 40
    assert window_steps(OptimizerSettings(window_steps=60), 0.1, 0.001) == 60


def noted(ledger, state, time_s, energy_j, plan=None):
    iteration = len(ledger.steps)
    ledger.begin(iteration, state, plan, 1410)
    ledger.add(IterationMeasurement(iteration, time_s, energy_j))


def test_what_is_spent_is_what_other_clocks_take_beyond_the_mean_at_the_top_clocks():
    schedule = make_schedule("1f1b", 2, 2)
    low, top = uniform_plan(schedule, [900, 900]), uniform_plan(schedule, [1410, 1410])
    ledger = Ledger()
    noted(ledger, State.WARM_UP, 60.0, 900.0)  # the first: kernels are chosen
    assert (ledger.knows_top, ledger.saved_j) == (False, 0)
    noted(ledger, State.WARM_UP, 0.8, 96.0)  # a lucky one
    noted(ledger, State.MEASURE, 1.3, 90.0, low)
    assert ledger.measuring == Cost(1, pytest.approx(0.5), pytest.approx(-6.0))
    noted(ledger, State.MEASURE, 2.0, 300.0)  # clocks settle, so that it says nothing
    assert ledger.measuring == Cost(2, pytest.approx(0.5), pytest.approx(-6.0))
    noted(ledger, State.MEASURE, 1.2, 104.0)
    assert ledger.measuring == Cost(3, pytest.approx(0.3), pytest.approx(-10.0))  # 1 s and 100 J at the top clocks
    assert ledger.measuring_slowdown == pytest.approx(0.1)
    for n in range(100):  # scatters as it may: this costs nothing, so that measuring goes on some time
        noted(ledger, State.MEASURE, 1.0 + 0.3 * (-1) ** n, 100.0 - 20 * (-1) ** n)
    assert ledger.measuring == Cost(103, pytest.approx(0.3), pytest.approx(-10.0))
    assert ledger.measuring_slowdown == pytest.approx(0.3 / 103)
    noted(ledger, State.HOLD, 1.0, 85.0, low)
    assert ledger.saved_j == pytest.approx(25.0)
    noted(ledger, State.HOLD, 5.0, 500.0, top)  # a plan of the top clocks is no other
    assert ledger.saved_j == pytest.approx(25.0)
    ledger.forget_top()
    assert (ledger.saved_j, ledger.measuring) == (pytest.approx(25.0), Cost())


# ---- what is kept ----


def test_what_is_kept_comes_back_and_counts_once(tmp_path):
    memory = Memory({"gpu": "A100"}, latencies_s=((1410, 900, (0.005, 0.006)),), iterations=3, cost_j=-2.5)
    memory = memory.with_rows([row(), row(clock_mhz=900, power_w=math.nan, transfer_time=0.001, flags="power_cap")])
    memory = memory.with_rows([row(clock_mhz=900, power_w=math.nan)])
    assert len(memory.rows) == 2
    memory.save(tmp_path / FILE_NAME)
    again = load_memory(tmp_path / FILE_NAME)
    assert again.as_dict() == memory.as_dict() == memory_of(json.loads(json.dumps(memory.as_dict()))).as_dict()
    assert again.without_stages([0]).rows == ()
    assert math.isnan(again.rows[1].p2p_blocking_power_w)


@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"version": 9}', '{"version": 1, "fingerprint": {}}', '{"version": 1, "fingerprint": 3}']
)
def test_a_damaged_file_is_refused_and_measured_anew(tmp_path, damage):
    (tmp_path / FILE_NAME).write_text(damage)
    with pytest.raises(ConfigurationError, match="state"):
        load_memory(tmp_path / FILE_NAME)
    kept, refusal = Keeper(tmp_path, None, None).recall({})
    assert kept is None
    assert "optimizer's state" in refusal


def test_the_cache_is_found_by_fingerprint_and_differences_are_named(tmp_path):
    job = {"gpu": "A100", "microbatches": "8"}
    Keeper(tmp_path / "a", tmp_path / "cache", None).save(Memory(job, (row(),), is_complete=True))
    kept, refusal = Keeper(tmp_path / "b", tmp_path / "cache", None).recall(job)
    assert (len(kept.rows), kept.is_complete, refusal) == (1, True, None)
    kept, refusal = Keeper(tmp_path / "a", tmp_path / "cache", None).recall(job | {"microbatches": "16"})
    assert kept is None
    assert "microbatches was 8 and is 16" in refusal


def test_of_several_the_most_complete_is_taken(tmp_path):
    job = {"gpu": "A100"}
    Keeper(tmp_path, None, None).save(Memory(job, (row(), row(1))))
    given = Memory(job, (row(),), is_complete=True).as_dict()
    assert Keeper(tmp_path, None, given).recall(job)[0].is_complete


def test_where_nobody_waited_power_follows_from_other_clocks():
    powers = {1410: 80.0, 1200: 74.0, 900: 66.0}
    rows = [row(clock_mhz=mhz, power_w=power) for mhz, power in powers.items()]
    filled = with_waiting_power([*rows, row(1, 1050, math.nan)])
    assert 66 < filled[-1].p2p_blocking_power_w < 74
    assert filled[:-1] == rows
    assert with_waiting_power([replace(rows[0], p2p_blocking_power_w=math.nan)])[0].p2p_blocking_power_w != 0
