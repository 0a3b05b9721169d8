"""Ctrl-C, and steps that raise KeyboardInterrupt or SystemExit: two ranks end together, and save; one launch."""

import json
from pathlib import Path

import pytest
import torch

from tests.launch import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "interrupted.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("interrupted")
    run_script(SCRIPT, folder)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("case", "trained", "ended"),
    [
        ("all", [0, 1, 2, 3], ["SystemExit", 1]),  # Lightning's own end after a KeyboardInterrupt
        ("one", [0, 1, 2, 3], ["SystemExit", 1]),
        ("last", [*range(8)], ["SystemExit", 1]),
        ("validation", [*range(8)], ["SystemExit", 1]),
        ("twice", [0, 1, 2], ["SystemExit", 1]),
        ("step", [0, 1, 2, 3], ["SystemExit", 1]),
        ("exit", [0, 1, 2, 3], ["SystemExit", 7]),
        ("replica", [0, 1, 2, 3], ["SystemExit", 1]),
    ],
)
def test_all_ranks_end_at_the_same_batch_and_both_callbacks_save(found, case, trained, ended):
    for rank in found:
        assert rank[case]["ended"] == ended
        assert rank[case]["trained"] == trained
        assert rank[case]["saved"] == ["exception.ckpt", "model.ckpt"]
        assert rank[case]["status"] == "interrupted"
        assert rank[case]["handler is back"]


def test_an_exit_in_the_first_batch_is_one_in_training(found):
    for rank in found:
        assert (rank["exit at once"]["ended"], rank["exit at once"]["trained"]) == (["SystemExit", 7], [0])
        assert rank["exit at once"]["saved"] == ["exception.ckpt"]


def test_an_evaluation_ends_at_the_same_batch(found):
    assert [rank["validation"]["validated"] for rank in found] == [[0, 1, 2]] * 2


@pytest.mark.parametrize(
    ("case", "steps", "as_one_device"),
    [
        ("all", 4, "alone"),  # interrupted there too, since Lightning does not go on in the middle of a loader
        ("one", 4, "alone"),
        ("last", 8, "whole"),
    ],
)
def test_training_goes_on_behind_the_batch_as_on_one_device(found, case, steps, as_one_device):
    for rank in found:
        assert rank[case]["steps"] == steps
        assert rank[case]["trained"] + rank[case]["resumed"] == rank["whole"]["trained"]
    expected = found[0][as_one_device]["weights"]
    for name, value in found[0][case]["weights"].items():
        assert torch.tensor(value) == pytest.approx(torch.tensor(expected[name]), rel=1e-4, abs=1e-6), name


def test_a_handler_of_the_users_stays(found):
    for rank in found:
        assert (rank["own"]["heard"], rank["own"]["ended"], rank["own"]["trained"]) == (1, None, [*range(8)])


def test_ranks_validate_together_though_their_clocks_differ(found):
    if found[0]["timed"] is None:
        pytest.skip("this Lightning has no val_check_interval as a time")
    for rank in found:
        assert rank["timed"] == {"trained": [*range(8)], "validated": [*range(8)] * 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "first", "other"),
    [
        ("interrupted", "SystemExit: 1", "failed with InterruptedAtOnce: a second Ctrl-C"),
        ("raises", "ValueError: of this rank", "ValueError: of this rank"),  # it has failed, or has ended with it
    ],
)
def test_a_rank_that_ends_while_others_are_in_a_step_does_not_wait_for_them_to_save(tmp_path, case, first, other):
    script = SCRIPT.with_name("ending_alone.py")
    told = run_script(script, tmp_path, case, expect_success=False, fresh=True)
    assert told.returncode != 0
    assert (tmp_path / "rank_1.txt").read_text() == first
    assert "RankDiedError" in (found := (tmp_path / "rank_0.txt").read_text())
    assert other in found
    assert "No checkpoint is saved at this end" in told.stdout
    assert "is ended, because" not in told.stdout  # after half a minute
    assert not [*tmp_path.glob("*.ckpt")]


@pytest.mark.slow
def test_a_rank_whose_script_catches_what_it_alone_has_raised_lets_the_others_not_wait(tmp_path):
    script = SCRIPT.with_name("ending_alone.py")
    told = run_script(script, tmp_path, "caught", expect_success=False, fresh=True)
    assert "Rank 0 is ended, because rank 1" in told.stdout
    assert "failed with ValueError: of this rank" in told.stdout
    first, _, second = (tmp_path / "rank_1.txt").read_text().partition("RankDiedError: ")
    assert first == "ValueError: of this rank"
    assert second.startswith("rank 0 died")
