"""A teacher that follows its student, moved once for a batch although the step runs for each microbatch."""

import json
import re
from pathlib import Path

import pytest

from tests.launch import of_ranks, run_script

pytestmark = pytest.mark.slow

CASES = (
    *("Assigns", "InPlace", "every second batch", "AtTheEnd", "of several stages", "of the whole batch"),
    *(
        "beside",
        "two views",
        "two views, several stages",
        "in a hook",
        "by gradients",
        "copied",
        "all of mine",
        "pruned",
        "prunes masked",
        "constrains",
        "constrains, several stages",
        "constrains tied",
        "own",
        "own, several stages",
        "own, of the whole batch",
        "quantises",
        "quantises, several stages",
    ),
)
SCRIPT = Path(__file__).parents[1] / "scripts" / "momentum.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("momentum")
    output = run_script(SCRIPT, folder).stdout
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("1_0", "2_0", "2_1")}
    return found | {"output": output}


@pytest.mark.parametrize("case", CASES)
def test_parameters_that_steps_and_hooks_write_into_are_those_of_one_device(trained, case):
    alone = trained["1_0"][case]
    names = set()
    for rank in ("2_0", "2_1"):
        found = trained[rank][case]
        assert found["losses"] == pytest.approx(alone["losses"], rel=2e-5)
        for name, values in found["held"].items():
            flat = [number for row in values for number in row] if isinstance(values[0], list) else values
            one = alone["held"][name]
            expected = [number for row in one for number in row] if isinstance(one[0], list) else one
            assert flat == pytest.approx(expected, abs=2e-5), name
        names |= found["held"].keys()
    assert names == alone["held"].keys()


@pytest.mark.parametrize(
    "case",
    ["Assigns", "InPlace", "AtTheEnd", "beside", "two views", "constrains", "constrains, several stages", "quantises"],
)
def test_ranks_hold_no_weights_that_are_used_elsewhere(trained, case):
    first, last = (trained[rank][case]["held"] for rank in ("2_0", "2_1"))
    twice = {name.partition(".")[0] for name in first.keys() & last.keys()}
    # a function of lists moves the teacher as a whole, where that is, by the student's weights
    of_no_layers = {"teacher"} if case == "two views" else set()
    assert twice - of_no_layers == ({"student"} if case == "AtTheEnd" else set())


@pytest.mark.parametrize("case", ["Alone", "LogsNorm", "LogsNormOfState"])
def test_a_hook_that_needs_values_of_other_ranks_is_refused_with_its_line(trained, case):
    assert not trained["1_0"]["refused"]
    for rank in ("2_0", "2_1"):
        refused = trained[rank]["refused"][case]
        assert re.match(r".*momentum\.py, line \d+ needs values of layers that other ranks hold", refused)
        assert "whole_parameters" in refused


def test_other_parameters_are_refused_there_on_all_ranks(trained):
    for rank in ("2_0", "2_1"):
        refused = trained[rank]["refused"]["Prunes"]
        assert "some were registered or deleted, as torch.nn.utils.prune does" in refused
        assert "prune.identity(layer, 'weight') in __init__" in refused  # that is "prunes masked"
        assert "with importance_scores=layer.weight_orig" in refused


def test_writing_something_else_for_each_microbatch_is_refused_or_told_of(trained):
    said = "something else for each microbatch, of which the last one stays"
    for rank in ("2_0", "2_1"):
        refused = trained[rank]["refused"]["ConstrainsByBatch"]
        assert f"writes into the parameter self.student.1.0.weight {said}" in refused
    assert trained["output"].count(f"writes into the parameter self.teacher.0.0.bias {said}") == 1


def test_writing_into_a_weight_that_layers_of_several_stages_share_is_refused(trained):
    for rank in ("2_0", "2_1"):
        refused = trained[rank]["refused"]["ConstrainsTied"]
        assert (
            "'student.0.0.weight' is changed by what one stage computes, and then used by 'student.0', 'student.3'"
            in refused
        )
        assert re.search(r"momentum\.py, line \d+|momentum\.py:\d+", refused)
        assert "on_train_batch_start" in refused


@pytest.mark.parametrize(
    ("case", "name"), [("Later", r"teacher\.\d\.0\.weight"), ("LaterOnAnotherWay", r"predictor\.bias")]
)
def test_writing_that_the_first_batch_has_not_shown_is_refused_with_its_line(trained, case, name):
    for rank in ("2_0", "2_1"):
        refused = trained[rank]["refused"][case]
        assert re.search(rf"this one wrote into '{name}' \(.*momentum\.py, line \d+\) and has not", refused)


def test_a_rank_that_raises_alone_among_whole_parameters_is_named_by_the_others(tmp_path):
    script = SCRIPT.with_name("alone_in_whole.py")
    run_script(script, tmp_path, expect_success=False)  # the watch would end a rank that waits without a word
    told, raised = of_ranks(tmp_path, 2)
    assert raised == ["ValueError", "a mistake of one rank", True]  # and it has its own parameters again
    assert told[0] == "RankDiedError"
    assert re.match(r"rank 1 \(pid \d+ on .*\) failed with ValueError: a mistake of one rank", told[1])
