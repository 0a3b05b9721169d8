"""A plan on one rank and an emulated GPU, without a Trainer."""

from itertools import pairwise

import pytest

from lightning_pfo.core.errors import DeviceError, PlanMismatchError
from lightning_pfo.core.events import InstructionWork
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.device import EmulatedGpu, GpuConfig, load_gpu_config
from lightning_pfo.device.emulated.physics import GpuPhysics
from lightning_pfo.listeners.planned_run import TOP_CLOCKS, PlannedRun, chosen_plan
from lightning_pfo.planner import plan_frontier, save_frontier
from tests.listeners.fakes import FakeSource

CLOCKS_MHZ = (1410, 1200, 1305, 1005)  # of F0 B0 F1 B1
WORK = InstructionWork(1e9, 1e6)
LATENCY_S = 0.004


def planned_run(monkeypatch, num_iterations=6, **options):
    """Iterations under the plan: the run, what it said, and the clocks asked for, with their moments."""
    locked, said = [], []
    lock = EmulatedGpu.lock_graphics_clock

    def noting(gpu, clock_mhz):
        locked.append((clock_mhz, gpu.time_source.now_s()))
        lock(gpu, clock_mhz)

    monkeypatch.setattr(EmulatedGpu, "lock_graphics_clock", noting)
    source = FakeSource(num_microbatches=2)
    plan = FrequencyPlan(source.schedule, (CLOCKS_MHZ,), 1.0, 1.0)
    config = GpuConfig(kind="emulated", forward_s=0.03, clock_latency_s=LATENCY_S, **options)
    with PlannedRun(source, plan, gpu=config, num_gpus=1, report=said.append) as run:
        for _ in range(num_iterations):
            source.run_iteration(work=WORK)
            run.measure()
    return run, said, locked


def instruction_s(config, clock_mhz, until_landed_mhz=None):
    """Oracle: how long an instruction takes whose clock has landed, or lands after the latency."""
    physics, parts = GpuPhysics(config), (0.03 * (1 - config.memory_share), 0.03 * config.memory_share)
    done = LATENCY_S / physics.time_s(until_landed_mhz, *parts) if until_landed_mhz else 0.0
    return (LATENCY_S if until_landed_mhz else 0.0) + (1 - done) * physics.time_s(clock_mhz, *parts)


def test_clocks_follow_the_plan_and_their_latency_is_reported(monkeypatch):
    run, said, locked = planned_run(monkeypatch)
    assert [clock_mhz for clock_mhz, _ in locked] == [1410, *[1200, 1305, 1005, 1410] * 6]
    statistics = run.clock_statistics
    assert statistics.num_changes == len(locked)
    assert LATENCY_S <= statistics.latency_s <= 1.1 * LATENCY_S  # read back at a tenth of what has passed
    assert f"clock changes; reached after {1000 * statistics.latency_s:.1f} ms" in said[-1]
    assert [measured.iteration for measured in run.measurements] == [1, 2, 3, 4, 5]  # work was counted in the first
    # asked for at the end of the instruction before, each clock lands when the instruction has begun
    before = (CLOCKS_MHZ[-1], *CLOCKS_MHZ[:-1])
    expected_s = sum(instruction_s(GpuConfig(), *pair) for pair in zip(CLOCKS_MHZ, before, strict=True))
    assert [measured.time_s for measured in run.measurements[1:]] == pytest.approx([expected_s] * 4)


def test_plans_may_change_from_iteration_to_iteration(monkeypatch):
    locked = []
    lock = EmulatedGpu.lock_graphics_clock
    monkeypatch.setattr(
        EmulatedGpu, "lock_graphics_clock", lambda gpu, clock_mhz: (locked.append(clock_mhz), lock(gpu, clock_mhz))
    )
    source = FakeSource(num_microbatches=1)
    plan = FrequencyPlan(source.schedule, ((1200, 1005),), 1.0, 1.0)
    seen, said = [], []
    with PlannedRun(
        source,
        lambda iteration: plan if iteration in (2, 3, 5) else None,
        gpu=GpuConfig(kind="emulated"),
        num_gpus=1,
        report=said.append,
    ) as run:
        assert run.plan is None
        for _ in range(6):
            source.run_iteration(work=WORK)
            seen.append(max(run.plan.clocks_mhz[0]))
            run.measure()
    assert seen == [1410, 1410, 1200, 1200, 1410, 1200]
    assert locked == [1410, 1200, 1005, 1200, 1005, 1200, 1410, 1200, 1005, 1200]
    assert len([text for text in said if "2 instructions on" in text]) == 2  # each is checked once
    times_s = [measured.time_s for measured in run.measurements]  # from the second on
    assert min(times_s[1], times_s[2], times_s[4]) > 1.1 * max(times_s[0], times_s[3])


def test_a_gpu_whose_clocks_are_not_set_may_support_others_than_the_plan_s(monkeypatch, caplog):
    def refuse(gpu):
        raise DeviceError("its driver does not tell which clocks it supports")

    source = FakeSource(num_microbatches=1)
    plan = FrequencyPlan(source.schedule, ((1200, 1001),), 1.0, 1.0)
    with (
        PlannedRun(source, plan, gpu=GpuConfig(kind="emulated"), num_gpus=1),
        pytest.raises(PlanMismatchError, match=r"does not support \[1001\] MHz"),
    ):
        source.run_iteration(work=WORK)
    monkeypatch.setattr(EmulatedGpu, "claim_clocks", refuse)
    with PlannedRun(source, plan, gpu=GpuConfig(kind="emulated"), num_gpus=1) as run:
        for _ in range(2):
            source.run_iteration(work=WORK)
            run.measure()
    assert run.clock_statistics.num_changes == 0
    assert len(run.measurements) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "Training goes on without clock control on all ranks, as rank 0 meets: its driver does not tell which clocks "
        "it supports"
    ]


def test_clocks_that_are_led_have_landed_when_their_instruction_begins(monkeypatch):
    run, _, locked = planned_run(monkeypatch, num_iterations=25, lead_clocks=True)
    assert {clock_mhz for clock_mhz, _ in locked} == set(CLOCKS_MHZ)
    # at the end of the instruction before, less the latency, which is known to a tenth
    asked_before_s = [b - a for (_, a), (_, b) in pairwise(locked[-5:])]
    durations_s = [instruction_s(GpuConfig(), clock_mhz) for clock_mhz in CLOCKS_MHZ]
    assert asked_before_s == pytest.approx(durations_s, rel=0.02)
    assert run.measurements[-1].time_s == pytest.approx(sum(durations_s), rel=0.02)


def test_in_real_time_clocks_follow_the_plan_from_a_thread(monkeypatch):
    run, said, locked = planned_run(monkeypatch, time="real")
    statistics = run.clock_statistics
    assert {clock_mhz for clock_mhz, _ in locked} == set(CLOCKS_MHZ)
    assert len(locked) > 8
    assert len(locked) - 1 <= statistics.num_changes <= len(locked)  # the worker may be between lock and count
    assert statistics.latency_s >= LATENCY_S
    assert len(run.measurements) == 5
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


@pytest.mark.parametrize(
    ("measured_on", "is_told"),
    [
        ((), False),
        (("NVIDIA A100-SXM4-80GB",), False),
        (("NVIDIA A40", "NVIDIA A100-SXM4-80GB (emulated)"), False),
        (("NVIDIA A40 (emulated, virtual time)",), True),
    ],
)
def test_a_plan_of_other_gpus_is_warned_of_once(measured_on, is_told, caplog):
    source = FakeSource(num_microbatches=2)
    plan = FrequencyPlan(source.schedule, (CLOCKS_MHZ,), 1.0, 1.0)
    config = load_gpu_config("emulated_a100")
    with PlannedRun(source, plan, gpu=config, num_gpus=1, measured_on=measured_on) as run:
        for _ in range(3):
            source.run_iteration(work=WORK)
            run.measure()
    said = "made of measurements on NVIDIA A40 (emulated, virtual time), and trains on NVIDIA A100-SXM4-80GB (emulated"
    assert caplog.text.count(said) == is_told
    assert ("made of measurements" in caplog.text) == is_told
