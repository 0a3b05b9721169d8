"""Values whose sizes depend on values cross stage boundaries: training is that of one device."""

import json
from pathlib import Path

import pytest

from tests.launch import of_ranks, run_script
from tests.thorough import mostly

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "scripts" / "varying_sizes.py"
SCHEDULES = {
    ("tokens", 2): mostly(("1f1b", "interleaved_zero_bubble", "zbv"), "gpipe", "interleaved_1f1b"),
    ("experts", 2): mostly(("1f1b",), "zbv"),
    ("tokens", 4): mostly(("zbv",), "1f1b"),
    ("experts", 4): mostly(("1f1b",), "zbv"),
}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    run_script(SCRIPT, folder)
    return json.loads((folder / "single.json").read_text())


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    schedules = {name: of_name for (name, number), of_name in SCHEDULES.items() if number == request.param}
    run_script(SCRIPT, folder, request.param, json.dumps(schedules))
    return of_ranks(folder, request.param)


@pytest.mark.parametrize("name", ["tokens", "experts"])
def test_training_and_evaluation_are_those_of_one_device(single, ranks, name):
    for rank in ranks:
        for case in (*SCHEDULES[name, len(ranks)], "loop"):
            expected = single[name]["loop" if case == "loop" else "trainer"]
            assert len(expected["train"]) >= 3
            for key, values in expected.items():
                assert rank[name][case][key] == pytest.approx(values, rel=2e-5, abs=2e-5), (case, key)


def test_a_loss_over_the_batch_joins_samples_or_says_what_it_cannot_join(single, ranks):
    for rank in ranks:
        assert "depends on values, as after x[mask]" in rank["tokens"]["refused"]
        for key, values in single["experts"]["trainer"].items():
            assert rank["experts"]["whole batch"][key] == pytest.approx(values, rel=2e-5, abs=2e-5), key
