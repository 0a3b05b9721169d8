"""Gradients, noise, checkpoints, texts and whole modules are those of a plain Trainer, on one rank and on two."""

import json
import re
from pathlib import Path

import pytest

from tests.comparing import check
from tests.launch import run_script

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "scripts" / "kept_promises.py"
RANKS = ("one_0", "two_0", "two_1")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept_promises")
    run_script(SCRIPT, folder)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.parametrize(
    ("expected", "ranks"),
    [
        ("plain_0", ["one_0"]),
        ("plain_0", ["two_0", "two_1"]),
        ("ddp_0", ["four_0", "four_1"]),
        ("ddp_1", ["four_2", "four_3"]),
    ],
)
def test_gradients_in_hooks_are_those_of_one_device_and_of_ddp(seen, expected, ranks):
    """Each rank has those of its own layers; with accumulation, and after the backward means of replicas."""
    expected = seen[expected]["gradients"]
    assert len({hook for hook, _ in expected}) == 6
    assert any(gradient is not None for _, gradients in expected for gradient in gradients.values())
    found = [seen[rank]["gradients"] for rank in ranks]
    assert [len(of_rank) for of_rank in found] == [len(expected)] * len(ranks)
    for index, of_ranks in enumerate(zip(*found, strict=True)):
        assert len({hook for hook, _ in of_ranks}) == 1
        together = {name: gradient for _, gradients in of_ranks for name, gradient in gradients.items()}
        check([of_ranks[0][0], together], expected[index], f"gradients[{index}]")


@pytest.mark.parametrize("rank", ["plain_0", *RANKS])
def test_every_batch_of_evaluations_has_noise_of_its_own(seen, rank):
    """In a fit, validation, test and prediction with dropout."""
    for kind, number in (("evaluated", 20), ("predicted", 8)):
        batches = [str(batch) for batch in seen[rank]["noise"][kind]]
        assert len(set(batches)) == len(batches) == number, kind
    for batch in seen[rank]["noise"]["predicted"]:  # nor do microbatches share it
        assert len({str(row) for row in batch}) > 2
    if rank.startswith("two"):
        assert seen[rank]["noise"] == seen["two_0"]["noise"]


@pytest.mark.parametrize("rank", RANKS)
def test_every_batch_of_a_loops_evaluation_has_noise_of_its_own(seen, rank):
    losses, predictions = seen[rank]["noise_in_a_loop"]
    assert len(set(losses)) == 3
    assert len({str(prediction) for prediction in predictions}) == 3
    assert all(len({str(row) for row in prediction}) == 4 for prediction in predictions)


@pytest.mark.parametrize("rank", RANKS)
def test_a_loop_is_stopped_by_all_or_ends_with_the_names_of_places(seen, rank):
    found = seen[rank]["stops"]
    assert len(found["together"]) == 1
    check(found["together"], seen["plain_0"]["stops"]["together"], "together")
    if rank.startswith("two"):
        for case, places in (
            ("begin 1", "rank 0: training step of batch 1; rank 1: after an epoch of training"),
            ("end 0", "rank 0: after an epoch of training; rank 1: after a batch"),
        ):
            kind, text = found[case]
            assert kind == "RanksApartError"
            assert re.search(rf"{places}.*StopIteration", text)


@pytest.mark.parametrize("rank", RANKS)
def test_checkpoints_with_other_names_and_without_optimizer_states_are_loaded(seen, rank):
    """By a `load_state_dict` of the module's own; trained, evaluated and predicted with."""
    expected = seen["plain_0"]["loads_foreign_checkpoints"]
    assert all(names[0] == "part.layers.0.0.bias" and len(losses) == 6 for names, *losses in expected[:3])
    check(seen[rank]["loads_foreign_checkpoints"], expected, "loads_foreign_checkpoints")


@pytest.mark.parametrize("rank", RANKS)
def test_a_step_that_fetches_several_batches_is_refused_by_all(seen, rank):
    assert seen["plain_0"]["fetches_two"] == "has come to an end"
    kind, text = seen[rank]["fetches_two"]
    assert kind == "ConfigurationError"
    assert "fetches one batch from its dataloader_iter; it asks for more" in text


@pytest.mark.parametrize("rank", RANKS)
def test_the_trainer_has_the_callbacks_of_one_device_in_all_hooks(seen, rank):
    """Also behind a ModelCheckpoint, which is the last one."""
    few, many = seen["plain_0"]["lists_callbacks"]
    assert len(few) == len(many) > 10
    assert {names[-1] for names in few + many} == {"ModelCheckpoint"}
    assert seen[rank]["lists_callbacks"] == [few, many]


def test_predictions_are_sent_as_tensors_and_only_to_who_gets_them(seen):
    (whole,) = {sum(found["bytes"]) for found in seen["plain_0"]["sends_predictions"].values()}
    assert whole == 3_520_000
    for gather, senders, getters in (("all", (0, 1), (0, 1)), ("rank0", (1,), (0,)), ("none", (), (1,))):
        for rank in (0, 1):
            found = seen[f"two_{rank}"]["sends_predictions"][gather]
            assert found["objects"] < 20_000
            extra = found["tensors"] - (whole if rank in senders else 0)  # a broadcast is called by all
            assert 0 <= extra < 1_000, (gather, rank)
            assert sum(size or 0 for size in found["bytes"]) == (whole if rank in getters else 0)


def test_what_steps_print_is_said_once_in_order_by_the_first_rank(seen):
    expected = seen["plain_0"]["prints"]
    assert expected[:3] == ["training 0", "between: 0", "trained 0!"]
    assert len(expected) == 36
    assert seen["one_0"]["prints"] == seen["two_0"]["prints"] == expected
    assert seen["two_1"]["prints"] == []


@pytest.mark.parametrize("rank", RANKS)
def test_what_is_dear_to_send_stays_on_the_last_rank_which_says_so_once(seen, rank):
    expected, found = seen["plain_0"]["keeps_much"]["seen"], seen[rank]["keeps_much"]
    assert [number for number, _ in expected] == [3, 3]
    if rank == "two_0":  # which has the rest
        expected = [[0, means] for _, means in expected]
    check(found["seen"], expected, "keeps_much")
    assert len(found["said"]) == (rank == "two_1")
    for text in found["said"]:
        assert re.match(r"A step has left 6 MiB in self\.large, which only the rank of the last stage has", text)


@pytest.mark.parametrize("rank", RANKS)
def test_training_goes_on_while_a_checkpoint_is_written_beside_it(seen, rank):
    """The file waits for later steps; it holds what there was when it was begun."""
    expected, found = seen["plain_0"]["saves_beside"], seen[rank]["saves_beside"]
    assert found["waiting"] == [True]  # until the fourth step had ended
    assert len(found["losses"]) == 6
    check([found["losses"], found["again"]], [expected["losses"], expected["again"]], "saves_beside")
    assert len(found["errors"]) == 1
    assert "no space left" in found["errors"][0]


@pytest.mark.parametrize("place", ["one", "two"])
def test_the_whole_module_is_saved_exported_copied_and_generates_as_that_of_one_device(seen, place):
    expected = seen["plain_0"]["gathers"]
    assert expected["tied"] == [True] * 3
    for kind in ("generated", "logits"):
        for values in expected[kind][1:]:
            check(values, expected[kind][0], kind)
    found = seen[f"{place}_0"]["gathers"]
    assert found["hook"] == pytest.approx(expected["hook"], abs=1e-4)  # a sum over all parameters
    check(found | {"hook": expected["hook"]}, expected, "gathers")
    if place == "two":
        assert seen["two_1"]["gathers"] == [True]


@pytest.mark.parametrize("rank", RANKS)
def test_steps_may_ask_for_optimizers_and_schedules_before_and_after_the_model(seen, rank):
    """Layers are in the stages in which they are called, and what is not called is everywhere."""
    expected, found = seen["plain_0"]["logs_rates"], seen[rank]["logs_rates"]
    assert list(expected["logged"].values()) == pytest.approx([0.1 * 0.5**5] * 3)
    for what in ("seen", "logged"):
        assert found[what] == pytest.approx(expected[what], rel=2e-5)
    assert found["here"] == {"two_0": [False, False, True, True], "two_1": [True, True, False, False]}.get(
        rank, [True] * 4
    )
    assert not found["average"]
