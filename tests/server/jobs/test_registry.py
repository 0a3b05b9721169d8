import json

import pytest

from lightning_pfo.server.jobs.answers import UnavailableError
from lightning_pfo.server.jobs.director import SolutionDirector
from lightning_pfo.server.jobs.dump import Dump
from lightning_pfo.server.jobs.messages import JobInfo, RankInfo, Report
from lightning_pfo.server.jobs.registry import JobLimits, JobRegistry
from lightning_pfo.server.jobs.store import IN_MEMORY, JobStore

CLOCKS_MHZ = (1410, 1200, 1100, 1000, 900)


def start(tmp_path, rows, **options):
    """A registry with one plan, whose row r has the clock of place or rank r everywhere."""
    path = tmp_path / "plan.py"
    path.write_text(repr([[("forward", CLOCKS_MHZ[row]), ("backward", CLOCKS_MHZ[row])] for row in range(rows)]))
    clock = iter(range(10_000))
    store = JobStore(IN_MEMORY)
    return JobRegistry(SolutionDirector(path), store, now=lambda: float(next(clock)), **options)


def register(registry):
    """Two replicas of two stages, the ranks of a replica together."""
    job_id = registry.register_job(JobInfo(2, 2, 1, 4))
    for rank in range(4):
        registry.register_rank(job_id, RankInfo(rank, rank // 2, rank % 2, 0, CLOCKS_MHZ))
    return job_id


@pytest.mark.parametrize(("rows", "expected"), [(2, [0, 1, 0, 1]), (4, [0, 1, 2, 3])])
def test_rows_are_for_places_or_for_ranks(tmp_path, rows, expected):
    registry = start(tmp_path, rows)
    job_id = register(registry)
    for rank in range(4):
        info, plan = registry.fetch(job_id, rank)
        assert plan.row_of(info)[0] == ("forward", CLOCKS_MHZ[expected[rank]])


def test_files_are_dumped_as_by_zeus(tmp_path):
    registry = start(tmp_path, 2, dump=Dump(tmp_path / "dump"))
    job_id = register(registry)
    for rank in range(4):
        registry.report(job_id, Report(rank, (1.5,), (30.0 + rank,), {"forward": [[0.5]]}, {}))
    folder = tmp_path / "dump" / job_id
    assert sorted(path.name for path in folder.iterdir()) == ["0.prof.json", "0.sched.json", "ranks.json"]
    ranks = json.loads((folder / "ranks.json").read_text())
    assert ranks[3] == {
        "rank": 3, "dp_rank": 1, "pp_rank": 1, "tp_rank": 0, "available_frequencies": list(CLOCKS_MHZ),
    }  # fmt: skip
    plans = json.loads((folder / "0.sched.json").read_text())
    assert plans[1] == {"rank": 1, "frequencies": [["forward", 1200], ["backward", 1200]]}
    assert json.loads((folder / "0.prof.json").read_text())[2] == {
        "rank": 2, "iter_time": [1.5], "iter_energy": [32.0], "time_breakdown": {"forward": [[0.5]]},
        "energy_breakdown": {},
    }  # fmt: skip


def test_there_are_only_so_many_jobs_and_silent_ones_make_room(tmp_path):
    registry = start(tmp_path, 2, limits=JobLimits(most_jobs=2, idle_s=1000.0, silence_s=5.0))
    asking, quiet = register(registry), register(registry)
    with pytest.raises(UnavailableError, match="at most 2 jobs"):
        register(registry)
    for rank in range(4):
        registry.poll(asking, rank, 0, 0, 1)
    for _ in range(5):
        registry.seconds_since(registry.jobs[quiet])  # time passes
    assert registry.sweep() == [asking]  # whose ranks would have asked; the other one's never do
    register(registry)
