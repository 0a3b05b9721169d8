"""An Accelerate loop on a pipeline of two processes, compared with the same loop on one."""

import json
from pathlib import Path

import pytest

from tests.launch import run_script

SCRIPT = Path(__file__).parent / "scripts" / "equality.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerate")
    run_script(SCRIPT, folder)
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    return [json.loads((folder / f"{name}.json").read_text()) for name in ("single_0", "pipeline_0", "pipeline_1")]


def assert_equal_histories(mine, theirs, tolerance=2e-5):
    assert set(mine) == set(theirs)
    for key in theirs:
        for one, other in zip(mine[key], theirs[key], strict=True):
            assert one == pytest.approx(other, abs=tolerance), key


def test_the_loop_trains_like_on_one_process(runs):
    """Accumulation with an uneven end, clipping, LR schedule, shuffling, groups made before, a frozen layer."""
    single, *ranks = (run["fp32"] for run in runs)
    assert len(single["loss"]) == 2 * 7
    assert len(single["norm"]) == 2 * 4
    assert max(single["norm"]) > 0.3  # so clipping did something
    assert single["accuracy"][0][1] == 37
    for rank in ranks:
        assert_equal_histories(rank, single)


def test_weights_are_gathered_under_the_models_own_names(runs):
    single, first, second = runs
    assert list(first["weights"]) == list(single["weights"]) == first["names"]
    for name, weights in single["weights"].items():
        assert first["weights"][name] == pytest.approx(weights, abs=2e-5), name
    assert second["weights"] == {}


def test_a_checkpoint_of_one_process_goes_on_in_a_pipeline(runs):
    single, *ranks = runs
    uninterrupted = {key: values[len(values) // 2 :] for key, values in single["fp32"].items()}
    for run in (single, *ranks):
        assert_equal_histories(run["from_single"], uninterrupted)


def test_a_checkpoint_of_a_pipeline_goes_on_in_one_process(folder, runs):
    resumed = json.loads((folder / "resumed.json").read_text())
    assert_equal_histories(resumed, runs[0]["from_single"])


def test_a_resumed_pipeline_draws_the_same_random_numbers(runs):
    for run in runs[1:]:
        uninterrupted, resumed = run["dropout"]
        for key in ("loss", "norm", "val"):
            assert resumed[key] == uninterrupted[key][-len(resumed[key]) :], key


def test_bf16_mixed_precision(runs):
    """Sums of gradients are rounded differently for microbatches; the precision itself is the same."""
    single, *ranks = runs
    for rank in ranks:
        assert_equal_histories(rank["bf16"], single["bf16"], tolerance=5e-3)
        assert rank["bf16_dtypes"] == single["bf16_dtypes"] == ["torch.bfloat16"]
        assert rank["dtypes"] == ["torch.float32"]
        assert rank["bf16_logits"] == single["bf16_logits"] == "torch.float32"


def test_fp16_mixed_precision_skips_steps_together(runs):
    """In each epoch the first stage alone overflows once; the scale doubles after three good steps."""
    single, *ranks = runs
    half = len(single["fp16"]["loss"]) // 2
    assert single["fp16"]["skipped"][:half] == [False, False, False, True, True, False, False]
    assert single["fp16"]["scale"][:half] == [2.0**12, 2.0**12, 2.0**12, 2.0**11, 2.0**11, 2.0**11, 2.0**11]
    assert single["fp16_dtypes"] == ["torch.float16"]
    resumed = {key: values[len(values) // 2 :] for key, values in single["fp16"].items()}
    for rank in ranks:
        assert rank["fp16_dtypes"] == single["fp16_dtypes"]
        for mine, theirs in ((rank["fp16"], single["fp16"]), (rank["fp16_from_single"], resumed)):
            assert mine["skipped"] == theirs["skipped"]
            assert_equal_histories(mine, theirs, tolerance=2e-3)
