"""What is said of the first training batch: losses that do not suit microbatches, and losses that are NaN."""

import json
import math
import re
from pathlib import Path

import pytest

from tests.launch import run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "first_batch.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first_batch")
    run_script(SCRIPT, folder)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    "case",
    [
        "mean",
        "noise",
        "called twice",
        "one sample each",
        "sum, unchecked",
        "whole batch",
        "sum, only by microbatches",
        "whole, contrastive",
        "whole, experts",
        "whole, noise before",
    ],
)
def test_nothing_is_said_of_what_suits_microbatches(ranks, case):
    for found in ranks:
        assert found[case]["said"] == []
        assert "error" not in found[case]
        assert len(found[case]["losses"]) == 2


def test_gradients_of_a_model_that_is_called_twice_are_compared(ranks):
    (said,) = ranks[0]["called twice, by themselves"]["said"]
    assert "its gradients are not the mean of theirs" in said


def test_batch_norms_are_told_of_once_by_the_first_rank(ranks):
    case = "dropout, batch norm"
    assert len(ranks[0][case]["losses"]) == len(ranks[1][case]["losses"]) == 2
    (said,) = ranks[0][case]["said"]
    assert ranks[1][case]["said"] == []
    assert re.match(r"A batch norm normalises microbatches of \d samples, not the batch of \d+.*deferred", said)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("sum", "4 times as large, so the loss is a sum"),
        ("sum of noise", "4 times as large, so the loss is a sum"),
        ("sum, large outputs", r"\(the first 2 of 4\).*It is 2 times as large, so the loss is a sum"),
        ("sum, whole batch too large", r"\(the first 2 of 4\).*It is 2 times as large, so the loss is a sum"),
        ("sum in one replica", "4 times as large, so the loss is a sum"),
        ("contrastive, one sample each", "It is 0 on every microbatch"),
        ("contrastive", "compares the samples"),
        ("sum of gradients", "compares the samples"),
        ("one for each sample", r"is one number; here it has the shape \(\d,\).*loss\.mean\(\)"),
        ("not two-dimensional", "compares the samples"),
    ],
)
def test_what_no_weights_explain_is_an_error_on_every_rank(ranks, case, said):
    for found in ranks:
        assert re.match(f"ConfigurationError: .*{said}", found[case]["error"])
        assert found[case]["losses"] == []
    assert ranks[0][case]["error"] == ranks[1][case]["error"]


def test_what_the_whole_batch_cannot_mend_is_an_error_on_every_rank(ranks):
    for found in ranks:
        early, late = (found[f"whole, {case} too early"]["error"] for case in ("compared", "backwards"))
        assert re.match(r"ConfigurationError: .* on one device, but .* joined by loss_over='batch'", early)
        assert re.match(r"ConfigurationError: .*schedule='1f1b' goes backward earlier. Use schedule='gpipe'", late)
        for case, said in (
            ("noise needed later", "random numbers that the step itself draws"),
            ("failing loss", "This loss fails."),
            ("failing layer", "This layer fails."),
        ):
            assert said in found[f"whole, {case}"]["error"]
            assert found[f"whole, {case}"]["losses"] == []


def test_a_layer_that_returns_something_else_in_eval_mode_is_compared_in_training_mode(ranks):
    first, second = (found["sum, other in eval"] for found in ranks)
    (said,) = first["said"]
    assert "so the loss is a sum" in said
    assert second["said"] == []
    assert first["losses"]


def test_without_a_loss_nobody_waits_for_the_comparison(ranks):
    for found in ranks:
        assert "has returned None. Return a loss" in found["no loss"]["error"]


def test_a_loss_that_cannot_be_compared_is_told_of_once_by_the_first_rank(ranks):
    first, second = (found["sum, not forward only"] for found in ranks)
    (said,) = first["said"]
    assert "so its loss is not compared" in said
    assert second["said"] == []
    assert first["losses"]


@pytest.mark.parametrize("case", ["labels with gaps", "class weights"])
def test_a_mean_over_what_is_no_padding_or_weighted_by_class_is_found(ranks, case):
    for found in (each[case] for each in ranks):
        assert found["said"] == []
        assert found["losses"][0] == pytest.approx(ranks[0][f"whole, {case}"]["losses"][0], rel=1e-5)


@pytest.mark.parametrize("case", ["time first", "experts"])
def test_what_weights_may_explain_is_a_warning_said_once(ranks, case):
    first, second = (found[case] for found in ranks)
    assert len(first["said"]) == 1
    assert second["said"] == []
    assert first["losses"] == second["losses"]
    assert f"which is {first['losses'][0]:.6g} " in first["said"][0]  # these steps have no dropout


def test_losses_that_balance_experts_are_told_of_though_they_differ_little(ranks):
    (said,) = ranks[0]["experts"]["said"]
    on_one_device, on_stages = (float(ranks[0][case]["losses"][0]) for case in ("whole, experts", "experts"))
    assert 1e-4 < abs(on_one_device - on_stages) / on_one_device < 4e-4
    assert f"is {on_one_device:.6g} on one device" in said
    assert "balance the load of experts" in said
    assert "loss_over='batch'" in said


def test_labels_with_gaps_that_come_later_are_told_of_once_by_the_first_rank(ranks):
    first, second = (found["gaps later, samples"] for found in ranks)
    (said,) = first["said"]
    assert second["said"] == []
    assert re.match(r"The loss of training batch 2 is \d.*which is nan .*microbatch_weight='tokens'", said)
    assert math.isnan(second["losses"][1])
    for found in ranks:
        assert found["gaps later, labels"]["said"] == []
        assert all(map(math.isfinite, found["gaps later, labels"]["losses"]))


def test_a_mask_that_comes_later_is_told_of_once_by_the_first_rank(ranks):
    first, second = (found["mask later"] for found in ranks)
    assert second["said"] == []
    (said,) = first["said"]
    assert re.match(
        r"From batch 16 on microbatches count by their labels that are not 9 .*microbatch_weight=\.\.\.", said
    )
    (said,) = ranks[0]["hardest"]["said"]
    assert said.startswith("The loss of training batch 2 is ")
    (said,) = ranks[0]["mask soon"]["said"]
    assert said.startswith("From batch 4 on microbatches count by their labels that are not 9 ")
    assert ranks[0]["noise later"]["said"] == ranks[1]["noise later"]["said"] == []


def test_nothing_of_the_comparison_remains(ranks):
    for found in ranks:
        checked, unchecked = found["stateful"]
        assert checked == unchecked
    assert ranks[1]["stateful"][0][1] == 17  # steps, as on one device; the first and the sixteenth are looked at


def test_a_loss_that_is_nan_is_an_error_on_every_rank_unless_data_or_parameters_are(ranks):
    for found in ranks:
        nan = found["nan"]
        assert re.match(r"ConfigurationError: .*is NaN \(of microbatches 0, 1, 2, 3\), although", nan["loss"][0])
        assert re.match(r"ConfigurationError: .*is NaN \(of microbatches 1, 3\), although.*-100", nan["microbatch"][0])
        assert all(math.isnan(nan[case][0]) for case in ("batch", "form", "array"))
        assert math.isnan(nan["parameters"][0])
        assert nan["infinite"] == [math.inf]
    assert all("the batch has 1 of 48 values" in ranks[0]["nan"][case][1] for case in ("batch", "form", "array"))
    assert "module.2.weight" in ranks[0]["nan"]["parameters"][1]
    assert len(ranks[1]["nan"]["batch"]) == 1
