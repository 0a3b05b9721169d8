"""Hugging Face models train like one device whatever options of the strategy they are combined with."""

import json
from pathlib import Path

import pytest

from tests.launch import run_script

pytestmark = pytest.mark.slow

pytest.importorskip("transformers", reason="needs transformers, which the dev extra installs")

SCRIPT = Path(__file__).parents[1] / "scripts" / "huggingface_options.py"
DEVICES = {
    "sharded_recomputed": 4,
    "sharded_tied": 4,
    "divided": 4,
    "bf16_mixed": 2,
    "bf16_true": 2,
}
HALF = {"bf16_mixed": 2e-3, "bf16_true": 1e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("huggingface_options")
    run_script(SCRIPT, folder)
    return folder


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def assert_equal(ranks, single, tolerance, weight_tolerance):
    weights = {}
    for seen in ranks:
        assert seen["losses"] == pytest.approx(single["losses"][-len(seen["losses"]) :], abs=tolerance)
        assert seen["dtypes"] == single["dtypes"]
        for name, values in seen["weights"].items():
            assert weights.setdefault(name, values) == values, name  # wherever it is held
    assert set(weights) == set(single["weights"])
    for name, values in single["weights"].items():
        assert weights[name] == pytest.approx(values, abs=weight_tolerance), name


@pytest.mark.parametrize("name", DEVICES)
def test_losses_and_weights_are_those_of_one_device(folder, name):
    single = read(folder, f"{name}_1_0")
    ranks = [read(folder, f"{name}_{DEVICES[name]}_{rank}") for rank in range(DEVICES[name])]
    tolerance = HALF.get(name, 2e-5)
    # Adam makes a step of the learning rate of any gradient, however small: rounding decides its sign near zero
    assert_equal(ranks, single, tolerance, 0.05 if name in HALF else 2e-4)


def test_checkpoints_with_tied_embeddings_load_in_any_number_of_stages(folder):
    single = read(folder, "sharded_tied_1_0")
    assert_equal([read(folder, "resumed_alone_0")], single, 2e-5, 2e-4)
    assert_equal([read(folder, f"resumed_by_two_{rank}") for rank in (0, 1)], single, 2e-5, 2e-4)
