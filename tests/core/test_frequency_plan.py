import pytest

from lightning_pfo.core.errors import PlanError, PlanMismatchError
from lightning_pfo.core.frequency_plan import FrequencyPlan, uniform_plan
from lightning_pfo.core.instruction import Instruction
from lightning_pfo.core.schedules.registry import one_f_one_b
from lightning_pfo.core.schedules.schedule import PipelineSchedule


def test_each_instruction_has_its_clock():
    plan = FrequencyPlan(one_f_one_b(2, 2), ((1, 2, 3, 4), (5, 6, 7, 8)), 1.0, 110.0, 100.0)
    clocks = plan.clock_of()
    assert clocks[Instruction.parse("0B0")] == 3
    assert clocks[Instruction.parse("1F1")] == 7
    assert plan.gap == pytest.approx(0.1)


def test_uniform_plan_has_a_clock_per_rank():
    assert uniform_plan(one_f_one_b(2, 2), [1410, 1980]).clocks_mhz == ((1410,) * 4, (1980,) * 4)


def test_a_plan_has_as_many_clocks_as_instructions():
    with pytest.raises(PlanError, match=r"\[4, 4\] by rank; got \[4, 3\]"):
        FrequencyPlan(one_f_one_b(2, 2), ((1,) * 4, (1,) * 3), 1.0, 1.0)


def test_a_plan_for_another_pipeline_is_refused():
    plan = uniform_plan(one_f_one_b(2, 4), [1, 1])
    plan.check_fits(one_f_one_b(2, 4))
    with pytest.raises(PlanMismatchError, match=r"2 stages x 4 microbatches.*runs 2 x 8.*num_microbatches=8"):
        plan.check_fits(one_f_one_b(2, 8))
    with pytest.raises(PlanMismatchError, match="runs 3 x 4"):
        plan.check_fits(one_f_one_b(3, 4))


def test_a_plan_for_another_order_is_refused_with_the_cell_marked():
    one = one_f_one_b(1, 2)
    swapped = PipelineSchedule(
        "other", 1, 2, (one.orders[0][:1] + one.orders[0][2:3] + one.orders[0][1:2] + one.orders[0][3:],)
    )
    with pytest.raises(PlanMismatchError, match=r"expects 0B0 where the pipeline .* runs 0F1") as caught:
        uniform_plan(one, [1]).check_fits(swapped)
    assert "[0F1]" in str(caught.value)
