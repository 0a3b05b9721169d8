"""EnvPipe's early-forward order: the published examples, its clamping, and the cases in which the original hangs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.schedules.envpipe import clamp, extra_forwards
from lightning_pfo.core.schedules.in_flight import peak_in_flight
from lightning_pfo.core.schedules.p2p import find_deadlock, p2p_program
from lightning_pfo.core.schedules.registry import make_schedule
from tests.core.schedules.original_envpipe import (
    hanging_orders,
    hangs_in_the_original,
    original_clamp,
    unclamped,
    vectors,
)


def assert_live(schedule):
    schedule.validate()
    assert not find_deadlock(p2p_program(schedule), blocking_sends=True)


def test_the_published_example():
    schedule = make_schedule("envpipe", 4, 8)
    assert [" ".join(str(inst)[1:] for inst in order) for order in schedule.orders] == [
        "F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7",
        "F0 F1 F2 F3 F4 F5 F6 B0 F7 B1 B2 B3 B4 B5 B6 B7",
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]
    assert schedule.orders == make_schedule("envpipe:4,4,2,0", 4, 8).orders
    assert peak_in_flight(schedule) == (8, 7, 4, 1)
    assert peak_in_flight(make_schedule("envpipe:ratio=1.54", 4, 8)) == (8, 6, 3, 1)
    assert clamp(extra_forwards(4, 1.54), 8) == (4, 3, 1, 0)


def test_without_extra_forwards_it_is_1f1b():
    assert make_schedule("envpipe:0,0,0,0", 4, 8).orders == make_schedule("1f1b", 4, 8).orders


def test_every_vector_of_extra_forwards_is_live():
    num_vectors = num_hanging = 0
    for extra, num_microbatches in vectors():
        num_vectors += 1
        assert_live(make_schedule("envpipe:" + ",".join(map(str, extra)), len(extra), num_microbatches))
        num_hanging += hangs_in_the_original(original_clamp(extra, num_microbatches), num_microbatches)
    assert (num_vectors, num_hanging) == (1464, 102)  # as counted on the original


def test_the_hanging_orders_of_the_original_are_live_with_our_transfers():
    hanging = hanging_orders()
    assert {((0, 1, 2, 0), 4), ((2, 3, 2, 0), 6)} <= hanging
    for extra, num_microbatches in hanging:
        assert_live(unclamped(extra, num_microbatches))


@pytest.mark.parametrize(("num_stages", "ratio"), [(4, 2.0), (4, 1.6), (8, 2.0), (8, 1.6)])
def test_few_microbatches_are_live(num_stages, ratio):
    # the original hangs for 4 stages x 4..7 and 8 x 8..19 microbatches, and with fewer microbatches than stages
    for num_microbatches in range(1, 21):
        assert_live(make_schedule(f"envpipe:ratio={ratio}", num_stages, num_microbatches))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 30), st.none() | st.integers(1, 30))
def test_clamping(extra, num_microbatches, max_in_flight):
    clamped = clamp(extra, num_microbatches, max_in_flight)
    assert list(clamped) == sorted(clamped, reverse=True)
    assert clamped[-1] == 0
    for stage, (k, wanted) in enumerate(zip(clamped, extra, strict=True)):
        of_1f1b = len(extra) - stage
        assert 0 <= k <= wanted
        assert k == 0 or k + of_1f1b <= min(num_microbatches, max_in_flight or num_microbatches)
    assert clamp(clamped, num_microbatches, max_in_flight) == clamped


def test_a_memory_limit():
    assert peak_in_flight(make_schedule("envpipe:ratio=2,max_in_flight=6", 4, 16)) == (6, 5, 4, 1)
    assert peak_in_flight(make_schedule("envpipe:max_in_flight=1", 4, 16)) == (4, 3, 2, 1)  # 1F1B is the least


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("4,4,0", r"each of 4 stages; got '4,4,0' \(3 numbers\). For example envpipe:6,4,2,0"),
        ("4,4,-2,0", "got '4'"),
        ("ratio", "got 'ratio'"),
        ("ratio=fast", "got 'ratio=fast'"),
        ("ratio=nan", "got 'ratio=nan'"),
        ("ratio=0", "got 'ratio=0'"),
        ("max_in_flight=2.5", "got 'max_in_flight=2.5'"),
        ("ratio=1,ratio=2", "got 'ratio=2'"),
        ("speed=2", "Write envpipe, envpipe:K"),
    ],
)
def test_malformed_arguments_are_refused(argument, message):
    with pytest.raises(ConfigurationError, match=message):
        make_schedule(f"envpipe:{argument}", 4, 8)
