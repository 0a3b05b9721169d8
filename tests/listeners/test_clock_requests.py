"""When clocks are asked for: with the instructions, or earlier by the latency."""

import pytest

from lightning_pfo.core.events import InstructionListener
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.device.emulated.time import VirtualTime
from lightning_pfo.listeners.clock_requests import ClockRequests
from lightning_pfo.listeners.device_follower import DeviceFollower, no_mark
from lightning_pfo.listeners.plan_cursor import PlanCursor
from tests.listeners.fakes import FakeSource
from tests.listeners.test_device_follower import FakeStream
from tests.waiting import wait_until

CLOCKS_MHZ = (1200, 1305, 1200, 1410)  # of F0 B0 F1 B1


class World(InstructionListener):
    """Clocks that note what is asked of them, and instructions of 20 ms with a wait before each backward."""

    usual_latency_s = 0.005

    def __init__(self, wait_s, leads=True, follower=None):
        self.time_source = VirtualTime()
        self.start_s = 0.0
        self.asked = []
        self.wait_s = wait_s
        self.source = FakeSource()
        follower = follower or DeviceFollower(no_mark)
        requests = ClockRequests(self, follower, leads=leads, time_source=self.time_source)
        cursor = PlanCursor(FrequencyPlan(self.source.schedule, (CLOCKS_MHZ,), 1.0, 1.0), 0, requests)
        for listener in (self, requests, cursor):
            self.source.add_listener(listener)

    def on_instruction_begin(self, event):
        self.time_source.sleep(self.wait_s if event.instruction.type.value == "B" else 0.0)

    def since_start_s(self, moment_s):
        return round(moment_s - self.start_s, 6)

    def request(self, clock_mhz):
        self.asked.append((clock_mhz, self.since_start_s(self.time_source.now_s())))

    def request_at(self, clock_mhz, due_s):
        self.asked.append((clock_mhz, self.since_start_s(self.time_source.now_s()), self.since_start_s(due_s)))

    def run_iteration(self, instruction_s=0.02):
        self.asked.clear()
        self.start_s = self.time_source.now_s()
        self.source.run_iteration(lambda _: self.time_source.sleep(instruction_s))


def test_without_leading_each_clock_is_asked_for_at_the_end_of_the_instruction_before():
    world = World(0.01, leads=False)
    world.run_iteration()
    assert world.asked == [(1200, 0.0), (1305, 0.02), (1200, 0.05), (1410, 0.07), (1200, 0.1)]


def test_the_first_iteration_only_learns():
    world = World(0.0)
    world.run_iteration()
    assert [len(asked) for asked in world.asked] == [2] * 5


def test_clocks_lead_by_the_latency_where_there_is_no_wait():
    world = World(0.0)
    world.run_iteration()
    world.run_iteration()
    assert world.asked == [
        (1200, 0.0),
        (1305, 0.0, 0.015),
        (1305, 0.02),
        (1200, 0.02, 0.035),
        (1200, 0.04),
        (1410, 0.04, 0.055),
        (1410, 0.06),
        (1200, 0.06, 0.075),
        (1200, 0.08),
    ]


def test_where_the_wait_is_longer_than_the_latency_nothing_leads():
    world = World(0.007)
    world.run_iteration()
    world.run_iteration()
    leading = [asked for asked in world.asked if len(asked) == 3]
    assert leading == [(1200, 0.027, 0.042), (1200, 0.074, 0.089)]  # after backwards only; before them there is a wait


def test_a_wait_shorter_than_the_latency_is_led_by_the_rest():
    world = World(0.002)
    world.run_iteration()
    world.run_iteration()
    assert world.asked[1] == (1305, 0.0, 0.017)


def test_expected_durations_follow_slowly():
    world = World(0.0)
    world.run_iteration(0.02)
    world.run_iteration(0.04)
    world.run_iteration(0.04)
    assert world.asked[1] == (1305, 0.0, 0.025)  # half of each, less the latency


def test_without_a_known_latency_nothing_leads():
    world = World(0.0)
    world.usual_latency_s = 0.0
    world.run_iteration()
    world.run_iteration()
    assert all(len(asked) == 2 for asked in world.asked)


@pytest.mark.parametrize("leads", [False, True])
def test_on_cuda_requests_wait_until_the_device_has_done_the_instruction(leads):
    stream = FakeStream()
    follower = DeviceFollower(stream.record)
    world = World(0.0, leads=leads, follower=follower)
    world.source.run_iteration()
    assert world.asked == []
    for number in range(len(stream.marks)):
        stream.get_to(number)
    wait_until(lambda: len(world.asked) == 5)
    assert [asked[0] for asked in world.asked] == [1200, 1305, 1200, 1410, 1200]
    follower.close()


def test_repeated_clocks_put_no_mark_into_the_stream():
    stream = FakeStream()
    follower = DeviceFollower(stream.record)
    requests = ClockRequests(World(0.0), follower)
    for clock_mhz in (1410, 1410, 1410, 1200):
        requests.request(clock_mhz)
    assert len(stream.marks) == 2
    stream.get_to(1)
    follower.close()
