"""Transfers, found again from when instructions began and ended in a timeline whose transfers are known."""

import random

import pytest

from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.listeners.meters.transfers import RankMoments, transfer_times

FORWARD, BACKWARD = InstructionType.FORWARD, InstructionType.BACKWARD


def transfer_s(stage, kind):
    """An activation and the gradient that comes back for it take the same time."""
    return 0.001 * (1 + (stage if kind is FORWARD else stage - 1))


def seconds_by_type(instruction):
    return {FORWARD: 0.02, BACKWARD: 0.04}[instruction.type]


def play(schedule, num_iterations=3, gap_s=0.0, offsets_s=None, scopes=None, seconds_of=seconds_by_type):
    """Moments of each rank; `gap_s` lies between instructions even where nobody waits, `offsets_s` are of its clock."""
    moments = [{} for _ in schedule.orders]
    end_s = {}
    begin_s = 100.0
    predecessors = {}
    for before, after in schedule.handovers().items():
        predecessors[after] = before
    for _ in range(num_iterations):
        free_s = [begin_s] * schedule.num_ranks
        for computed in schedule.rounds():
            for instruction in computed:
                rank = schedule.rank_of(instruction.stage)
                start_s = free_s[rank] + gap_s
                if instruction in predecessors:
                    before = predecessors[instruction]
                    is_local = schedule.rank_of(before.stage) == rank
                    start_s = max(start_s, end_s[before] + (0 if is_local else transfer_s(before.stage, before.type)))
                end_s[instruction] = free_s[rank] = start_s + seconds_of(instruction)
                shift_s = offsets_s[rank] if offsets_s else 0.0
                kind = (instruction.stage, instruction.type)
                moments[rank].setdefault(kind, []).append((start_s + shift_s, end_s[instruction] + shift_s))
        begin_s = max(free_s)
    return [RankMoments(scopes[rank] if scopes else "here", own) for rank, own in enumerate(moments)]


def expected(schedule):
    senders = {
        (before.stage, before.type)
        for before, after in schedule.handovers().items()
        if schedule.rank_of(before.stage) != schedule.rank_of(after.stage)
    }
    return {kind: pytest.approx(transfer_s(*kind), abs=1e-9) for kind in senders}


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved_1f1b"])
@pytest.mark.parametrize("gap_s", [0.0, 0.0005])
def test_on_one_machine_each_transfer_is_known(name, gap_s):
    schedule = make_schedule(name, 4, 8)
    assert transfer_times(schedule, play(schedule, gap_s=gap_s)) == expected(schedule)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_between_machines_the_offset_of_their_clocks_drops_out(name):
    schedule = make_schedule(name, 4, 8)
    offsets_s = [random.Random(rank).uniform(-1e5, 1e5) for rank in range(4)]
    by_rank = play(schedule, gap_s=5e-5, offsets_s=offsets_s, scopes="abcd")
    assert transfer_times(schedule, by_rank) == expected(schedule)


def test_two_ranks_on_each_machine():
    schedule = make_schedule("1f1b", 4, 8)
    by_rank = play(schedule, offsets_s=[0.0, 0.0, 77.0, 77.0], scopes="aabb")
    assert transfer_times(schedule, by_rank) == expected(schedule)


def test_a_way_that_nobody_waited_for_takes_as_long_as_the_way_back():
    schedule = make_schedule("1f1b", 2, 4)
    by_rank = play(schedule, seconds_of=lambda instruction: 0.1 if instruction.stage == 0 else 0.002)
    assert transfer_times(schedule, by_rank) == expected(schedule)  # the first rank never waits for a gradient


def test_without_iterations_nothing_is_known():
    schedule = make_schedule("1f1b", 2, 4)
    assert transfer_times(schedule, [RankMoments("here", {}), RankMoments("here", {})]) == {}
