from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.core.errors import PartitionError
from lightning_pfo.strategy.partition import partition_layers


@pytest.mark.parametrize(
    ("spec", "weights", "num_stages", "boundaries"),
    [
        ("uniform", [1] * 12, 4, (0, 3, 6, 9, 12)),
        ("uniform", [1] * 10, 4, (0, 3, 6, 8, 10)),
        ("uniform", [1] * 4, 4, (0, 1, 2, 3, 4)),
        ("uniform", [5, 1], 1, (0, 2)),
        ("parameters", [9, 1, 1, 1], 2, (0, 1, 4)),
        ("parameters", [1, 1, 1, 9], 3, (0, 1, 3, 4)),
        ("custom:0,8,14,21,27", [1] * 27, 4, (0, 8, 14, 21, 27)),
    ],
)
def test_boundaries(spec, weights, num_stages, boundaries):
    assert partition_layers(spec, weights, num_stages) == boundaries


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 5))
def test_parameters_is_optimal(weights, num_stages):
    if len(weights) < num_stages:
        return

    def heaviest(boundaries):
        return max(sum(weights[a:b]) for a, b in pairwise(boundaries))

    found = partition_layers("parameters", weights, num_stages)
    every = [(0, *cut, len(weights)) for cut in combinations(range(1, len(weights)), num_stages - 1)]
    assert found in every
    assert heaviest(found) == min(map(heaviest, every))


@pytest.mark.parametrize(
    ("spec", "num_layers", "num_stages", "message"),
    [
        ("uniform", 3, 4, "3 layers for 4 stages. Use devices=3 or fewer"),
        ("unifrom", 8, 4, "got 'unifrom'.*try partition='uniform'"),
        ("uniform:2", 8, 4, "got 'uniform:2'"),
        ("custom:0,4,8", 8, 4, "lists 5 rising boundaries.*partition='custom:0,2,4,6,8'"),
        ("custom:0,4,4,6,8", 8, 4, "rising"),
        ("custom:1,2,4,6,8", 8, 4, "from 0 to 8"),
        ("custom:0,2,4,6,9", 8, 4, "from 0 to 8"),
        ("custom:0,x", 8, 4, "got '0,x'"),
        ("custom:", 8, 4, "got ''"),
    ],
)
def test_impossible_partitions_are_refused_with_one_that_works(spec, num_layers, num_stages, message):
    with pytest.raises(PartitionError, match=message):
        partition_layers(spec, [1] * num_layers, num_stages)
