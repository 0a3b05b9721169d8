"""What steps leave behind of all kinds: on one rank and on two as with a plain Trainer."""

import functools
import json
from pathlib import Path

import pytest

from tests.comparing import check
from tests.launch import run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "left_behind.py"
CASES = (
    "draws_late",  # first: who has drawn once is expected to again
    "draws",
    "objects",
    "modules",
    "layers",
    "uses_counts",
    "of_trainer",
    "through_helpers",
    "keeps_schedule",
    "marks_data",
    "closed",
    "calls",
    "elsewhere",
    "takes",
    "writes",
    "numbers",
    "lengths",
    "by_class",
    "idioms",
    "averages",
    "running",
    "ratios",
    "texts",
    "reads_logged",
    "evaluates",
    "extremes",
    "queues",
    "sets_data",
    "makes_class",
    "unfit",
    "large",
    "tidy",
    "rewrites",
)


PARTS = [CASES[start : start + 6] for start in range(0, len(CASES), 6)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Returns what the part that a case is of has written; each is launched where it is first asked for.

    One launch for all would take more than half of a test's limit on an idle machine.
    """

    @functools.cache
    def found_of_part(part):
        folder = tmp_path_factory.mktemp("left_behind")
        found = {"output": run_script(SCRIPT, folder, "plain,one,two", *part).stdout}
        for name in ("plain_0", "one_0", "two_0", "two_1"):
            found[name] = json.loads((folder / f"{name}.json").read_text())
        return found

    return lambda case: found_of_part(next(part for part in PARTS if case in part))


@pytest.fixture(scope="module")
def output(found):
    return "".join(found(part[0])["output"] for part in PARTS)


@pytest.mark.parametrize("rank", ["one_0", "two_0", "two_1"])
@pytest.mark.parametrize("case", [case for case in CASES if case != "draws"])
def test_a_step_leaves_what_it_leaves_on_one_device(found, case, rank):
    check(found(case)[rank][case], found(case)["plain_0"][case], case)


def test_generators_of_the_users_go_on_alike_on_all_ranks_and_do_not_repeat_themselves(found):
    found = found("draws")
    *states, _ = found["two_0"]["draws"]
    assert found["two_0"]["draws"] == found["two_1"]["draws"]
    assert len({state for each in states for state in each}) == 12


def test_draws_that_nobody_expected_are_told_of(output):
    assert output.count("A step has drawn from the global generator of Python or NumPy for the first time") == 3


def test_layers_that_keep_more_than_numbers_are_named(output):
    assert output.count("A layer changes its attribute self.layers.0.kept in a step") == 2
    assert output.count("A layer changes its attribute") == 2


def test_numbers_that_no_rule_gives_are_named_once(output):
    logged = [f"the value that is logged as '{name}'" for name in ("spread", "quantile")]
    for name in (*logged, "self.lowest", "output['deviation']"):
        assert output.count(f"{name} (") == 2, name  # on one rank, and on two
    for name in ("'noise'", "'drawn'", "'loss'", "self.fine", "'f1'", "'f1_of_epoch'", "'val_sum'", "'val_loss'"):
        assert f"{name} (" not in output


def test_large_tensors_that_are_written_into_are_named(output):
    for name, size in {"bank": "0.1", "array": "0.2", "late": "0.1", "mean": "0.1", "queue": "0.1"}.items():
        assert output.count(f"A step writes into self.{name}. Its {size} MiB are sent") == 2, name
    assert "self.untouched" not in output


def test_texts_of_microbatches_in_files_are_named(output):
    for name in ("of sizes", "of losses"):
        assert output.count(f"A step writes into the file self.named['{name}']") == 2
    assert output.count("A step writes into the file") == 4


def test_texts_that_microbatches_make_of_their_values_are_named(output):
    for name in ("of_loss", "of_size", "told"):
        assert output.count(f"What a step leaves in self.{name} cannot be put together") == 2, name
    assert output.count("cannot be put together from that of microbatches") == 6
    assert "bool that differs" not in output
