from lightning_pfo.callbacks.plan_cursor import PlanCursor
from lightning_pfo.core.frequency_plan import FrequencyPlan
from tests.callbacks.fakes import FakeSource


def test_each_clock_is_requested_before_its_instruction_and_the_first_one_again_at_the_end():
    source = FakeSource(num_microbatches=2)
    requests = []
    plan = FrequencyPlan(source.schedule, ((10, 20, 30, 40),), 1.0, 1.0)
    source.add_listener(PlanCursor(plan, 0, requests.append))
    at_begin = {}
    source.run_iteration(lambda instruction: at_begin.update({instruction: requests[-1]}))
    assert at_begin == plan.clock_of()
    assert requests == [10, 20, 30, 40, 10]
