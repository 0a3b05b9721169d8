"""Steps call torch.distributed as on one device, or as replicas would."""

import json
from pathlib import Path

import pytest

from tests.launch import of_ranks, run_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collectives")
    run_script(Path(__file__).parents[1] / "scripts" / "collectives.py", folder)
    return folder


@pytest.mark.parametrize("how", ["False", "True", "with gradients", "backward", "kept", "Accelerate's"])
@pytest.mark.parametrize("processes", ["one pipeline", "replicas"])
def test_what_is_averaged_over_processes_is_over_replicas(folder, processes, how):
    expected = json.loads((folder / "one_device.json").read_text())["one device"]
    assert len(expected) == 4
    for rank in of_ranks(folder, 4):
        assert rank[f"{processes}, {how}"] == [pytest.approx(numbers, rel=1e-4, abs=1e-6) for numbers in expected]


def test_what_has_no_meaning_there_is_refused_by_name(folder):
    for rank in of_ranks(folder, 4):
        assert "torch.distributed.reduce_scatter_tensor in a step" in rank["refused"]
        assert "dist.reduce_scatter_tensor(torch.zeros(1), value)" in rank["refused"]


def test_ranks_count_replicas_in_steps_and_one_says_what_is_said_once(folder):
    one_device = json.loads((folder / "one_device.json").read_text())["contrasts"]
    ddp = json.loads((folder / "ddp_rank_0.json").read_text())["contrasts"]
    for number, (said, expected) in ((1, one_device), (2, ddp)):
        found = [rank[f"contrasts, {number}"] for rank in of_ranks(folder, 4)]
        assert {len_of for len_of, _ in found[: 4 // number]} == {said}
        assert found[0][1] == [pytest.approx(weights, rel=1e-4, abs=1e-6) for weights in expected]


def test_steps_meet_replicas_also_where_one_of_them_compares_its_batch_alone(folder):
    expected = json.loads((folder / "ddp_rank_0.json").read_text())["classifies"]
    assert len(expected) == 8
    for rank in of_ranks(folder, 4):
        assert rank["classifies"] == [pytest.approx(numbers, rel=1e-5) for numbers in expected]
