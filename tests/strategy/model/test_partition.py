import re
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.core.errors import PartitionError
from lightning_pfo.strategy.model.partition import Amount, describe_partition, partition_layers


@pytest.mark.parametrize(
    ("spec", "weights", "num_stages", "boundaries"),
    [
        ("uniform", [1] * 12, 4, (0, 3, 6, 9, 12)),
        ("uniform", [1] * 10, 4, (0, 3, 6, 8, 10)),
        ("uniform", [1] * 4, 4, (0, 1, 2, 3, 4)),
        ("uniform", [5, 1], 1, (0, 2)),
        ("parameters", [], 1, (0, 0)),
        ("parameters", [9, 1, 1, 1], 2, (0, 1, 4)),
        ("parameters", [1, 1, 1, 9], 3, (0, 1, 3, 4)),
        ("custom:0,8,14,21,27", [1] * 27, 4, (0, 8, 14, 21, 27)),
    ],
)
def test_boundaries(spec, weights, num_stages, boundaries):
    assert partition_layers(spec, weights, num_stages) == boundaries


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 5))
def test_balanced_partitions_are_optimal(weights, num_stages):
    if len(weights) < num_stages:
        return

    def cost(boundaries):  # the heaviest stage, then the variance of stages
        stages = [sum(weights[a:b]) for a, b in pairwise(boundaries)]
        return max(stages), sum(stage * stage for stage in stages)

    every = [(0, *cut, len(weights)) for cut in combinations(range(1, len(weights)), num_stages - 1)]
    found = partition_layers("parameters", weights, num_stages)
    assert found in every
    assert cost(found) == min(map(cost, every))
    measured = [weight / 7 for weight in weights]
    assert cost(partition_layers("profile", [0] * len(weights), num_stages, times_s=measured)) == cost(found)


@pytest.mark.parametrize(
    ("spec", "num_stages", "boundaries"),
    [
        ("type:Block", 2, (0, 3, 6)),
        ("type:block$", 4, (0, 2, 3, 4, 6)),
        ("type:Embedding|Head", 2, (0, 1, 6)),
    ],
)
def test_layers_of_a_type_are_counted(spec, num_stages, boundaries):
    types = ["Embedding", "Block", "Block", "Block", "Block", "Head"]
    found = partition_layers(spec, [1] * 6, num_stages, types=types)

    def matches(boundaries):
        return sorted(sum(bool(re.search(spec[5:], t, re.I)) for t in types[a:b]) for a, b in pairwise(boundaries))

    assert matches(found) == matches(boundaries)


def test_the_description_says_what_each_stage_has_and_how_unequal_they_are():
    amounts = [Amount(3000, 12000), Amount(1500, 6000)]
    text = describe_partition("model.layers", (0, 1, 4), amounts, [0, 1], [0.01, 0.01, 0.01, 0.02], [5000, 20])
    assert "stage 0: layers 0-0, 3,000 parameters (12 kB), 10.0 ms, keeps 5 kB of a microbatch" in text
    assert "stage 1: layers 1-3, 1,500 parameters (6 kB), 40.0 ms, keeps 20 B of a microbatch" in text
    assert "2.00 by parameters, 4.00 by measured time" in text
    assert "stage 1 on rank 0" in describe_partition("model", (0, 1, 2), [Amount(1, 4), Amount(0, 0)], [0, 0])
    assert describe_partition("", (0, 1), [Amount(1, 4)], [0]).startswith("the module runs in 1 stage:")


@pytest.mark.parametrize(
    ("spec", "num_layers", "num_stages", "message"),
    [
        ("uniform", 3, 4, "3 layers for 4 stages. Use 3 or fewer"),
        ("unifrom", 8, 4, "got 'unifrom'.*Try partition='uniform'"),
        ("uniform:2", 8, 4, "got 'uniform:2'"),
        ("custom:0,4,8", 8, 4, "lists 5 rising boundaries.*partition='custom:0,2,4,6,8'"),
        ("custom:0,4,4,6,8", 8, 4, "rising"),
        ("custom:1,2,4,6,8", 8, 4, "from 0 to 8"),
        ("custom:0,2,4,6,9", 8, 4, "from 0 to 8"),
        ("custom:0,x", 8, 4, "got '0,x'"),
        ("custom:", 8, 4, "got ''"),
        ("profile", 8, 4, "got 'profile'"),
        ("type:[", 8, 4, "is none"),
        ("type:Head", 8, 4, "'Head' matches 0 of the layers, whose classes are .'Block'."),
        ("type:", 8, 4, "matches 0"),
    ],
)
def test_impossible_partitions_are_refused_with_one_that_works(spec, num_layers, num_stages, message):
    with pytest.raises(PartitionError, match=message):
        partition_layers(spec, [1] * num_layers, num_stages, types=["Block"] * num_layers)


@pytest.mark.parametrize(
    ("spec", "boundaries"),
    [("uniform", (0, 4, 6)), ("parameters", (0, 5, 6)), ("type:B", (0, 4, 6)), ("profile", (0, 5, 6))],
)
def test_layers_that_stay_together_do(spec, boundaries):
    weights = [1, 1, 1, 1, 1, 9]
    found = partition_layers(spec, weights, 2, types="AABBBB", times_s=weights, undivided={1, 2, 3})
    assert found == boundaries


def test_where_all_layers_stay_together_the_boundary_is_where_it_would_be():
    """Whoever cuts there says why it cannot be."""
    assert partition_layers("uniform", [1] * 4, 2, undivided={1, 2, 3}) == (0, 2, 4)
    assert partition_layers("custom:0,1,4", [1] * 4, 2, undivided={1}) == (0, 1, 4)
