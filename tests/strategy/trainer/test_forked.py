"""Processes that were forked from ranks call what is there, and are refused what takes other ranks; one launch."""

import json
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.trainer.checks import check_configuration
from tests.launch import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "forked.py"
RANKS = ("2_0", "2_1")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forked")
    run_script(SCRIPT, folder)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("1_0", *RANKS)}


def is_refused(said, line="forked.py:"):
    return (
        str(said).startswith("ConfigurationError: A process that was forked from a rank")
        and line in said
        and "num_workers=0" in said
        and "gather_module()" in said
    )


@pytest.mark.parametrize("rank", RANKS)
def test_workers_of_loaders_call_layers_that_are_there_as_on_one_device(seen, rank):
    assert len(seen[rank]["losses"]) == 3
    assert seen[rank]["losses"] == pytest.approx(seen["1_0"]["losses"], abs=1e-6)


def test_one_stage_is_called_as_a_whole(seen):
    assert seen["1_0"]["found"] == pytest.approx(seen["1_0"]["here"])


def test_layers_of_other_ranks_are_refused_and_own_ones_called(seen):
    first, last = (seen[rank]["found"] for rank in RANKS)
    here = seen["1_0"]["here"]
    assert first["first layer"] == pytest.approx(here["first layer"])
    assert last["last layer"] == pytest.approx(here["last layer"])
    assert is_refused(last["first layer"])
    assert is_refused(first["last layer"])
    assert "a call of 'net.4'" in first["last layer"]


@pytest.mark.parametrize(
    "call", ["module", "barrier", "gather_module", "whole_parameters", "save_checkpoint", "clip", "run"]
)
@pytest.mark.parametrize("rank", RANKS)
def test_what_ranks_do_together_is_refused_in_forks(seen, rank, call):
    said = seen[rank]["found"][call]
    line = {"save_checkpoint": "checkpoint_connector.py:", "run": "trainer.py:"}.get(call, "forked.py:")  # Lightning's
    assert is_refused(said, line), said


class ServableModuleValidator(L.Callback):
    """Stands for Lightning's, which takes fastapi and requests."""


@pytest.mark.parametrize("is_divided", [True, False])
def test_a_server_of_the_whole_module_is_refused_where_no_rank_has_that(is_divided):
    trainer = SimpleNamespace(precision_plugin=Precision(), callbacks=[ServableModuleValidator()])
    options = {"synchronises_batch_norm": False, "divides_layers": False, "compiles": False}
    if not is_divided:
        check_configuration(trainer, torch.device("cpu"), is_divided=False, **options)
        return
    with pytest.raises(ConfigurationError, match=r"ServableModuleValidator .*gather_module\(\)"):
        check_configuration(trainer, torch.device("cpu"), is_divided=True, **options)
