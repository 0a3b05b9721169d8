"""Evaluations whose samples depend on others of the batch run in one piece, and are those of one device."""

import json
from pathlib import Path

import pytest

from tests.comparing import check
from tests.launch import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "compared_samples.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared_samples")
    run_script(SCRIPT, folder)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("plain_0", "two_0", "two_1")}


@pytest.mark.parametrize("kind", ["validated", "tested", "named", "predicted", "rows", "signs", "decoded"])
@pytest.mark.parametrize("rank", ["two_0", "two_1"])
def test_metrics_numbers_and_rows_are_those_of_one_device(runs, rank, kind):
    check(runs[rank]["found"][kind], runs["plain_0"]["found"][kind], kind)


def test_each_such_evaluation_is_told_of_once_and_a_metric_of_training_with_ways_out(runs):
    validated, trained, tested, predicted, rows, decoded = runs["two_0"]["said"]
    assert all(each in validated for each in ("self.mrr", "self.top", "self.far", "in one piece"))
    assert "what self.near computes" in trained
    assert "self.files[3] ('0_0.png' instead of '0_3.png')" in trained
    assert "in on_train_batch_end" in trained
    assert "self.names[3] ('0_0' instead of '0_3')" in tested
    assert all(each in predicted for each in ("output['scores']", "output['ranks']", "in one piece"))
    assert all(each in rows for each in ("'row0' instead of 'row3'", "0_0.png", "in one piece"))
    assert all(each in decoded for each in ("self.names[6] (2 instead of 5)", "in one piece"))
    assert runs["two_1"]["said"] == []
