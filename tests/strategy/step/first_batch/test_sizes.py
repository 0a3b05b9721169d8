"""Steps that fail because microbatches are smaller than their batch say so, and run where they are given all of it."""

import json
import re
from pathlib import Path

import pytest

from tests.launch import of_ranks, run_script

pytestmark = pytest.mark.slow

LINES = {
    "AtTheEnd": "] = output.detach()",
    "RightBehindTheLayers": "] = batch[0]",
    "AtTheBegin": "first, *others = torch.chunk(batch[0], len(batch[0]) // 4)",
    "SharedByAll": "matrix = batch[1].view(4, 2)",
    "InTheMiddle": "+ torch.zeros(8, 1)",
    "InALayer": "x.view(8, -1))",
    "InManualOptimization": "first, *others = torch.chunk(batch[0], len(batch[0]) // 4)",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes")
    run_script(Path(__file__).parents[2] / "scripts" / "sizes.py", folder)
    return json.loads((folder / "one_device.json").read_text()), *of_ranks(folder, 2)


def is_told(found, case):
    kind, text, cause = found
    said = r"each of the 4 microbatches of .* on a microbatch of 2 of 8 samples it fails with RuntimeError: .*"
    assert kind == "ConfigurationError"
    assert re.search(rf"{said}sizes\.py:\d+: .*{re.escape(LINES[case])} .*num_microbatches=1", text)
    assert cause in ("RuntimeError", "ConfigurationError")
    return "loss_over='batch'" in text


def is_as_on_one_device(found, case, how):
    (weights, seen), own, other = found[0][case], found[1][how], found[2][how]
    assert own[0] == [pytest.approx(values, rel=1e-4, abs=1e-6) for values in weights]
    assert own[1] == other[1] == pytest.approx(seen, rel=1e-4)


@pytest.mark.parametrize("case", LINES)
def test_a_step_that_counts_on_the_size_of_the_batch_is_told_of_with_ways_out_that_hold(found, case):
    for rank in found[1:]:
        assert is_told(rank[case], case) == (case == "AtTheEnd")
    is_as_on_one_device(found, case, f"{case}, one")


def test_what_all_samples_share_is_told_of_with_a_way_out_that_holds(found):
    for rank in found[1:]:
        assert "(weights of 8 classes), is divided too if it is in the batch" in rank["SharedByAll"][1]
        assert "divide batches by split_batch=" in rank["SharedByAll"][1]
    is_as_on_one_device(found, "SharedByAll", "SharedByAll, split")


@pytest.mark.parametrize("case", LINES)
def test_its_end_runs_on_the_batch_if_it_fails_there_alone(found, case):
    if case == "AtTheEnd":
        is_as_on_one_device(found, case, f"{case}, batch")
    else:
        assert not any([is_told(rank[f"{case}, batch"], case) for rank in found[1:]])


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("Skips", "returns None, which skips the batch, on a microbatch of 2 of 8 samples, and would not on all"),
        (
            "SkipsLate",
            "returns None, which skips the batch, on a microbatch of 2 of 8 samples, and would not on all of",
        ),
        ("InPieces", "calls backward 1 time on a microbatch of 2 of 8 samples, and 2 times on all of them"),
        ("ReturnsEarly", "calls backward 0 times on a microbatch of 2 of 8 samples, and 2 times on all of them"),
    ],
)
def test_a_step_that_does_less_on_microbatches_is_refused_with_a_way_out_that_holds(found, case, said):
    for rank in found[1:]:
        assert rank[case][0] == "ConfigurationError"
        assert said in rank[case][1]
    is_as_on_one_device(found, case, f"{case}, one")


def test_a_pointer_that_does_not_begin_anew_is_told_of(found):
    for rank in found[1:]:
        kind, text, cause = rank["InAQueue"]
        assert (kind, cause) == ("ConfigurationError", "RuntimeError")
        said = (
            r"self\.pointer is 16 now,.* a microbatch of 2 of 8 samples .*\] = output\.detach\(\) .*num_microbatches=1"
        )
        assert re.search(rf"{said}.*loss_over='batch'", text)
    for how in ("one", "batch"):
        is_as_on_one_device(found, "InAQueue", f"InAQueue, {how}")


@pytest.mark.parametrize("how", ["InEvaluation", "InEvaluation, one", "InEvaluation, batch"])
def test_evaluations_run_on_all_of_the_batch(found, how):
    is_as_on_one_device(found, "InEvaluation", how)


@pytest.mark.parametrize("how", ["OfOneElement", "OfOneElement, one", "OfOneElement, batch"])
def test_a_loss_keeps_its_dimensions(found, how):
    is_as_on_one_device(found, "OfOneElement", how)


@pytest.mark.parametrize(("case", "kind"), [("OnAnySize", "RuntimeError"), ("ByValues", "ArithmeticError")])
def test_other_errors_are_the_users_own(found, case, kind):
    for rank in found[1:]:
        assert [rank[f"{case}{how}"][0] for how in ("", ", one", ", batch")] == [kind] * 3
