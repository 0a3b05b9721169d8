"""Gradients are those of one process whatever crosses stage boundaries."""

from pathlib import Path

import pytest

from tests.launch import of_ranks, run_script


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("boundaries")
    run_script(Path(__file__).parents[1] / "scripts" / "boundaries.py", folder)
    return of_ranks(folder, 2)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "1f1b by host memory"])
@pytest.mark.parametrize("name", ["frozen", "pairs", "several", "views"])
def test_gradients_are_those_of_one_process(ranks, name, schedule):
    expected = ranks[0][name]
    assert len(expected) >= 4
    seen = {}
    for rank in ranks:
        seen |= rank[f"{name} {schedule}"]
    assert set(seen) == set(expected)
    for parameter, gradient in expected.items():
        assert seen[parameter] == pytest.approx(gradient, abs=1e-6), parameter
