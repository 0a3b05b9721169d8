"""The scan of a job, against measurements that a profile gives."""

import pytest

from lightning_pfo.core.errors import PlanError
from lightning_pfo.planner import PlanSettings, read_profile
from lightning_pfo.server.jobs.answers import ConflictError
from lightning_pfo.server.jobs.messages import JobInfo, RankInfo, Report
from lightning_pfo.server.jobs.online import OnlineDirector, clocks_to_scan
from lightning_pfo.server.jobs.registry import JobRegistry
from lightning_pfo.server.jobs.store import IN_MEMORY, JobStore
from tests.planner.conftest import physical_profile

NUM_MICROBATCHES, WAITING_W = 3, 70.0
CLOCKS_MHZ = tuple(range(1410, 400, -60))
TRUTH = physical_profile([0.020, 0.028], clocks=CLOCKS_MHZ, knee=1000)


def start(folder, **options):
    director = OnlineDirector(
        folder,
        schedule="1f1b",
        num_microbatches=NUM_MICROBATCHES,
        settings=PlanSettings(num_plans=4, effort="fast"),
        select="no_slowdown",
        clock_step_mhz=60,
        **options,
    )
    registry = JobRegistry(director, JobStore(IN_MEMORY), now=lambda: 0.0)
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
    return Report(rank, (iteration_s,) * 2, (total_j,) * 2, times_s, energies_j if with_energies else {}, version)


def train(registry, job_id, rounds, **options):
    """Returns the labels of the plans, one per round."""
    job, labels = registry.jobs[job_id], []
    for _ in range(rounds):
        labels.append(job.plan.label)
        for rank in range(2):
            _, plan = registry.fetch(job_id, rank)
            registry.report(job_id, report_of(rank, plan.rows[rank][0][1], plan.version, **options))
        if job_id in registry.due:
            registry.planned(job_id, registry.due[job_id]())
        if job.plan.purpose == "plan":
            break
    return labels


def test_a_scan_stops_behind_the_valleys_and_measures_what_is_true(tmp_path):
    registry, job_id = start(tmp_path)
    labels = train(registry, job_id, 40)
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
        registry.report(job_id, Report(rank, (0.5,), (1.0,), {}, {}, version))
    assert registry.jobs[job_id].plan.version == version  # held
    assert registry.jobs[job_id].measured[-1]["purpose"] == "plan"  # verified


def test_without_energies_or_a_plan_training_goes_on_at_the_top_clocks(tmp_path):
    registry, job_id = start(tmp_path)
    assert train(registry, job_id, 1, with_energies=False) == ["1410 MHz"]
    plan = registry.jobs[job_id].plan
    assert "rank 0 reports no time_breakdown and energy_breakdown" in plan.label
    assert {mhz for row in plan.rows for _, mhz in row} == {1410}

    def refuse(*_, **__):
        raise PlanError("No plan today.")

    registry, job_id = start(tmp_path, plan=refuse)
    train(registry, job_id, 40)
    assert registry.jobs[job_id].plan.label.endswith("No plan today.")


def test_what_cannot_be_scanned_is_refused(tmp_path):
    registry, _ = start(tmp_path)
    with pytest.raises(ConflictError, match="num_microbatches >= num_stages"):
        registry.register_job(JobInfo(4, 1, 1, 4))
    assert clocks_to_scan([300, 1410, 1400, 1340, 0], 60) == [1410, 1340, 300]
