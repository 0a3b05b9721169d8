"""Later batches and evaluations that do other things than the first batch: as on one device, or refused by name."""

import json
import re
from pathlib import Path

import pytest

from tests.launch import of_ranks, run_script

pytestmark = pytest.mark.slow

ALIKE = (
    "Use it in the same way in training from the first batch on (in a loop of your own in that of example_batch=), if "
    "only times 0 in the loss."
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("later_batches")
    output = run_script(Path(__file__).parents[1] / "scripts" / "later_batches.py", folder).stdout
    return json.loads((folder / "one_device.json").read_text()), of_ranks(folder, 4), output


EARLY = ["log", "number", "loss"]
LATE = [f"late {use}" for use in ("log", "number", "return", "keep", "loss")]
NUMBERS = ["rare numbers", "zero numbers", "alike numbers", "counts"]
STATES = [
    "two views after validation",
    *("is copied", "is anchored", "curriculum", "cells", "cells, prepared", "in the second dimension"),
    *("in the second dimension, prepared", "memory", "rows of one", "small at first", "goes on", "pairs", "bank"),
]


@pytest.mark.parametrize(
    "case",
    [
        *("switched back", "calls less", "predicted", "validated", "differentiates", "tied in a hook"),
        *EARLY,
        *LATE,
        *NUMBERS,
        *STATES,
    ],
)
def test_they_are_equal_to_one_device(results, case):
    expected, ranks, _ = results
    assert expected[case]
    for found in ranks:
        assert found["found"][case] == pytest.approx(expected[case], rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("use", ["number", "loss"])
def test_weights_of_a_later_stage_are_refused_on_all(results, use):
    for found in results[1]:
        assert ALIKE in found["refused"][use]
        assert "'layers.5.linear.weight'" in found["refused"][use]


def test_an_uncalled_module_with_tied_weights_is_refused_by_name(results):
    _, ranks, _ = results
    for found in ranks:
        refused = found["refused"]["tied late"]
        assert "'head', which stage 0 has" in refused
        assert (
            "has not called 'head', so that its 'layers.0.linear.weight' is only where other modules use it" in refused
        )
        assert ALIKE in refused


def test_of_rows_that_are_those_of_one_device_nothing_is_said(results):
    assert "self.bank" not in results[2]
    assert "self.kept" not in results[2]


def test_a_short_batch_whose_microbatches_have_other_losses_is_told_of(results):
    assert re.search(r"The loss of training batch 5 is \S+ on one device, but", results[2])


def test_weights_that_a_hook_ties_over_stages_are_refused_by_name(results):
    said = "'head.weight' has become 'layers.0.linear.weight' since"
    assert said in results[2]  # also of the comparison before
    for found in results[1]:
        refused = found["refused"]["tied in a hook"]
        assert said in refused
        assert "Tie them before: in __init__, configure_model or setup" in refused


def test_a_refusal_says_that_the_look_at_the_first_batch_lacked_what_hooks_set(results):
    for found in results[1]:
        refused = found["refused"]["hook, order"]
        assert "AttributeError: 'SetInHook' object has no attribute 'rate', at " in refused
        assert "rate = self.rate" in refused
        assert "set it in __init__ too" in refused


def test_parameters_that_come_while_it_trains_are_refused_by_name(results):
    for found in results[1]:
        assert "'layers.5.linear.weight', 'layers.5.linear.bias' came later" in found["refused"]["grows"]


def test_what_a_loss_needs_is_not_to_be_changed_in_place(results):
    for found in results[1]:
        assert "compute with a copy of it (loss / self.scale.clone())" in found["refused"]["in place"]
        assert "modified by an inplace operation" in found["refused"]["in place"]


def test_scripted_layers_are_refused_by_name(results):
    for found in results[1]:
        assert "'layers.1.linear' is one (Linear)" in found["refused"]["scripted"]


def test_a_backward_in_an_automatic_step_is_refused_with_its_line(results):
    for found in results[1]:
        refused = found["refused"]["attacks"]
        assert "it calls backward() itself: " in refused
        assert "later_batches.py" in refused


def test_a_step_that_calls_more_than_before_or_finds_what_it_left_is_compared_again(results):
    assert results[2].count("The loss of training batch 2 is ") == 2


def test_a_state_without_rows_is_told_of_where_it_first_counts(results):
    assert results[2].count("This step keeps something for the next batch, and each microbatch finds all of it") == 1


def test_gradients_are_handed_out_once(results):
    for found in results[1]:
        assert "this is another backward on its loss" in found["refused"]["backwards"]


def test_a_first_batch_has_gradients_where_layers_differentiate(results):
    assert "does not require grad" not in results[2]


@pytest.mark.parametrize("number", ["error", "late error"])
def test_a_logged_number_that_becomes_another_one_is_told_of(results, number):
    told = rf"put together by another rule from here on: [^)]*'{number}' \([^)]*; now: largest"
    assert len(re.findall(told, results[2])) == 1


def test_a_weight_that_ranks_hold_together_is_kept_alike_where_noise_is_added_to_gradients(results):
    of_ranks = [found["noisy"] for found in results[1]]
    first, *_, last = of_ranks
    assert len(first) == 3
    assert first[1] == pytest.approx(last[1], rel=1e-6)
    assert first[2] == pytest.approx(last[2], rel=1e-6)
    assert of_ranks[1] == [0.0] * 3
    assert results[2].count("'layers.0.linear.weight': ranks 0, 3 hold this weight, and no longer alike.") == 1
