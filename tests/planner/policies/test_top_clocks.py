from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner import InstructionProfile, Profile
from lightning_pfo.planner.pipeline.problem import Problem
from lightning_pfo.planner.policies.top_clocks import top_clocks

F, B = InstructionType.FORWARD, InstructionType.BACKWARD


def measured(*clocks):
    return InstructionProfile(clocks, tuple(1.0 for _ in clocks), tuple(1.0 for _ in clocks))


def test_each_instruction_gets_the_highest_clock_that_its_stage_was_measured_at():
    profile = Profile({(0, F): measured(1410, 1200), (0, B): measured(1200, 900),
                       (1, F): measured(1410, 900), (1, B): measured(1410)})  # fmt: skip
    assert top_clocks(Problem(profile, make_schedule("gpipe", 2, 2), ())) == ((1200,) * 4, (1410,) * 4)
    interleaved = make_schedule("looped_bfs", 1, 2)
    assert top_clocks(Problem(profile, interleaved, ())) == (
        tuple([1200, 1410][i.stage] for i in interleaved.orders[0]),
    )
