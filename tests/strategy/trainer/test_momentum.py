"""A teacher that follows its student, moved once for a batch although the step runs for each microbatch."""

import json
import re
from pathlib import Path

import pytest

from tests.launch import run_script

CASES = (
    *("Assigns", "InPlace", "AtTheEnd", "of several stages", "of the whole batch"),
    *("in a hook", "copied", "all of mine"),
)
SCRIPT = Path(__file__).parents[1] / "scripts" / "momentum.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("momentum")
    run_script(SCRIPT, folder)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("1_0", "2_0", "2_1")}


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


def test_a_hook_that_needs_values_of_other_ranks_is_refused_with_its_line(trained):
    assert "refused" not in trained["1_0"]
    for rank in ("2_0", "2_1"):
        assert re.match(
            r".*momentum\.py, line \d+ needs values of layers that other ranks hold", trained[rank]["refused"]
        )
        assert "whole_parameters" in trained[rank]["refused"]
