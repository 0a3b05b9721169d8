"""However a step is cut, its stages together compute what it computes, or one of them says why not."""

import random
import re

import pytest
import torch

from lightning_pfo.core.errors import ConfigurationError
from tests.strategy.model.stages import Followed, Stages, assert_equal, run_cut, run_plainly
from tests.strategy.model.tracing import object_cases  # noqa: F401 - more cases
from tests.strategy.model.tracing.cases import CASES
from tests.thorough import THOROUGH

pytestmark = pytest.mark.slow

TOLERANCES = {"mixed_precision": 2e-2}


def check(run, name, expected):
    return check_case(run, CASES[name], expected, TOLERANCES.get(name, 1e-5))


def check_case(run, case, expected, tolerance=1e-5):
    """Returns whether it is equal; otherwise it is refused as the case says."""
    try:
        found = run()
    except (ConfigurationError, RuntimeError) as error:  # some of which torch refuses itself
        message = case.refused
        if message is None or not re.search(message, str(error)):
            raise
        return False
    assert_equal(found, expected, tolerance)
    return True


@pytest.mark.parametrize("name", CASES)
def test_every_cut_is_equal_or_refused(name):
    owner, step = CASES[name].make()
    expected = run_plainly(owner, step)
    followed = Followed(owner, step, 2)
    try:
        trace = followed.trace()
        assert trace.failure is None
        places = range(1, len(trace.events))
        rng = random.Random(0)
        cuts = [[place] for place in places] + [
            sorted(rng.choices(places, k=rng.choice((2, 3)))) for _ in range(5 if THOROUGH else 2)
        ]
        equal = [check(lambda at=at: run_cut(owner, followed.step, trace, at), name, expected) for at in cuts]
    finally:
        followed.close()
    assert any(equal)
    # up to torch 2.9 the layers of a checkpoint that other stages have need not be computed again
    assert all(equal) == (CASES[name].refused is None) or torch.__version__ < "2.13"


@pytest.mark.parametrize(("name", "num_stages"), [(name, 2 + number % 3) for number, name in enumerate(CASES)])
def test_stages_of_equal_numbers_of_layers(name, num_stages):
    """With what other stages hold released, and the cuts that a strategy would make."""
    owner, step = CASES[name].make()
    expected = run_plainly(owner, step)

    def run():
        stages = Stages(owner, step, num_stages=num_stages)
        try:
            return stages.run(), stages.gradients()
        finally:
            stages.close()

    check(run, name, expected)
