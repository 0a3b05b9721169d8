"""The look at the first batch takes it through all hooks on its way to the device, and leaves nothing in them."""

import json
from pathlib import Path

import pytest

from tests.launch import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "batch_hooks.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batch_hooks")
    run_script(SCRIPT, folder)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.parametrize("rank", ["2_0", "2_1"])
@pytest.mark.parametrize("case", ["NamedBefore", "NamedAfter", "InRows", "Takes"])
def test_batches_train_in_the_form_that_hooks_give_them(runs, case, rank):
    assert runs[rank][case]["losses"] == pytest.approx(runs["1_0"][case]["losses"], abs=2e-5)


@pytest.mark.parametrize("rank", ["2_0", "2_1"])
def test_hooks_of_a_data_module_note_each_batch_once(runs, rank):
    assert runs["1_0"]["Takes"]["noted"][0] == {"before": 5, "transfer": 5, "after": 5}
    assert runs[rank]["Takes"]["noted"] == runs["1_0"]["Takes"]["noted"]
