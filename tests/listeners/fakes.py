"""A pipeline rank and a GPU that do what a test tells them."""

from lightning_pfo.core.events import EventEmitter, InstructionEvent
from lightning_pfo.core.schedules.registry import one_f_one_b
from lightning_pfo.device.time import HOST_TIME


class FakeSource:
    """A pipeline of one rank, driven by `run_iteration`."""

    rank = 0
    place = (0, 0)
    stages = (0,)
    local_device_index = 0
    microbatch = ""

    def __init__(self, num_microbatches=2):
        self.schedule = one_f_one_b(1, num_microbatches)
        self.emitter = EventEmitter()
        self.iteration = 0
        self.counting = False

    def add_listener(self, listener, *, innermost=False, outermost=False):
        self.emitter.add(listener, innermost=innermost, outermost=outermost)

    def remove_listener(self, listener):
        self.emitter.remove(listener)

    def count_work(self, enabled):
        self.counting = enabled

    def synchronize(self):
        pass

    def all_gather(self, value, *, everywhere=False):
        return [value]

    def run_iteration(self, compute=lambda instruction: None, work=None):
        self.emitter.iteration_begin(self.iteration)
        for instruction in self.schedule.orders[self.rank]:
            self.emitter.instruction_begin(InstructionEvent(instruction, self.iteration))
            compute(instruction)
            self.emitter.instruction_end(InstructionEvent(instruction, self.iteration, work))
        self.emitter.iteration_end(self.iteration)
        self.iteration += 1


class FakeClocks:
    """Applies every request at once."""

    def __init__(self):
        self.requests = []

    def request(self, clock_mhz):
        self.requests.append(clock_mhz)

    def wait(self, timeout_s):
        return True

    latencies_by_pair = {}


class FakeGpu:
    name = "fake"
    driver_version = ""
    is_emulated = False
    energy_is_continuous = True

    def __init__(self, time_source=HOST_TIME):
        self.energy_mj = 0
        self.time_source = time_source

    def graphics_clock_mhz(self):
        return 1000

    def clock_limits(self):
        return frozenset()

    def temperature_c(self):
        return 50.0

    def power_mw(self):
        return 300_000

    def total_energy_mj(self):
        return self.energy_mj
