"""Activations in the host's memory: the device holds less, and nothing else changes. 2 processes, plain torch."""

from pathlib import Path

import pytest

from tests.launch import of_ranks, run_script


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offload")
    run_script(Path(__file__).parents[1] / "scripts" / "offload.py", folder)
    return of_ranks(folder, 2)


@pytest.mark.parametrize("case", ["gpipe", "1f1b", "interleaved_zero_bubble", "autocast"])
def test_losses_and_gradients_are_the_same_to_the_last_bit(ranks, case):
    for seen in ranks:
        kept, away = seen[case]
        assert away["losses"] == kept["losses"]
        assert away["gradients"] == kept["gradients"]
        assert not kept["moved"]


@pytest.mark.parametrize("case", ["gpipe", "autocast"])
def test_the_device_keeps_little_of_microbatches_in_flight(ranks, case):
    for seen in ranks:
        kept, away = seen[case]
        assert away["peak"] < 0.5 * kept["peak"]
        assert away["peak"] + away["away"] >= kept["peak"]


def test_what_is_used_at_once_stays(ranks):
    assert ranks[0]["1f1b"][1]["moved"]
    assert not ranks[1]["1f1b"][1]["moved"]


def test_what_layers_save_alike_is_copied_once(ranks):
    # of a layer the inputs of GELU, dropout's mask is smaller, and of the second linear layer; not weights
    assert ranks[0]["gpipe"][1]["moved"] == 2 * 4 * 2 * 3
