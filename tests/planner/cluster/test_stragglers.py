"""How slow replicas are."""

import numpy as np
import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.planner.cluster.stragglers import STRAGGLERS, straggler_factors


@pytest.mark.parametrize("name", STRAGGLERS)
def test_factors_are_of_every_replica_at_every_moment_and_come_again_with_their_seed(name):
    factors = straggler_factors(name, 1000, 48, seed=3)
    assert factors.shape == (48, 1000)
    assert (factors >= 1).all()
    assert (factors == straggler_factors(name, 1000, 48, seed=3)).all()
    assert (factors.max() > 1) == (name != "none")
    assert (factors > 1).mean() < 0.2  # stragglers are few


def test_caps_are_of_some_hours_and_links_are_repaired():
    caps = straggler_factors("power_caps", 1000, 24)
    assert np.flatnonzero(caps.max(axis=1) > 1).tolist() == [17, 18, 19, 20]
    assert 60 < (caps[18] > 1).sum() < 140
    links = straggler_factors("links", 5000, 96, seed=1)
    slow = np.flatnonzero(links.max(axis=0) > 1)
    assert 0 < len(slow) <= 40  # 20 failures a day
    assert all(len({*links[:, replica]} - {1.0}) <= 2 for replica in slow)


def test_a_day_is_as_bad_as_the_worst_of_its_troubles():
    draw = np.random.default_rng(0)
    each = [STRAGGLERS[name](500, 24, draw) for name in ("thermal", "links", "power_caps")]
    assert (straggler_factors("day", 500, 24) == np.max(each, axis=0)).all()


def test_one_replica_may_be_slow_by_a_given_factor():
    assert straggler_factors(1.25, 4, 288).tolist() == [[1.25, 1, 1, 1]]
    assert straggler_factors([[1, 2], [1.5, 1]], 2, 1).tolist() == [[1, 2], [1.5, 1]]


@pytest.mark.parametrize(
    ("stragglers", "message"),
    [
        ("termal", r"stragglers are none, thermal, .*; got 'termal'\. Did you mean thermal"),
        (0.9, "takes 1 to 100 times as long as it should; got factors from 0.9 to 1"),
        ([[1.0, 1.1]], r"a column for each of 3 pipelines; got the shape \(1, 2\)"),
        (float("nan"), "takes 1 to 100 times as long"),
        (["a", "b"], "made of numbers"),
    ],
)
def test_what_makes_no_stragglers_is_refused(stragglers, message):
    with pytest.raises(ConfigurationError, match=message):
        straggler_factors(stragglers, 3, 2)
