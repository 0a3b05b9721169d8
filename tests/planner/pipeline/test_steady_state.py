import itertools

import pytest

from lightning_pfo.core.schedules.registry import SCHEDULES, make_schedule
from lightning_pfo.planner.pipeline.steady_state import steady_middles

MARGIN = 16


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"envpipe"}))
def test_every_instruction_of_a_run_recurs_a_period_later(name):
    schedule = make_schedule(name, 4, 96)
    runs = steady_middles(schedule, margin=MARGIN, pieces=6)
    assert {schedule.rank_of(schedule.instructions[run.begin].stage) for run in runs} == set(range(4))
    for before, after in itertools.pairwise(runs):
        assert before.end <= after.begin
    for run in runs:
        assert (run.end - run.begin) % run.period == 0
        inside = schedule.instructions[run.begin : run.end]
        assert len({schedule.rank_of(inst.stage) for inst in inside}) == 1
        (shift,) = {
            later.microbatch - inst.microbatch
            for inst, later in zip(inside, inside[run.period :], strict=False)
            if (inst.stage, inst.type) == (later.stage, later.type)
        }
        assert inside[run.period :] == tuple(
            inst._replace(microbatch=inst.microbatch + shift) for inst in inside[: -run.period]
        )
        assert shift


def test_the_steady_state_of_1f1b_is_found_between_warm_up_and_cool_down():
    schedule = make_schedule("1f1b", 4, 100)
    runs = steady_middles(schedule, margin=MARGIN, pieces=6)
    for rank in range(4):
        mine = [run for run in runs if schedule.rank_of(schedule.instructions[run.begin].stage) == rank]
        assert all(before.end == after.begin for before, after in itertools.pairwise(mine))
        assert {run.period for run in mine} == {2}
        inside = schedule.instructions[mine[0].begin : mine[-1].end]
        forwards = [inst.microbatch for inst in inside if inst.type.value == "F"]
        assert min(forwards) >= 3 - rank + MARGIN
        assert max(forwards) < 100 - MARGIN
        assert len(forwards) > 100 - 4 - 2 * MARGIN - 2


def test_short_pipelines_have_no_middle():
    assert steady_middles(make_schedule("1f1b", 4, 48), margin=MARGIN) == []
