from lightning_pfo.planner import plan_frontier
from tests.planner.conftest import physical_profile

CLOCKS_MHZ = tuple(range(1410, 800, -60))


def small_frontier():
    """Two stages, three microbatches, six plans."""
    profile = physical_profile([0.020, 0.028], clocks=CLOCKS_MHZ)
    return plan_frontier(profile, num_microbatches=3, num_plans=6, effort="fast")
