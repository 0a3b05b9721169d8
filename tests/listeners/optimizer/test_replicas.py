"""A replica that waits for a straggler takes a plan beyond the least energy, where such were planned."""

import math

import pytest

from lightning_pfo.listeners.optimizer.replicas import Busy, Replicas
from lightning_pfo.planner import plan_frontier, select_plan
from lightning_pfo.server.jobs.director import chosen_beside
from lightning_pfo.server.jobs.verifying import Verifying
from tests.planner.conftest import physical_profile


class TwoReplicas:
    """The first of them; the other is busy for so long."""

    place = (0, 0)

    def __init__(self, other_s, own_s):
        self._other = Busy(1, other_s, math.nan, own_s)

    def all_gather(self, value, *, everywhere=False):
        return [value, self._other]


@pytest.fixture(scope="module")
def frontier():
    profile = physical_profile([0.020, 0.024], clocks=(1400, 1100, 900), knee=1000, static_w=120.0)
    return plan_frontier(profile, num_microbatches=2, num_plans=4, num_straggler_plans=4)


def test_replicas_and_the_server_take_the_slowest_plan_that_pays(frontier):
    own = select_plan(frontier, "no_slowdown")
    slow = frontier.straggler_plans[-1]
    assert slow.iteration_time_s > frontier.least_energy.iteration_time_s
    straggler_s = 2 * slow.iteration_time_s
    plans = Replicas(TwoReplicas(straggler_s, own.iteration_time_s)).wanted(frontier, own, own)
    assert plans[0] is slow
    rows = chosen_beside(frontier, "no_slowdown", straggler_s)
    assert rows.iteration_time_s == slow.iteration_time_s
    begun = Verifying(2, 0.005).begin(frontier, slow, f"T'={straggler_s}s")
    assert (begun.purpose, begun.rows) == ("plan", rows.rows)  # nobody's time is compared with that of the top clocks
    assert chosen_beside(frontier, "no_slowdown", 0.0).iteration_time_s == own.iteration_time_s
