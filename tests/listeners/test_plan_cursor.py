from lightning_pfo.core.frequency_plan import FrequencyPlan, WaitClock
from lightning_pfo.device.emulated.time import VirtualTime
from lightning_pfo.listeners.clock_requests import ClockRequests
from lightning_pfo.listeners.device_follower import DeviceFollower, no_mark
from lightning_pfo.listeners.plan_cursor import PlanCursor
from tests.listeners.fakes import FakeSource


class Clocks:
    """Keeps what was asked for."""

    usual_latency_s = 0.0

    def __init__(self):
        self.requests, self.later = [], []

    def request(self, clock_mhz):
        self.requests.append(clock_mhz)

    def request_at(self, clock_mhz, due_s):
        self.later.append((len(self.requests), clock_mhz, due_s))


def played(plan, instruction_s=1.0):
    """What is asked for in an iteration, and the clock asked for last when each instruction begins."""
    source, clocks, at_begin, time_source = FakeSource(num_microbatches=2), Clocks(), {}, VirtualTime()
    requests = ClockRequests(clocks, DeviceFollower(no_mark), time_source=time_source)
    source.add_listener(PlanCursor(plan, 0, requests))

    def compute(instruction):
        at_begin[instruction] = clocks.requests[-1]
        time_source.sleep(instruction_s)

    source.run_iteration(compute)
    return clocks, at_begin


def test_each_clock_is_requested_before_its_instruction_and_the_first_one_again_at_the_end():
    plan = FrequencyPlan(FakeSource(num_microbatches=2).schedule, ((10, 20, 30, 40),), 1.0, 1.0)
    clocks, at_begin = played(plan)
    assert at_begin == plan.clock_of()
    assert clocks.requests == [10, 20, 30, 40, 10]
    assert clocks.later == []


def test_a_long_wait_has_its_clock_until_the_next_one_is_due_or_its_instruction_begins():
    waits = (WaitClock(0, 0, 5, 0.25), WaitClock(0, 2, 6, 100.0), WaitClock(0, 4, 7, 100.0))
    schedule = FakeSource(num_microbatches=2).schedule
    plan = FrequencyPlan(schedule, ((10, 20, 30, 40),), 1.0, 1.0, wait_clocks=waits)
    clocks, at_begin = played(plan, instruction_s=1.0)
    assert at_begin == plan.clock_of()  # no instruction runs at the clock of a wait that was shorter than planned
    assert clocks.requests == [5, 10, 20, 6, 30, 40, 7, 10]  # the optimizer's step is not for a low clock either
    # how many requests came before, the clock, when; the last wait lasts to the end
    assert clocks.later == [(1, 10, 0.25), (4, 30, 2.0 + 100.0)]
