import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_pfo.core.energy_valley import EnergyValley
from lightning_pfo.core.errors import DeviceError
from lightning_pfo.core.schedules.registry import one_f_one_b
from lightning_pfo.device.emulated.time import VirtualTime
from lightning_pfo.listeners.frequency_scan import FrequencyScan
from lightning_pfo.listeners.meters.instructions import InstructionMeter
from tests.listeners.fakes import FakeClocks, FakeGpu, FakeSource


@pytest.mark.parametrize(
    ("energies", "patience", "passed_after"),
    [
        ([9, 8, 7, 8, 9, 10, 11, 12], 5, 8),
        ([9, 8, 9, 10, 11, 12, 11, 12, 13, 14, 15, 16], 5, 12),
        ([1, 2, 3], 1, 2),
        ([5, 5, 5, 5, 5, 5, 5], 2, None),
    ],
)
def test_a_valley_is_passed_after_rises_in_a_row(energies, patience, passed_after):
    valley = EnergyValley(patience)
    passed = []
    for count, energy in enumerate(energies, start=1):
        valley.add(energy)
        if valley.passed:
            passed.append(count)
    assert (passed[0] if passed else None) == passed_after


def scan_until_done(
    energy_of,
    clocks_mhz,
    num_iterations=200,
    patience=2,
    iterations_per_clock=2,
    is_ready=lambda: True,
    energy_error=lambda: 0.0,
    failure=lambda: None,
    source=None,
    request_later=None,
):
    source, clocks, gpu = source or FakeSource(), FakeClocks(), FakeGpu(VirtualTime())
    meter = InstructionMeter(gpu, source)
    meter.energy_error = energy_error
    written = []
    scan = FrequencyScan(
        source,
        clocks,
        clocks_mhz,
        meter,
        iterations_per_clock=iterations_per_clock,
        max_iterations_per_clock=10,
        target_error=0.02,
        warmup_iterations=1,
        patience=patience,
        gpu_name="A100 (emulated)",
        on_clock_done=lambda rows: written.append(list(rows)),
        is_ready=is_ready,
        failure=failure,
        request_later=request_later,
    )
    source.add_listener(scan)
    source.add_listener(meter)

    def compute(instruction):
        gpu.time_source.sleep(0.01)
        gpu.energy_mj += energy_of(
            instruction.type.value, clocks.requests[-1] if clocks.requests else 0, source.iteration
        )

    while not scan.done and source.iteration < num_iterations:
        source.run_iteration(compute)
    meter.close()
    return source, clocks, scan, written


def test_each_instruction_stops_after_its_own_valley():
    forward = {50: 9000, 40: 8000, 30: 9000, 20: 9500, 10: 9900}
    backward = {50: 9000, 40: 8000, 30: 7000, 20: 8000, 10: 9000}
    clocks_mhz = (50, 40, 30, 20, 10, 5)
    source, clocks, scan, written = scan_until_done(
        lambda kind, mhz, _: (forward if kind == "F" else backward)[mhz], clocks_mhz
    )
    assert scan.done
    assert clocks.requests == [50, 40, 30, 20, 10, 50]  # the highest once more
    assert source.iteration == 5 * 3 + 2
    rows = [(row.instruction, row.frequency, row.energy, row.samples) for row in written[-1]]
    assert rows == [
        *(("forward", 50, 9.0, 4), ("backward", 50, 9.0, 4), ("forward", 40, 8.0, 4), ("backward", 40, 8.0, 4)),
        *(("forward", 30, 9.0, 4), ("backward", 30, 7.0, 4), ("forward", 20, 9.5, 4), ("backward", 20, 8.0, 4)),
        ("backward", 10, 9.0, 4),
    ]
    assert [len(rows) for rows in written] == [2, 4, 6, 8, 9, 9]


def test_the_scan_ends_with_the_last_clock():
    _, clocks, scan, written = scan_until_done(lambda kind, mhz, _: mhz * 1000, (30, 20, 10))
    assert scan.done
    assert clocks.requests == [30, 20, 10, 30]
    assert len(written[-1]) == 6
    assert scan.clock_mhz == 30


def test_the_warm_up_is_not_measured():
    def energy_of(kind, mhz, iteration):
        return 1_000_000 if iteration % 3 == 0 else 1000

    _, _, _, written = scan_until_done(energy_of, (30, 20))
    assert all(row.energy == 1.0 and row.energy_stderr == 0 for row in written[-1])


def test_the_standard_error_is_that_of_the_mean():
    _, _, _, written = scan_until_done(lambda kind, mhz, iteration: 1000 if iteration % 3 == 1 else 3000, (30,))
    assert written[-1][0].energy == 2.0
    assert written[-1][0].energy_stderr == pytest.approx(math.sqrt(4 / 3) / 2)  # of 1, 1, 3, 3


def test_scanning_waits_until_measurements_mean_something():
    ready = iter([False, False])
    source, clocks, scan, _ = scan_until_done(lambda *_: 1, (30,), is_ready=lambda: next(ready, True))
    assert source.iteration == 2 + 3
    assert scan.done
    assert clocks.requests == [30]


def test_uncertain_energies_are_measured_for_longer():
    errors = iter([0.2, 0.02 * math.sqrt(1.4), 0.02, 0.01, math.inf, 0.9, 0.8, 0.0])
    source, _, scan, written = scan_until_done(lambda *_: 1, (30, 20, 10), energy_error=lambda: next(errors))
    assert scan.done
    assert next(errors, None) is None
    # twice as long at most at once, then as much as the standard error says, and never longer than allowed
    assert [row.samples / 2 for row in written[-1][::2]] == [6, 2, 10]
    assert source.iteration == 3 + 6 + 2 + 10 + 2  # and the visit to the highest clock at the end


def test_flags_say_what_to_doubt():
    from lightning_pfo.device.energy.sampler import StateWithin
    from lightning_pfo.listeners.meters.instructions import Measured
    from lightning_pfo.listeners.meters.rows import _flags

    def measured(clock_mhz, stderr_j, limits=frozenset()):
        return Measured(0.02, 0.0, 5.0, stderr_j, 50, StateWithin(clock_mhz, limits, 60.0, 250.0))

    assert _flags(measured(1400.0, 0.05), 1410, 0.02) == ""
    assert _flags(measured(1380.0, 0.05, frozenset({"power_cap"})), 1410, 0.02) == "clock_not_reached power_cap"
    assert _flags(measured(1410.0, 0.05), 1200, 0.02) == "clock_above clock_not_reached"  # the request was ignored
    assert _flags(measured(math.nan, 0.051), 1410, 0.02) == "energy_uncertain"


@pytest.mark.parametrize(("fails_at", "num_written"), [(1, 0), (2, 0), (4, 1)])
def test_without_clock_control_the_scan_stops_and_keeps_what_was_measured_before(fails_at, num_written):
    calls = iter(range(1, 100))
    _, _, scan, written = scan_until_done(
        lambda *_: 1, (30, 20, 10), failure=lambda: DeviceError("GPU is lost.") if next(calls) >= fails_at else None
    )
    assert scan.done
    assert str(scan.error) == "A frequency scan sets clocks, which rank 0 cannot: GPU is lost."
    assert [len(rows) for rows in written] == [2] * num_written


@pytest.mark.parametrize("fails_at", [1, 2])
def test_where_energies_are_not_measured_any_more_the_scan_stops_and_training_goes_on(fails_at):
    calls = iter(range(1, 100))

    def energy_error():
        if next(calls) >= fails_at:
            raise DeviceError("The counter has stopped.")
        return 0.0

    source, _, scan, written = scan_until_done(lambda *_: 1, (30, 20, 10), energy_error=energy_error)
    assert scan.done
    assert str(scan.error) == "A frequency scan measures energies, which rank 0 cannot: The counter has stopped."
    assert len(written) == fails_at - 1
    source.run_iteration(lambda instruction: None)


class OneOfTwo(FakeSource):
    """A rank, in a thread of its own, that meets another one."""

    def __init__(self, rank, meeting, values):
        super().__init__()
        self.schedule = one_f_one_b(2, 2)
        self.rank, self.place, self.stages = rank, (rank, 0), (rank,)
        self.meeting, self.values = meeting, values

    def all_gather(self, value, *, everywhere=False):
        self.values[self.rank] = value
        self.meeting.wait(10)
        gathered = list(self.values)
        self.meeting.wait(10)
        return gathered


@pytest.mark.parametrize("fewer_mhz", [(50, 30), (50,)])
def test_gpus_of_different_clocks_are_scanned_together(fewer_mhz):
    clocks_mhz = (fewer_mhz, (60, 40, 20, 10))
    meeting, values, tried = threading.Barrier(2), [None, None], ([], [])

    def scan(rank):
        source = OneOfTwo(rank, meeting, values)
        return scan_until_done(
            lambda kind, mhz, _: mhz * 1000, clocks_mhz[rank], source=source, request_later=tried[rank].append
        )

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(scan, range(2)))
    for _, _, done, written in outcomes:
        assert done.done
        assert done.error is None
        assert [{row.frequency for row in written[-1] if row.stage == stage} for stage in range(2)] == [
            set(clocks) for clocks in clocks_mhz
        ]
    assert [set(some) for some in tried] == [set(fewer_mhz), {60, 20, 10}]  # to and fro: of its own clocks each
