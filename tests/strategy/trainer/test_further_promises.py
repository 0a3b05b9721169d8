"""Further promises of Lightning, of what is used less: on one rank and on two as with a plain Trainer."""

import re

import pytest

from tests.comparing import check
from tests.strategy.trainer.promises import RANKS, run_promises

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run_promises(tmp_path_factory.mktemp("further_promises"), "further")


@pytest.mark.parametrize("rank", RANKS)
def test_hooks_that_are_given_to_callbacks_see_outputs(seen, rank):
    expected = seen["plain_0"]["given_hooks"]
    assert len(expected) == 8
    check(seen[rank]["given_hooks"], expected, "given_hooks")


def test_throughput_is_that_of_a_pipeline_and_not_of_each_of_its_devices(seen):
    said, available = seen["plain_0"]["throughput"]
    assert set(available) == {100.0}
    assert seen["one_0"]["throughput"] == [said, available]
    assert seen["two_0"]["throughput"] == [said, [2 * flops for flops in available]]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(
    "part",
    [
        "of_class",
        "after_fit",
        "predicts_forward",
        "unfreezes",
        "splits",
        "without_samples",
        "saved_before",
        "evaluates_on_gpus",
    ],
)
def test_what_is_left_after_a_step_or_a_fit_is_that_of_one_device(seen, part, rank):
    """Containers of the user's class, streams; copies of the Trainer, threads; parameters that an optimizer has."""
    expected = seen["plain_0"][part]
    if (part, rank) == ("unfreezes", "two_1"):  # the first rank warns
        expected = [[], *expected[1:]]
    check(seen[rank][part], expected, part)


@pytest.mark.parametrize("rank", ["two_0", "two_1"])
def test_checkpoints_are_saved_in_steps_too_and_other_calls_of_all_ranks_are_refused_there(seen, rank):
    *expected, end = seen["plain_0"]["saves_in_steps"]
    *found, refused = seen[rank]["saves_in_steps"]
    check(found, expected, "saves_in_steps")
    assert end == "has come to an end"
    assert re.search(r"lightning_module_state_dict needs all ranks.*Call it in a hook", refused)


def test_one_rank_has_the_whole_module_for_pruning_and_batch_norms_averages(seen):
    check(seen["one_0"]["whole"], seen["plain_0"]["whole"], "whole")


def test_one_rank_runs_a_module_without_layers(seen):
    check(seen["one_0"]["without_layers"], seen["plain_0"]["without_layers"], "without_layers")


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("part", ["fetches", "restores", "scales", "saves_nowhere"])
def test_what_could_fail_does_as_on_one_device(seen, part, rank):
    """dataloader_iter, checkpoints, out of memory on one rank."""
    check(seen[rank][part], seen["plain_0"][part], part)


@pytest.mark.parametrize("rank", RANKS)
def test_evaluation_loads_checkpoints_of_any_number_of_ranks(seen, rank):
    expected = seen["plain_0"]["evaluates_checkpoints"]
    assert expected[0] == expected[4]
    check(seen[rank]["evaluates_checkpoints"], expected, "evaluates_checkpoints")


def test_ranks_do_not_write_state_dicts_that_have_placeholders(seen):
    """Neither in a hook nor after the fit, nor of a part."""
    assert seen["plain_0"]["saves_state_dicts"] == seen["one_0"]["saves_state_dicts"] == ["written"] * 2
    for rank in ("two_0", "two_1"):
        for kind, text in seen[rank]["saves_state_dicts"]:
            assert kind == "ConfigurationError"
            assert re.search(r"placeholders.*gather_module", text, re.DOTALL)


@pytest.mark.parametrize("rank", RANKS)
def test_a_step_without_a_loss_ends_with_lightnings_error(seen, rank):
    number, mapping = seen[rank]["returns_no_loss"]
    ordinary_number, ordinary_mapping = seen["plain_0"]["returns_no_loss"]
    for rule, texts in (
        ("must return a Tensor, a dict, or None", (number, ordinary_number)),
        ("the 'loss' key needs to be present", (mapping, ordinary_mapping)),
    ):
        assert all(rule in text for text in texts)
    assert "got 5.0, a float" in number
    assert "got the keys ['a']" in mapping


@pytest.mark.parametrize("rank", RANKS)
def test_torch_save_is_called_for_checkpoints_alone(seen, rank):
    """As tests of users watch it; what ranks tell each other does not need it."""
    expected = seen["plain_0"]["saves_watched"]
    assert len(expected) == 2
    assert seen[rank]["saves_watched"] == ([] if rank == "two_1" else expected)
