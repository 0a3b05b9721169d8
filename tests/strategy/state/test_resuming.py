"""Checkpoints: saved and resumed in any number of stages, as a file or a folder, with nothing lost when killed."""

import inspect
import json
from pathlib import Path

import lightning
import pytest

from tests.launch import run_script

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "scripts" / "resuming.py"


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resuming")
    run_script(SCRIPT, folder)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("way", ["uninterrupted", "3 to 2"])
def test_any_number_of_stages_goes_on_like_one_device(seen, kind, way):
    check_resumed(seen, f"{kind}, {way}")


@pytest.mark.parametrize("way", ["file, 3 to 1", "file, 1 to 3", "consolidated, 3 to 1"])
def test_one_device_and_the_consolidate_command_read_and_write_the_same_format(seen, way):
    check_resumed(seen, way)


def check_resumed(seen, way):
    expected_losses, expected_rates = seen["uninterrupted"]
    losses, rates = seen["stages"][way]
    assert len(losses) == (8 if "uninterrupted" in way else 4)
    assert losses == pytest.approx(expected_losses[-len(losses) :], abs=1e-6)
    assert rates == expected_rates[-len(rates) :]
    assert len(set(expected_rates)) > 1


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_tensors_divided_over_processes_are_saved_and_resumed_whole(seen, kind):
    """By tensor parallelism and saved as a file, and by FSDP2 and saved in shards."""
    (losses, rates), (expected_losses, expected_rates) = seen["divided"][kind]
    assert len(losses) in (2, 4)
    assert losses == pytest.approx(expected_losses[-len(losses) :], abs=1e-6)
    assert rates == expected_rates[-len(rates) :]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_weights_are_those_of_one_device_and_come_back_to_the_process_that_forked(seen, kind):
    assert sorted(seen[f"weights_{kind}"]) == sorted(seen["weights"])
    for key, values in seen["weights"].items():
        assert seen[f"weights_{kind}"][key] == pytest.approx(values, abs=1e-6), key
    returned = seen[f"returned_{kind}"]
    assert {key: returned[key] for key in seen["weights"]} == seen[f"weights_{kind}"]


def test_shuffling_and_dropout_go_on_as_if_there_had_been_no_interruption(seen):
    losses, _ = seen["random"]
    assert seen["random_resumed"][0] == losses[-4:]


@pytest.mark.parametrize("sharded", [False, True, "async"])
def test_top_k_and_last_are_kept_and_resumed(seen, sharded):
    assert seen[f"files_best_{sharded}"] == [["epoch=0.ckpt", "last.ckpt"], ["epoch=1.ckpt", "last.ckpt"]]
    assert seen[f"last_best_{sharded}"][0] == pytest.approx(seen["uninterrupted"][0][-4:], abs=1e-6)


def test_checkpoints_are_written_beside_training_if_asked(seen):
    assert seen["beside"] == ["gloo"] * 6  # epoch=0, epoch=1 and last, on two ranks


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_only_is_honoured(seen, sharded):
    if "weights_only" not in inspect.signature(lightning.Trainer.fit).parameters:  # Lightning 2.5: loads what there is
        assert seen["weights_only"] == {f"{sharded} None": "loaded" for sharded in (False, True)}
        return
    assert seen["weights_only"][f"{sharded} False"] == "loaded"
    for choice in (None, True):
        assert "weights_only" in seen["weights_only"][f"{sharded} {choice}"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_save_that_is_killed_leaves_the_one_before(seen, kind):
    versions = [version for version, complete in seen["killed"][kind] if complete]
    assert len(versions) == 3
