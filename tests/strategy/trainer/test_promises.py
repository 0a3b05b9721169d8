"""What Lightning promises of steps, hooks, loggers and predictions: on one rank and on two as with a plain Trainer."""

import json
import re
from pathlib import Path

import pytest

from tests.comparing import check
from tests.launch import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "promises.py"
RANKS = ("one_0", "two_0", "two_1")
pytestmark = pytest.mark.timeout(600)  # 60 s on an idle machine


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("promises")
    run_script(SCRIPT, folder, timeout_s=500)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("plain_0", *RANKS)}


@pytest.mark.parametrize("rank", RANKS)
def test_hooks_see_outputs_attributes_and_gradients_of_one_device(seen, rank):
    """Also lists that a step appends to, counters, buffers, meters, and values logged over batches."""
    expected = seen["plain_0"]["train"]
    assert {hook[0] for hook in expected["hooks"]} == {"train", "gradients", "epoch", "validation", "outs", "test"}
    check(seen[rank]["train"]["hooks"], expected["hooks"], "hooks")
    check(seen[rank]["train"]["metrics"], expected["metrics"], "metrics")


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


def test_loggers_are_told_once_and_in_order_by_the_first_rank(seen):
    expected = seen["plain_0"]["train"]["calls"]
    assert {call[0] for call in expected} == {"add_scalar", "add_histogram", "log_metrics"}
    check(seen["one_0"]["train"]["calls"], expected, "calls")
    check(seen["two_0"]["train"]["calls"], expected, "calls")
    assert seen["two_1"]["train"]["calls"] == []


@pytest.mark.parametrize("rank", RANKS)
def test_predictions_of_every_kind_are_those_of_one_device(seen, rank):
    expected = seen["plain_0"]["predict"]
    check(seen[rank]["predict"]["predictions"], expected["predictions"], "predictions")
    check(seen[rank]["predict"]["written"], [] if rank == "two_1" else expected["written"], "written")


@pytest.mark.parametrize(("gather", "rank"), [("rank0", 0), ("none", 1)])
def test_one_rank_alone_gets_predictions_and_writes_them(seen, gather, rank):
    has, has_not = (seen[f"two_{index}"][f"predict_{gather}"] for index in (rank, 1 - rank))
    check(has, seen["plain_0"]["predict"], gather)
    assert has_not == {"predictions": [None] * 4, "written": []}


def test_every_batch_of_an_evaluation_has_noise_of_its_own(seen):
    for name, found in seen.items():
        batches = [str(batch) for run in found["noise"]["runs"] for batch in run]
        assert len(set(batches)) == len(batches) == 6, name
    assert seen["two_0"]["noise"] == seen["two_1"]["noise"]


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
@pytest.mark.parametrize("part", ["in_steps", "skips", "fetches", "stops", "restores", "scales", "saves_nowhere"])
def test_what_could_hang_or_fail_does_as_on_one_device(seen, part, rank):
    """Collectives in steps, skipped batches, dataloader_iter, should_stop, checkpoints, out of memory on one rank."""
    check(seen[rank][part], seen["plain_0"][part], part)


@pytest.mark.parametrize("rank", RANKS)
def test_hooks_are_called_in_the_order_of_lightning(seen, rank):
    """Of the module, of callbacks and of a data module; also when a training is resumed, and when a hook fails."""
    assert len(seen["plain_0"]["hooks"]) == 3
    for found, expected in zip(seen[rank]["hooks"], seen["plain_0"]["hooks"], strict=True):
        if rank == "two_1":  # the first process of each node downloads
            expected = [hook for hook in expected if hook != "data.prepare_data"]
        assert found == expected  # the call for a first batch, where the module is split, leaves nothing behind
    first, resumed, failed = map(set, seen["plain_0"]["hooks"])
    assert {"on_fit_start", "training_step", "callback.on_train_batch_end", "test_step", "on_predict_end"} <= first
    assert {"data.on_after_batch_transfer", "data.predict_dataloader", "data.state_dict"} <= first
    assert "data.load_state_dict" in resumed
    assert "data.on_exception" in failed


@pytest.mark.parametrize("rank", RANKS)
def test_evaluation_loads_checkpoints_of_any_number_of_ranks(seen, rank):
    expected = seen["plain_0"]["evaluates_checkpoints"]
    assert expected[0] == expected[4]
    assert expected[0] != seen["plain_0"]["train"]["metrics"]
    check(seen[rank]["evaluates_checkpoints"], expected, "evaluates_checkpoints")


def test_ranks_do_not_write_state_dicts_that_have_placeholders(seen):
    """Neither in a hook nor after the fit, nor of a part."""
    assert seen["plain_0"]["saves_state_dicts"] == seen["one_0"]["saves_state_dicts"] == ["written"] * 2
    for rank in ("two_0", "two_1"):
        for kind, text in seen[rank]["saves_state_dicts"]:
            assert kind == "ConfigurationError"
            assert re.search(r"placeholders.*gather_module", text, re.DOTALL)


@pytest.mark.parametrize("rank", ["two_0", "two_1"])
def test_an_error_of_one_rank_in_a_first_step_is_raised_by_all_at_once(seen, rank):
    kinds = ("fit", "validate", "predict")
    expected = [f"{kind} {failing} a file that this node does not have" for kind in kinds for failing in (0, 1)]
    assert seen[rank]["fails_in_the_trace"] == ["a layer's own mistake", *expected]


@pytest.mark.parametrize("rank", RANKS)
def test_an_error_before_the_model_is_raised_and_saved_by_all(seen, rank):
    errors = seen[rank]["errors"]
    assert errors["FailsBeforeTheModel"] == ["ValueError", "the user's own mistake", True]
    assert errors["LogsTwice"] == seen["plain_0"]["errors"]["LogsTwice"]
    assert "twice in `training_step` with different arguments" in errors["LogsTwice"][1]
    for name in ("LogsNone", "LogsForeignMetric", "LogsInPrediction"):
        kind, text, *rest = seen["plain_0"]["errors"][name]
        assert errors[name] == [kind, text, *rest]
    # the last stage's rank fails, and the first one as well; an error that cannot be sent is quoted
    kind, text, is_saved = errors["FailsAtTheEnd"]
    assert is_saved
    assert kind == ("StepFailedError" if rank == "two_0" else "NotSendableError")
    assert re.search(
        r"on rank 1, which runs the last stage:.*at the end" if rank == "two_0" else "at the end", text, re.DOTALL
    )


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


def test_a_checkpoint_on_exception_does_not_hide_why_the_begin_has_failed(seen):
    for rank in ("two_0", "two_1"):
        kind, text, is_saved = seen[rank]["errors"]["OneLayer"]
        assert kind == "PartitionError"
        assert "1 layer for 2 stages" in text
        assert is_saved


def test_layers_inside_of_a_transform_are_told_of_where_they_are_too_few(seen):
    for rank in ("two_0", "two_1"):
        kind, text, _ = seen[rank]["errors"]["InTransform"]
        assert kind == "PartitionError"
        assert "inside of torch's jvp, which is one layer" in text


def test_ranks_at_different_places_end_with_their_names(seen):
    for rank in (0, 1):
        kind, text, _ = seen[f"two_{rank}"]["errors"]["Leaves"]
        assert kind == "RanksApartError"
        assert "rank 0: after an epoch of training; rank 1: training step of batch 1" in text
