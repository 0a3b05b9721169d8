from itertools import product

import pytest

from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.listeners.optimizer.probe import probe_of, probe_plan


def times_of(schedule, time_s=0.05):
    return {(inst.stage, inst.type): time_s for inst in schedule.instructions}


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"),
    [("1f1b", 4, 8), ("gpipe", 4, 8), ("interleaved_1f1b", 2, 8), ("1f1b", 2, 2), ("zbv", 2, 6)],
)
@pytest.mark.parametrize("settle_s", [0.01, 0.12])
def test_a_probe_measures_every_kind_after_the_clock_has_settled(name, ranks, microbatches, settle_s):
    schedule = make_schedule(name, ranks, microbatches)
    for order in schedule.orders:
        probe = probe_of(order, times_of(schedule), settle_s)
        kinds = {(inst.stage, inst.type) for inst in order}
        counted = order[probe.counts_from : probe.end]
        assert {(inst.stage, inst.type) for inst in counted} == kinds
        if probe.iterations == 1:
            assert 0.05 * (probe.counts_from - probe.begin) >= settle_s
        else:
            assert (probe.begin, probe.counts_from, probe.end) == (0, 0, len(order))


def test_a_probe_is_the_shortest_that_there_is():
    """Brute force over all parts of an order."""
    schedule = make_schedule("1f1b", 4, 8)
    for order in schedule.orders:
        probe = probe_of(order, times_of(schedule), 0.05)
        lengths = [
            end - begin
            for begin, end in product(range(len(order)), range(len(order) + 1))
            if all(
                sum(inst.type is kind for inst in order[begin + 1 : end]) >= 2 for kind in {inst.type for inst in order}
            )
        ]
        assert probe.end - probe.begin == min(lengths)
        assert probe.iterations == 1


def test_too_few_instructions_are_measured_in_a_second_iteration():
    schedule = make_schedule("1f1b", 2, 2)
    probe = probe_of(schedule.orders[1], times_of(schedule), settle_s=1.0)
    assert (probe.begin, probe.counts_from, probe.end, probe.iterations) == (0, 0, 4, 2)


def test_ranks_measure_clocks_of_their_own_and_run_the_rest_at_the_top():
    schedule = make_schedule("1f1b", 2, 4)
    probes = [probe_of(order, times_of(schedule), 0.05) for order in schedule.orders]
    plan = probe_plan(schedule, (1410, 1410), (900, 1200), probes)
    for row, probe, mhz in zip(plan.clocks_mhz, probes, (900, 1200), strict=True):
        assert set(row[probe.begin : probe.end]) == {mhz}
        assert set(row[: probe.begin] + row[probe.end :]) <= {1410}
