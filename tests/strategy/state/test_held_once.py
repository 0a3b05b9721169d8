"""What no step calls is held by one rank where that is asked for, and is used, saved or refused by name."""

from pathlib import Path

import pytest
import torch

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.launch import of_ranks, run_script

ENCODER = ["encoder.0.bias", "encoder.0.weight", "encoder.1.bias", "encoder.1.weight"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("held_once")
    run_script(Path(__file__).parents[1] / "scripts" / "held_once.py", folder)
    return folder


def test_one_rank_holds_it(folder):
    first, last = of_ranks(folder, 2)
    layers = [
        [f"layers.{layer}.{name}" for layer in stage for name in ("bias", "weight")] for stage in ((0, 1), (2, 3))
    ]
    for where in ("nowhere", "behind", "loop"):
        assert first[where] == layers[0]
        assert last[where] == [*ENCODER, *layers[1], "prior"]


@pytest.mark.parametrize("where", ["nowhere", "behind"])
def test_checkpoints_are_those_of_one_device_whether_a_later_batch_calls_it_or_none(folder, where):
    found, expected = (
        torch.load(folder / f"{where}_{devices}.ckpt", weights_only=True)["state_dict"] for devices in (2, 1)
    )
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_where_it_is_not_it_is_refused_by_name(folder):
    first, last = of_ranks(folder, 2)
    assert first["before"] == last["before"]
    assert "'layers.0', which stage 0 has, is used after 'encoder.1', which stage 1 has" in first["before"]
    assert "hold_uncalled" in first["before"]


def test_hooks_call_what_one_rank_has(folder):
    first, last = of_ranks(folder, 2)
    assert first["hook"] == last["hook"] != 0


def test_a_typing_mistake_is_told_at_once():
    with pytest.raises(ConfigurationError, match="hold_uncalled is 'everywhere' or 'once'; got 'last'"):
        PfoPipelineStrategy(hold_uncalled="last")
