"""A plan on one rank and an emulated GPU, in real time, without a Trainer."""

import pytest

from lightning_pfo.core.events import InstructionWork
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.device import EmulatedGpu, GpuConfig
from lightning_pfo.listeners.planned_run import TOP_CLOCKS, PlannedRun, chosen_plan
from lightning_pfo.planner import plan_frontier, save_frontier
from tests.listeners.fakes import FakeSource


@pytest.mark.parametrize("lead_clocks", [False, True])
def test_clocks_follow_the_plan_and_their_latency_is_reported(lead_clocks, monkeypatch):
    locked, said = [], []
    lock = EmulatedGpu.lock_graphics_clock

    def noting(gpu, clock_mhz):
        locked.append(clock_mhz)
        lock(gpu, clock_mhz)

    monkeypatch.setattr(EmulatedGpu, "lock_graphics_clock", noting)
    source = FakeSource(num_microbatches=2)
    plan = FrequencyPlan(source.schedule, ((1410, 1200, 1305, 1005),), 1.0, 1.0)
    config = GpuConfig(kind="emulated", forward_s=0.03, clock_latency_s=0.004, lead_clocks=lead_clocks)
    with PlannedRun(source, plan, gpu=config, num_gpus=1, report=said.append) as run:
        for _ in range(6):
            source.run_iteration(work=InstructionWork(1e9, 1e6))
            run.measure()
        statistics = run.clock_statistics
    assert set(locked) == {1410, 1200, 1305, 1005}
    assert len(locked) > 8
    assert len(locked) - 1 <= statistics.num_changes <= len(locked)  # the worker may be between lock and count
    assert statistics.latency_s >= 0.004
    assert len(run.measurements) == 5  # the emulated GPU counted work in the first iteration
    assert "clock changes; reached after" in said[-1]


def test_a_plan_is_given_as_itself_or_by_a_frontier_or_its_file_or_as_the_top_clocks(tmp_path):
    (tmp_path / "profile.csv").write_text(
        "stage,instruction,frequency,time,energy\n"
        "0,forward,1410,1.0,9.0\n0,forward,1200,1.2,6.0\n0,backward,1410,1.0,9.0\n0,backward,1200,1.2,6.0\n"
    )
    frontier = plan_frontier(tmp_path / "profile.csv", num_microbatches=1, p2p_blocking_power_w=1.0)
    save_frontier(frontier, tmp_path)
    plan = frontier.plans[0]
    assert chosen_plan(TOP_CLOCKS, "no_slowdown") is None
    assert chosen_plan(plan, "no_slowdown") is plan
    for choice in (frontier, tmp_path, str(tmp_path / "frontier.json")):
        assert chosen_plan(choice, "least_energy").clocks_mhz == ((1200, 1200),)
        assert chosen_plan(choice, "no_slowdown").clocks_mhz == ((1410, 1410),)
