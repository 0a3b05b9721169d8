"""Evaluations that stages cannot run, and hooks that call the model: as on one device, on every rank."""

import json
from pathlib import Path

import pytest

from tests.launch import of_ranks, run_script

pytestmark = pytest.mark.slow

CASES = (
    "decodes",
    "decides",
    "later",
    "changes arguments",
    "in hooks",
    "both ends on one rank",
    "evaluated first",
    "lends",
    "averages weights",
    "differentiates",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_units")
    run_script(Path(__file__).parents[2] / "scripts" / "by_units.py", folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return of_ranks(folder, 2)


@pytest.fixture(scope="module")
def one_device(folder):
    return json.loads((folder / "one_device.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_they_are_those_of_one_device(ranks, one_device, case):
    expected = one_device[case]
    for found in (rank[case] for rank in ranks):
        assert found["logged"] == pytest.approx(expected["logged"], rel=1e-5)
        assert found["number"] == expected["number"] > 0
        assert found["kept"] == pytest.approx(expected["kept"], rel=1e-5)
        for what in ("found", "predicted"):
            assert [len(each) for each in found[what]] == [len(each) for each in expected[what]]
            for numbers, wanted in zip(found[what], expected[what], strict=True):
                assert numbers == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("case", ["changes arguments", "in hooks"])
def test_what_calls_change_is_looked_at(one_device, case):
    assert len(one_device[case]["found"]) >= 2


def test_ranks_agree_where_layers_draw_random_numbers(ranks, one_device):
    assert ranks[0]["noisy"] == ranks[1]["noisy"]
    assert ranks[0]["noisy"]["found"] != one_device["noisy"]["found"]


def test_errors_of_steps_are_raised_on_all_ranks(ranks, one_device):
    assert [rank["fails"] for rank in ranks] == [one_device["fails"]] * 2 == [{"error": "ValueError: batch 1"}] * 2


def test_calls_in_another_order_are_refused_with_what_tells_them_apart(ranks):
    for rank in ranks:
        said = rank["apart"]["error"]
        assert said.startswith("RanksApartError: ")
        assert "rank 0: a call of 'layers.0' with 'plain'; rank 1: a call of 'layers.0' with 'turned'" in said
        assert "PYTHONHASHSEED=0" in said


def test_it_is_told_that_each_rank_has_all_of_the_model(ranks):
    told = [message for message in ranks[0]["told"] if "uses values or gradients of layers itself" in message]
    assert len(told) == 2  # of the two cases that do
    assert all("each rank runs it, on whole batches, with all parameters" in each for each in told)
    assert "torch.autograd.grad in a step can only differentiate" in told[1]


def test_it_is_told_once_with_the_reason(ranks):
    told = [message for message in ranks[0]["told"] if "cannot be divided into stages" in message]
    assert len(told) == len(set(told))
    assert any("validation step" in message and "'first'" in message and "is used after" in message for message in told)
    assert any("predict step" in message for message in told)
    assert not any("cannot be divided into stages" in message for message in ranks[1]["told"])
