"""What Lightning promises of steps, hooks, loggers and predictions: on one rank and on two as with a plain Trainer."""

import re

import pytest

from tests.comparing import check
from tests.strategy.trainer.promises import RANKS, run_promises

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run_promises(tmp_path_factory.mktemp("promises"), "first")


@pytest.mark.parametrize("rank", RANKS)
def test_hooks_see_outputs_attributes_and_gradients_of_one_device(seen, rank):
    """Also lists that a step appends to, counters, buffers, meters, and values logged over batches."""
    expected = seen["plain_0"]["train"]
    assert {hook[0] for hook in expected["hooks"]} == {"train", "gradients", "epoch", "validation", "outs", "test"}
    check(seen[rank]["train"]["hooks"], expected["hooks"], "hooks")
    check(seen[rank]["train"]["metrics"], expected["metrics"], "metrics")


def test_loggers_are_told_once_and_in_order_by_the_first_rank(seen):
    expected = seen["plain_0"]["train"]["calls"]
    assert {call[0] for call in expected} == {"add_scalar", "add_histogram", "log_metrics"}
    check(seen["one_0"]["train"]["calls"], expected, "calls")
    check(seen["two_0"]["train"]["calls"], expected, "calls")
    assert seen["two_1"]["train"]["calls"] == []


def test_what_a_logger_returns_is_given_to_it_and_asked_and_entered_as_on_one_device(seen):
    expected = seen["plain_0"]["handles"]["Handles"]
    assert len(expected) == 4 * 24
    for rank in RANKS:
        check(seen[rank]["handles"]["Handles"], [] if rank == "two_1" else expected, rank)


@pytest.mark.parametrize("rank", ["one_0", "two_0"])
def test_what_a_logger_returns_to_microbatches_that_say_other_things_is_used_by_each(seen, rank):
    calls = seen[rank]["handles"]["HandlesApart"]
    for_each, for_all = ["create"] * 6 + ["write"] * 3, ["create", "enter", "exit", "enter", "exit"]
    short, single = ["create", "create", "write", *for_all], ["create", "write"]  # the first microbatch says less
    expected = [*3 * (for_each + for_all), *short, *short, *single]
    assert [call[0] for call in calls] == expected
    written = [call for call in calls if call[0] == "write" and isinstance(call[2][0], str)]
    assert len(written) == 11
    assert all(given == f"{name}/1" for _, name, (given,), _ in written)
    assert len({name for _, name, *_ in written[:3]}) == 3
    assert len({name for _, name, *_ in written[-2:]}) == 2


@pytest.mark.parametrize("rank", RANKS)
def test_a_step_that_must_know_at_once_what_a_logger_returns_is_told_its_line(seen, rank):
    lines = {
        "WantsBool": "return 1 if run.create() else 0",
        "WantsInt": "return int(run.id)",
        "WantsText": 'return f"{run.create()}"',
        "WantsItems": 'return [item for item in run["items"]]',
        "WantsEqual": 'return run.create().id == "run/1"',
        "WantsSum": "return run.made + 1",
        "WantsMore": "self.text = torch.zeros(2) * run.made",
        "WantsLogged": 'self.log("made", run.made)',
        "WantsLater": 'self.kept.write("later")',
    }
    for name, line in lines.items():
        kind, text = seen[rank]["handles"][name]
        assert (kind, line in text) == ("ConfigurationError", True), (name, kind, text)


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


def test_a_rank_that_calls_the_model_alone_in_a_hook_is_told_so_and_nothing_of_texts(seen):
    for rank in (0, 1):
        kind, text, _ = seen[f"two_{rank}"]["errors"]["CallsAlone"]
        assert kind == "RanksApartError"
        assert re.search(r"rank 0: a call of .*; rank 1: after an epoch of training.*not on the main process", text)
        assert "PYTHONHASHSEED" not in text


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("part", ["in_steps", "skips", "stops"])
def test_what_could_hang_or_fail_does_as_on_one_device(seen, part, rank):
    """Collectives in steps, skipped batches, should_stop."""
    check(seen[rank][part], seen["plain_0"][part], part)


@pytest.mark.parametrize("rank", ["two_0", "two_1"])
def test_an_error_of_one_rank_in_a_first_step_is_raised_by_all_at_once(seen, rank):
    kinds = ("fit", "validate", "predict")
    expected = [f"{kind} {failing} a file that this node does not have" for kind in kinds for failing in (0, 1)]
    assert seen[rank]["fails_in_the_trace"] == ["a layer's own mistake", *expected]
