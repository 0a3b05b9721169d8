"""What an option may be is said before any work starts."""

import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy import PfoPipelineStrategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": 2}, r"partition is 'uniform', .*; got 2\. Try"),
        ({"schedule": None}, r"Unknown schedule None; known schedules: 1f1b"),
        ({"num_microbatches": "4"}, r"num_microbatches is a whole number, at least 1, or None; got '4'"),
        ({"num_microbatches": 2.5}, r"num_microbatches is .*; got 2\.5"),
        ({"num_microbatches": 0}, r"num_microbatches is .*; got 0"),
        ({"stages_per_rank": "2"}, r"stages_per_rank is .*; got '2'"),
        ({"max_in_flight": True}, r"max_in_flight is .*; got True"),
        ({"batch_norm": 1}, r"batch_norm is 'microbatch' or 'deferred'; got 1"),
        ({"loss_over": None}, r"loss_over is 'microbatch' or 'batch'; got None"),
    ],
)
def test_another_type_is_refused_with_the_rule_and_the_value(options, message):
    with pytest.raises(ConfigurationError, match=message):
        PfoPipelineStrategy(**options)
