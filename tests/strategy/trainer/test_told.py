"""What users are told of their hooks and steps: norms of one rank, objects of libraries that are changed, files."""

import json
import re
from pathlib import Path

import pytest

from tests.launch import run_script

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "scripts" / "told.py"


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("told")
    run_script(SCRIPT, folder)
    for number in (1, 2):  # as many lines as microbatches
        assert (folder / str(number) / "added.txt").read_text().split() == ["0", "0", "1", "1"] * 2
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("1_0", "2_0", "2_1")}


@pytest.mark.parametrize(
    ("case", "name"),
    [("OfLightning", "grad_norm"), ("ByHand", "on_after_backward")],
)
def test_a_norm_of_one_ranks_gradients_is_named_once_with_its_line(said, case, name):
    for rank in ("2_0", "2_1"):
        (text,) = said[rank][case]
        assert re.match(rf"{name} \(.*told\.py, line \d+\).*trainer\.strategy\.grad_norm\(\)", text)
    assert said["1_0"][case] == []


def test_lines_that_read_the_number_of_processes_are_named_once(said):
    assert said["1_0"]["Counts"] == said["2_1"]["Counts"] == []
    names = [
        re.search(r"told\.py:\d+: .* reads ([\w.()]+), which is 2, .*data_parallel_size", t)[1]
        for t in said["2_0"]["Counts"]
    ]
    assert sorted(names) == [
        "torch.distributed.get_world_size()",
        "trainer.num_devices",
        "trainer.strategy.world_size",
        "trainer.world_size",
    ]


def test_a_line_that_looks_at_an_optimizers_state_in_the_step_is_named_once(said):
    (text,) = said["2_1"]["LooksAtState"]
    assert re.search(r"told\.py:\d+: .*optimizer\.state.* looks at the state of an optimizer", text)
    assert said["1_0"]["LooksAtState"] == said["2_0"]["LooksAtState"] == []


def test_of_layers_whose_buffers_are_those_of_one_device_nothing_is_said(said):
    assert [found["Iterates"] for found in said.values()] == [[], [], []]


def test_numbers_that_are_zero_at_first_are_looked_at_again(said):
    for rank, number in (("1_0", 1), ("2_0", 1), ("2_1", 0)):
        assert len(said[rank]["ZeroAtFirst"]) == number
        assert all(re.search(r"neither their mean nor.*'spread'", text) for text in said[rank]["ZeroAtFirst"])


def test_numbers_that_microbatches_do_not_have_are_named(said):
    for rank in ("1_0", "2_0"):
        (text,) = said[rank]["NoneInSome"]
        assert re.search(r"'few' \(nan instead of -?\d", text)


def test_a_buffer_that_the_step_moves_between_layers_is_named_once_with_a_way_out(said):
    assert [len(found["Codebook"]) for found in said.values()] == [1, 1, 0]  # on the rank that has its values
    assert re.search(
        r"buffer self\.sums between layers.*each of 2 microbatches.*on_train_b", said["2_0"]["Codebook"][0]
    )
    for rank in ("1_0", "2_0"):  # a warning, since in evaluation mode nothing is wrong
        assert re.match(r"The loss of the first batch is .*No weights", said[rank]["FarCodebook"][0])
    (text,) = said["2_0"]["SumsAtTheEnd"]
    assert re.search(r"neither their mean nor their sum.*self\.sums", text)
    assert [found["CodebookInAHook"] for found in said.values()] == [[], [], []]


def test_a_buffer_that_an_evaluation_changes_is_named_once_with_a_way_out(said):
    assert [len(found["TicksInValidation"]) for found in said.values()] == [1, 1, 0]
    text = said["2_0"]["TicksInValidation"][0]
    assert re.search(r"buffer self\.layers\.0\.0\.ticks .*each of 2 microbatches.*on_validation_batch_end", text)


def test_torchs_clipping_knows_all_stages_in_hooks(said):
    assert [found["OfTorch"] for found in said.values()] == [[], [], []]
    for rank in ("2_0", "2_1"):
        assert re.search(r"error: A step calls .*clip_grad_norm_.*gradient_clip_val", said[rank]["InStep"][-1])
        assert re.search(r"rank 0: clip_gradients; rank 1: torch\.nn\.utils\.clip_grad_norm_", said[rank]["Alone"][0])


def test_nothing_is_said_of_optimizers_and_of_norms_over_all_stages(said):
    assert [found["ByItself"] for found in said.values()] == [[], [], []]


def test_nothing_is_said_of_what_rounding_leaves(said):
    assert [found["Keeps"] for found in said.values()] == [[], [], []]


def test_objects_of_libraries_that_a_step_changes_are_named_once(said):
    for rank in ("1_0", "2_1"):
        names = [re.match(r"A step changes self\.(\w+), of ", text)[1] for text in said[rank]["OfLibraries"]]
        assert sorted(names) == ["file", "numbers", "table"]
    assert said["2_0"]["OfLibraries"] == []  # which runs the step up to its own layers


@pytest.mark.parametrize(("case", "what"), [("Sends", r"self\.echo\.send"), ("Reads", r"self\.files\[0\]\.read")])
def test_what_moves_an_iterator_by_more_than_an_item_is_refused(said, case, what):
    for rank in ("1_0", "2_0", "2_1"):
        assert re.search(rf"error: .*A step calls {what}\(\.\.\.\).*before the step", said[rank][case][-1], re.DOTALL)


def test_a_text_that_one_device_says_otherwise_is_named_once(said):
    for rank in ("1_0", "2_1"):
        (text,) = said[rank]["Prints"]
        assert re.search(r"A step says '3 samples' by print\..*after the step", text)


def test_files_that_a_step_opens_to_write_are_named_once(said):
    for rank in ("1_0", "2_0", "2_1"):
        texts = said[rank]["Opens"]
        assert [re.search(r"(\w+\.\w+)' to write \(.*told\.py, line \d+\)", text)[1] for text in texts] == [
            "added.txt",
            "array.npy",
            "loss.pt",
        ]
