"""The scan of a job, against measurements that a profile gives."""

import pytest

from lightning_pfo.core.errors import PlanError
from lightning_pfo.planner import PlanSettings, load_frontier, read_profile, select_plan, simulate
from lightning_pfo.planner.adaptive.choice import bracket
from lightning_pfo.server.jobs.answers import ConflictError
from lightning_pfo.server.jobs.messages import JobInfo, RankInfo, Report
from lightning_pfo.server.jobs.online import OnlineDirector, clocks_to_scan
from lightning_pfo.server.jobs.registry import JobRegistry
from lightning_pfo.server.jobs.store import IN_MEMORY, JobStore
from tests.planner.conftest import physical_profile

NUM_MICROBATCHES, WAITING_W = 3, 70.0
CLOCKS_MHZ = tuple(range(1410, 400, -60))
TRUTH = physical_profile([0.020, 0.028], clocks=CLOCKS_MHZ, knee=1000)


def start(folder, *, select="no_slowdown", store=None, job_id=None, **options):
    director = OnlineDirector(
        folder,
        schedule="1f1b",
        num_microbatches=NUM_MICROBATCHES,
        settings=PlanSettings(num_plans=8, effort="fast"),
        select=select,
        clock_step_mhz=60,
        **options,
    )
    registry = JobRegistry(director, store or JobStore(IN_MEMORY), now=lambda: 0.0)
    if job_id is not None:
        return registry, job_id
    job_id = registry.register_job(JobInfo(2, 1, 1, 2))
    for rank in range(2):
        registry.register_rank(job_id, RankInfo(rank, 0, rank, 0, tuple(range(1410, 200, -15))))
    return registry, job_id


def report_of(rank, clock_mhz, version, iteration_s=0.5, with_energies=True):
    """What a rank of the profile would tell of two iterations at one clock."""
    times_s, energies_j, total_s, total_j = {}, {}, 0.0, 0.0
    for (stage, kind), measured in TRUTH.instructions.items():
        if stage == rank:
            time_s, energy_j = measured.at(clock_mhz)
            times_s[kind.profile_name] = [[time_s] * NUM_MICROBATCHES] * 2
            energies_j[kind.profile_name] = [[energy_j] * NUM_MICROBATCHES] * 2
            total_s += NUM_MICROBATCHES * time_s
            total_j += NUM_MICROBATCHES * energy_j
    total_j += WAITING_W * (iteration_s - total_s)
    stderrs_j = dict.fromkeys(energies_j, 0.0)
    told_j = energies_j if with_energies else {}
    return Report(rank, (iteration_s,) * 2, (total_j,) * 2, times_s, told_j, stderrs_j, version)


def train(registry, job_id, rounds=100, *, late=1.0, **options):
    """Returns the plans, one per round.

    Args:
        late: Iterations under a plan take so many times as long as predicted.
    """
    job, plans = registry.jobs[job_id], []
    for _ in range(rounds):
        plan = job.plan
        plans.append(plan)
        for rank in range(2):
            registry.fetch(job_id, rank)
            if plan.purpose == "scan":
                report = report_of(rank, plan.rows[rank][0][1], plan.version, **options)
            else:
                report = window_report(rank, plan, late, **options)
            registry.report(job_id, report)
        if job_id in registry.due:
            registry.planned(job_id, registry.due[job_id]())
        if job.plan.purpose == "plan":
            break
    return plans


def window_report(rank, plan, late=1.0, with_energies=True):
    """What is told of an iteration that is as predicted, but for what is late; each rank uses half of the energy."""
    time_s, energy_j = plan.iteration_time_s, plan.iteration_energy_j
    if any(mhz != 1410 for row in plan.rows for _, mhz in row):
        time_s *= late
    energies_j = (energy_j / 2,) * 2 if with_energies else ()
    return Report(rank, (time_s,) * 2, energies_j, version=plan.version)


def labels_of(plans, purpose):
    return [plan.label for plan in plans if plan.purpose == purpose]


def test_a_scan_stops_behind_the_valleys_and_measures_what_is_true(tmp_path):
    registry, job_id = start(tmp_path)
    plans = train(registry, job_id)
    labels = labels_of(plans, "scan")
    assert labels == [f"{mhz} MHz" for mhz in CLOCKS_MHZ[: len(labels)]]
    energies_j = [measured.energies_j for measured in TRUTH.instructions.values()]
    least = max(row.index(min(row)) for row in energies_j)
    assert len(labels) == least + 1 + 5 < len(CLOCKS_MHZ)  # five rises of the last instruction to reach its valley
    profile = read_profile(tmp_path / job_id / "profile.csv")
    for key, measured in profile.instructions.items():
        for clock_mhz in measured.clocks_mhz:
            assert measured.at(clock_mhz) == pytest.approx(TRUTH.instructions[key].at(clock_mhz))
        assert measured.p2p_blocking_powers_w == pytest.approx([WAITING_W] * len(measured.clocks_mhz))
    plan = registry.jobs[job_id].plan
    assert (plan.purpose, plan.label) == ("plan", "no_slowdown")
    assert plan.saving_percent > 1
    assert registry.operate(job_id, select="least_energy").iteration_energy_j < plan.iteration_energy_j
    version = registry.jobs[job_id].plan.version
    for rank in range(2):
        registry.report(job_id, Report(rank, (0.5,), (1.0,), version=version))
    assert registry.jobs[job_id].plan.version == version  # held


def test_a_plan_is_tried_in_windows_in_turn_before_it_is_held(tmp_path):
    registry, job_id = start(tmp_path)
    plans = train(registry, job_id)
    frontier = load_frontier(tmp_path / job_id)
    chosen, windows = select_plan(frontier, "no_slowdown"), [plan for plan in plans if plan.purpose == "verify"]
    rows = {False: frontier.baseline.clocks_mhz, True: chosen.clocks_mhz}
    clocks_mhz = [tuple(tuple(mhz for _, mhz in row) for row in plan.rows) for plan in windows]
    assert clocks_mhz == [rows[is_plan] for is_plan in (False, True, True, False) * 3]
    held = registry.jobs[job_id].plan
    assert tuple(tuple(mhz for _, mhz in row) for row in held.rows) == chosen.clocks_mhz
    saving = 100 * (1 - chosen.iteration_energy_j / frontier.baseline.iteration_energy_j)
    slowdown = 100 * (chosen.iteration_time_s / frontier.baseline.iteration_time_s - 1)
    assert held.verified["pairs"] == 6
    assert held.verified["saving_percent"] == pytest.approx(saving)
    assert held.verified["saving_interval_percent"] == pytest.approx([saving, saving])
    assert held.verified["slowdown_interval_percent"] == pytest.approx([slowdown, slowdown])


@pytest.mark.parametrize(("late", "label"), [(1.03, "1.1x but faster"), (1.5, "top clocks, as 1.1x took")])
def test_a_plan_that_is_late_makes_way_for_a_faster_one(tmp_path, late, label):
    registry, job_id = start(tmp_path, select="1.1x")
    train(registry, job_id, late=late)
    held = registry.jobs[job_id].plan
    assert held.label.startswith(label), held.label
    top_s = load_frontier(tmp_path / job_id).baseline.iteration_time_s
    if held.verified:  # as late as the one before, and within what was asked for
        assert held.iteration_time_s * late <= 1.105 * top_s
        assert held.verified["slowdown_percent"] == pytest.approx(100 * (late * held.iteration_time_s / top_s - 1))


def test_a_server_that_is_started_anew_goes_on_with_the_next_window(tmp_path):
    store = JobStore(IN_MEMORY)
    registry, job_id = start(tmp_path, store=store)
    plans = train(registry, job_id, rounds=20)
    assert plans[-1].purpose == "verify"
    registry, _ = start(tmp_path, store=store, job_id=job_id)
    plans += train(registry, job_id)
    assert labels_of(plans, "verify") == [
        f"window {window + 1} of 12: {'no_slowdown' if window % 4 in (1, 2) else 'top clocks'}" for window in range(12)
    ]
    assert registry.jobs[job_id].plan.verified["pairs"] == 6


def test_the_adaptive_profiler_measures_a_few_clocks_and_plans_as_well(tmp_path):
    scanning, scanned = start(tmp_path / "scan")
    num_scanned = len(labels_of(train(scanning, scanned), "scan"))
    registry, job_id = start(tmp_path / "adaptive", is_adaptive=True)
    plans = train(registry, job_id)
    measured = [tuple(row[0][1] for row in plan.rows) for plan in plans if plan.purpose == "scan"]
    assert measured[:4] == [(mhz, mhz) for mhz in bracket(CLOCKS_MHZ)]
    assert len(measured) < num_scanned
    held, best = registry.jobs[job_id].plan, scanning.jobs[scanned].plan
    assert held.verified["pairs"] == 6
    rows_mhz = tuple(tuple(mhz for _, mhz in row) for row in held.rows)
    true = simulate(TRUTH, load_frontier(tmp_path / "scan" / scanned).schedule, rows_mhz, [WAITING_W] * 2)
    assert true.iteration_time_s <= 1.005 * best.iteration_time_s
    assert true.iteration_energy_j <= 1.005 * best.iteration_energy_j


def test_without_energies_or_a_plan_training_goes_on_at_the_top_clocks(tmp_path):
    registry, job_id = start(tmp_path)
    assert labels_of(train(registry, job_id, with_energies=False), "scan") == ["1410 MHz"]
    plan = registry.jobs[job_id].plan
    assert "rank 0 reports no time_breakdown and energy_breakdown" in plan.label
    assert {mhz for row in plan.rows for _, mhz in row} == {1410}

    def refuse(*_, **__):
        raise PlanError("No plan today.")

    registry, job_id = start(tmp_path, plan=refuse)
    train(registry, job_id)
    assert registry.jobs[job_id].plan.label.endswith("No plan today.")


def test_what_cannot_be_scanned_is_refused(tmp_path):
    registry, _ = start(tmp_path)
    with pytest.raises(ConflictError, match="num_microbatches >= num_stages"):
        registry.register_job(JobInfo(4, 1, 1, 4))
    assert clocks_to_scan([300, 1410, 1400, 1340, 0], 60) == [1410, 1340, 300]
