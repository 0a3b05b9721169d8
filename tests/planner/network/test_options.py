import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.planner.network.options import make_option_set, pareto_front

points = st.lists(
    st.tuples(st.integers(1, 60).map(lambda n: n / 10), st.integers(-50, 50).map(float), st.integers(1, 9)),
    min_size=1,
    max_size=12,
)


@given(points)
def test_exactly_the_undominated_options_are_kept(options):
    kept = make_option_set(*zip(*options, strict=True))
    expected = {
        (t, c) for t, c, _ in options if not any((u <= t and d <= c) and (u, d) != (t, c) for u, d, _ in options)
    }
    assert set(zip(kept.times, kept.costs, strict=True)) == expected
    assert list(kept.times) == sorted(kept.times)
    assert set(zip(kept.times, kept.costs, kept.knobs, strict=True)) <= set(options)


@given(points)
def test_the_hull_is_convex_and_below_every_option(options):
    kept = make_option_set(*zip(*options, strict=True))
    assert (kept.hull[0], kept.hull[-1]) == (0, len(kept.times) - 1)
    corners = kept.hull_points
    slopes = [(d - b) / (c - a) for (a, b), (c, d) in itertools.pairwise(corners)]
    assert all(s < t for s, t in itertools.pairwise(slopes))
    assert all(slope < 0 for slope in slopes)
    for time, cost in zip(kept.times, kept.costs, strict=True):
        assert np.interp(time, *zip(*corners, strict=True)) <= cost + 1e-9


def test_of_equal_options_the_lowest_knob_is_kept():
    assert make_option_set([1.0, 1.0], [2.0, 2.0], [1410, 1395]).knobs == (1395,)


@given(points)
def test_the_pareto_front_is_what_nothing_else_dominates_fast_to_slow(options):
    times, costs = [t for t, _, _ in options], [c for _, c, _ in options]
    front = pareto_front(times, costs).tolist()
    for number, point in enumerate(zip(times, costs, strict=True)):
        others = [q for q in zip(times, costs, strict=True) if q != point]
        dominated = any(t <= point[0] and c <= point[1] for t, c in others)
        first_of_equals = point not in list(zip(times, costs, strict=True))[:number]
        assert (number in front) == (not dominated and first_of_equals)
    assert [times[number] for number in front] == sorted(times[number] for number in front)


def test_there_is_no_front_of_nothing():
    assert pareto_front([], []).tolist() == []
