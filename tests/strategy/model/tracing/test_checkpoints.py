"""Where what checkpoints recompute is divided."""

import pytest

from tests.strategy.model.stages import Followed
from tests.strategy.model.tracing.cases import CASES


@pytest.mark.parametrize("name", ["checkpointed_layers", "checkpointed_with_reentrance", "checkpointed_groups"])
def test_layers_in_checkpoints_are_calls_of_their_own(name):
    owner, step = CASES[name].make()
    followed = Followed(owner, step, 2)
    try:
        called = [unit.name for unit, _ in followed.trace().marks]
    finally:
        followed.close()
    assert called == [f"layers.{index}" for index in range(6)]
