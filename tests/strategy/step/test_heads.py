"""Heads that are logged, but in the loss of some batches only: they have gradients where they have on one device."""

from pathlib import Path

import pytest
import torch

from tests.launch import of_ranks, run_script

pytestmark = pytest.mark.slow

CASES = (
    "never",
    "later",
    "not later",
    "split backwards",
    "whole batch",
    "replicas",
    "changed in place",
    "divided",
    "cut later",
    "whole batch, more later",
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    run_script(Path(__file__).parents[1] / "scripts" / "heads.py", folder)
    return of_ranks(folder, 4)


@pytest.mark.parametrize("case", CASES)
def test_their_weights_are_those_of_one_device(ranks, case):
    if case not in ranks[0]:
        pytest.skip(f"FSDP2 on CPUs needs a newer torch than {torch.__version__}")
    found, expected = ranks[0][case], ranks[0][f"{case}, one device"]
    assert found["logged"] == pytest.approx(expected["logged"], rel=2e-5)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weights in expected["weights"].items():  # AdamW decays what has gradients of zero
        assert found["weights"][name] == pytest.approx(weights, rel=2e-4, abs=1e-5), name


@pytest.mark.parametrize("case", CASES)
def test_they_have_no_gradients_where_they_have_none_on_one_device(ranks, case):
    if case not in ranks[0]:
        pytest.skip(f"FSDP2 on CPUs needs a newer torch than {torch.__version__}")
    expected = ranks[0][f"{case}, one device"]["without"]
    assert any(expected)
    for rank in ranks:
        held = set(rank[case]["held"])
        assert list(map(set, rank[case]["without"])) == [held.intersection(names) for names in expected]
