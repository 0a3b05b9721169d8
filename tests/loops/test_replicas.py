"""Data-parallel replicas of a pipeline in an Accelerate loop train like DDP."""

import json
from pathlib import Path

import pytest

from tests.comparing import check
from tests.launch import run_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    run_script(Path(__file__).parent / "scripts" / "replicas.py", folder)
    return folder


def of_ranks(folder, name, number):
    return [json.loads((folder / f"{name}_{rank}.json").read_text()) for rank in range(number)]


def test_two_replicas_of_two_stages_train_like_ddp_of_two(folder):
    ddp, pipeline = of_ranks(folder, "ddp", 2), of_ranks(folder, "pipeline", 4)
    assert len(ddp[0]["loss"]) == 2 * 7  # with gradients averaged, then with weights averaged by LocalSGD
    assert len(ddp[0]["norm"]) == 4
    assert len(ddp[0]["predicted"]) == 3 * len(ddp[0]["repeated"]) == 3 * 37
    assert ddp[0]["loss"] != ddp[1]["loss"]  # they read different batches
    for rank, seen in enumerate(pipeline):
        for key in ("loss", "norm", "predicted", "repeated", "lr", "resumed", "rolled back"):
            assert seen[key] == pytest.approx(ddp[rank // 2][key], abs=2e-5), key
    for name, weights in ddp[0]["weights"].items():
        assert pipeline[0]["weights"][name] == pytest.approx(weights, abs=2e-5), name
    assert [seen["weights"] for seen in pipeline[1:]] == [{}] * 3


def test_buffers_are_those_of_ddp_while_replicas_accumulate_and_afterwards(folder):
    ddp, pipeline = of_ranks(folder, "buffers_ddp", 2), of_ranks(folder, "buffers_pipeline", 4)
    assert len(ddp[0]["losses"]) == 7  # the last accumulation has one batch
    for rank, seen in enumerate(pipeline):
        assert seen["losses"] == pytest.approx(ddp[rank // 2]["losses"], abs=2e-5)
    assert pipeline[0]["last"] == pytest.approx(ddp[0]["last"], abs=1e-6)


def test_accelerates_contexts_of_the_model_are_those_of_ddp(folder):
    """`model.no_sync()`; and `join_uneven_inputs`, which does not help: replicas wait for one with fewer batches."""
    ddp, pipeline = of_ranks(folder, "contexts_ddp", 2), of_ranks(folder, "contexts_pipeline", 4)
    assert len(ddp[0]["unsynced"]) == 5 + 2  # a norm for each two of five batches
    assert ddp[0]["unsynced"] != ddp[1]["unsynced"]
    assert [found["uneven"]["waits"] for found in (*ddp, *pipeline)] == [[], [True], [], [], [True], [True]]
    assert "no effect" in ddp[0]["uneven"]["said"][0]
    for rank, found in enumerate(pipeline):
        said = found["streamed"].pop("said")
        assert len(said) == 1
        assert "metrics count some samples twice" in said[0]
        check(found, ddp[rank // 2] | {"streamed": {"gathered": ddp[0]["streamed"]["gathered"]}}, "contexts")
    assert len(ddp[0]["streamed"]["gathered"]) == 48
    assert not ddp[0]["streamed"]["said"]


def test_what_processes_tell_each_other_is_that_of_ddp_of_two(folder):
    """Ranks of a pipeline hold the same, so they count once."""
    ddp, pipeline = of_ranks(folder, "ddp", 2), of_ranks(folder, "pipeline", 4)
    assert ddp[0]["processes"] == len(ddp[0]["gathered"]["loss"]) == 2
    assert len({*ddp[0]["lr"]}) == 1 + 4  # a step at every second batch
    for rank, seen in enumerate(pipeline):
        for key in ("processes", "part", "gathered", "reduced"):
            check(seen[key], ddp[rank // 2][key], key)


def test_checkpoints_of_replicas_go_to_ddp_and_back(folder):
    """Losses, learning rates and an object of the user's after each of them."""
    for rank, expected in enumerate(seen["resumed"] for seen in of_ranks(folder, "ddp", 2)):
        assert expected[0] == 7
        assert of_ranks(folder, "ddp_from_pipeline", 2)[rank] == pytest.approx(expected, abs=2e-5)
        for found in of_ranks(folder, "pipeline_from_ddp", 4)[2 * rank : 2 * rank + 2]:
            assert found == pytest.approx(expected, abs=2e-5)
