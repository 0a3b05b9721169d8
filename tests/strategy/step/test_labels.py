"""Labels of which some have no part: a loss that is a mean over the others is that of one device, with nothing said."""

from pathlib import Path

import pytest

from tests.launch import of_ranks, run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "labels.py"
OTHER = "on one device, but a pipeline trains on"


def run_on(num_ranks, folder):
    run_script(SCRIPT, folder, num_ranks)
    return of_ranks(folder, num_ranks)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return run_on(1, tmp_path_factory.mktemp("one"))[0]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on(2, tmp_path_factory.mktemp("two"))


WITHOUT_GAPS = {
    "padded": "labels that are not 1 (batch[0], without the first of each sequence)",
    "masked": "labels that are not 0 (batch['mask'])",
    "weighted": "weights or lengths (batch['weights'])",
    "segments": "labels, weighted by class (batch['labels'])",
    "missing": "labels that are finite (batch['labels'])",
    "by class": "labels, weighted by class (batch['labels'])",
    "boxed": "rows (batch[1][*]['boxes'])",
}


NARROW = {
    "named": "labels that are not -100 (batch['labels'])",
    "shifted": "labels that are not -100 (batch[0], without the first of each sequence)",
    "padded": "labels that are not 1 (batch[0], without the first of each sequence)",
    "weighted narrowly": "weights or lengths (batch['weights'])",
    "measured": "weights or lengths (batch['length'])",
    "by class": "labels, weighted by class (batch['labels'])",
}
"""Losses whose own type rounds much."""


NOT_LABELS = ["detected", "twofold", "measured", "measured, alike at first", "masked, alike at first"]
LATER = [
    "detected, none later",
    "none at first",
    "gaps in the fourth",
    "padded later",
    "padded later, beside others",
    "masked later",
    "by class, padded later",
    "reweighted",
    "detected, one in each at first",
    "missing later",
    "unlabelled later",
    "chosen, half of each at first",
    "boxed, alike at first",
    "boxed, none later",
]
"""Batches tell later."""


@pytest.mark.parametrize(
    "case",
    [
        "named",
        "shifted",
        "by sample",
        "by sample, alike at first",
        "of samples",
        "of samples, split by the user",
        "named, split by the user",
        "alike at first",
        "alternating",
        "taking turns",
        *LATER,
        *NOT_LABELS,
        *WITHOUT_GAPS,
    ],
)
def test_losses_and_values_are_those_of_one_device(one_device, ranks, case):
    for found in ranks:
        assert found[case]["losses"] == pytest.approx(one_device[case]["losses"], rel=2e-5)
        assert found[case]["values"] == pytest.approx(one_device[case]["values"], rel=2e-5)
        assert not [text for text in found[case]["said"] if OTHER in text or "put together" in text]


@pytest.mark.parametrize("case", ["weighted in bf16", "weighted, all of bf16"])
def test_rounding_of_layers_hides_no_weights(one_device, ranks, case):
    for found in ranks:
        assert found[case]["losses"] == pytest.approx(one_device[case]["losses"], rel=3e-3)
        assert not [text for text in found[case]["said"] if OTHER in text or "put together" in text]


@pytest.mark.parametrize("case", NARROW)
def test_rounding_of_losses_hides_not_what_they_are_means_over(one_device, ranks, case):
    name, precise = f"{case}, all of bf16", one_device[case.removesuffix(" narrowly")]
    for found in ranks:
        assert found[name]["losses"] == pytest.approx(precise["losses"], rel=1e-2)
        assert found[name]["values"] == pytest.approx(precise["values"], rel=1e-2)
        assert not [text for text in found[name]["said"] if OTHER in text or "put together" in text]
    for kind in ("train", "validation"):
        assert f"Microbatches count by their {NARROW[case]} in {kind} steps." in ranks[0][name]["said"]


def test_which_labels_count_is_said_once_by_the_first_rank(ranks):
    told = [[text for text in found["named"]["said"] if "Microbatches count" in text] for found in ranks]
    assert told[0][-1] == "Microbatches count by their labels that are not -100 (batch['labels']) in train steps."
    assert told[1] == []
    assert "(batch[*]['labels']) in train steps" in " ".join(ranks[0]["by sample"]["said"])
    assert "(batch[0], without the first of each sequence)" in " ".join(ranks[0]["shifted"]["said"])
    assert "Microbatches count" not in " ".join(ranks[0]["of samples"]["said"])


@pytest.mark.parametrize("case", WITHOUT_GAPS)
def test_padding_masks_and_weights_count_where_they_give_the_loss_of_one_device(ranks, case):
    assert f"Microbatches count by their {WITHOUT_GAPS[case]} in train steps." in ranks[0][case]["said"]


def test_microbatches_with_as_many_labels_each_are_weighed_from_the_first_batch_on(ranks):
    for case in ("alike at first", "mild"):
        (said,) = (text for text in ranks[0][case]["said"] if "count by their labels" in text and "train" in text)
        assert said == "Microbatches count by their labels that are not -100 (batch['labels']) in train steps."


def test_losses_that_hardly_tell_are_weighed_by_what_their_gradients_tell(one_device, ranks):
    for found in ranks:
        assert found["mild"]["losses"] == pytest.approx(one_device["mild"]["losses"], rel=2e-3)


def test_losses_of_two_kinds_have_their_own_weights(ranks):
    said = [text for text in ranks[0]["alternating"]["said"] if "train" in text]
    assert len(said) == 1
    assert "with a loss that is made as this batch's is" in said[0]


def test_a_loss_that_becomes_a_sum_is_told_with_its_first_batch(ranks):
    (said,) = (text for text in ranks[0]["changing"]["said"] if OTHER in text)
    assert said.startswith("The loss of training batch 5 is ")
    assert "so the loss is a sum" in said


def test_replicas_decide_by_their_own_samples(tmp_path):
    ranks = run_on(4, tmp_path)
    (said,) = (text for text in ranks[0]["replicas, alternating"]["said"] if "as this batch's" in text)
    assert "others before with such a loss, may have counted otherwise" in said
    assert any("From batch 4 on microbatches count by" in text for text in ranks[0]["replicas, in the fourth"]["said"])
    twice = {"replicas, twice", "replicas, twice, divided"} & ranks[0].keys()
    for found in ranks:
        assert all(found[case]["losses"] == pytest.approx(found["replicas, twice"]["losses"]) for case in twice)
    for case in ranks[0].keys() - {"replicas, alternating", "replicas, in the fourth"} - twice:
        told = " ".join(ranks[0][case]["said"])
        assert "Microbatches count by their labels that are not -100 (batch['labels']) in train steps." in told
        assert OTHER not in told
