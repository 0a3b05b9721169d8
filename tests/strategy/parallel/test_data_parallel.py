"""Two replicas of a pipeline train like Lightning's DDP with two devices."""

import json
from pathlib import Path

import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.parallel.mesh import check_mesh_sizes
from tests.comparing import check
from tests.launch import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "data_parallel.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data_parallel")
    run_script(SCRIPT, folder)
    return folder


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize("order", ["dp_pp", "pp_dp"])
def test_losses_metrics_and_weights_are_those_of_ddp(folder, order):
    for replica in (0, 1):
        expected = read(folder, f"ddp_{replica}_0")
        assert len(expected["train"]) == 6
        for stage in (0, 1):
            seen = read(folder, f"{order}_{replica}_{stage}")
            for key in ("train", "val", "lr"):
                assert seen[key] == pytest.approx(expected[key], abs=2e-5), key
            for key in ("train_loss_epoch", "train_accuracy", "val_loss", "metric_auroc", "metric_accuracy"):
                assert seen["metrics"][key] == pytest.approx(expected["metrics"][key], abs=2e-5), key
    assert read(folder, "ddp_0_0")["train"] != read(folder, "ddp_1_0")["train"]
    expected = read(folder, "ddp_weights")
    weights = read(folder, f"{order}_weights")
    assert list(weights) == list(expected)
    for key, value in expected.items():
        assert weights[key] == pytest.approx(value, abs=2e-5), key


def test_hosts_wait_at_no_barrier_for_what_is_logged(folder):
    for replica in (0, 1):
        assert read(folder, f"ddp_{replica}_0")["barriers"] > 0  # Lightning's own
        assert [read(folder, f"dp_pp_{replica}_{stage}")["barriers"] for stage in (0, 1)] == [0, 0]


@pytest.mark.parametrize("order", ["dp_pp", "pp_dp"])
def test_collectives_in_steps_and_hooks_see_the_replicas(folder, order):
    """Gathering, reducing, barriers, metrics that synchronise in steps, and logs with `sync_dist` and without."""
    of_ddp = [read(folder, f"ddp_{replica}_0")["talked"] for replica in (0, 1)]
    alone = [found["metrics"].pop("alone") for found in of_ddp]
    assert alone[0] != alone[1]
    for replica, expected in enumerate(of_ddp):
        expected["metrics"]["alone"] = sum(alone) / 2  # replicas of a pipeline log the same
        for stage in (0, 1):
            found = read(folder, f"{order}_{replica}_{stage}")["talked"]
            assert found["metrics"] == pytest.approx(expected["metrics"], abs=2e-5)
            assert len(found["seen"]) == len(expected["seen"])
            for values, others in zip(found["seen"], expected["seen"], strict=True):
                for value, other in zip(*(v if isinstance(v, list) else [v] for v in (values, others)), strict=True):
                    assert value == pytest.approx(other, abs=2e-5), (values, others)


@pytest.mark.parametrize("order", ["dp_pp", "pp_dp"])
@pytest.mark.parametrize(("gather", "has"), [("all", (0, 1)), ("rank0", (0,)), ("none", (1,))])
def test_each_replica_predicts_and_writes_its_batches_once(folder, order, gather, has):
    for replica in (0, 1):
        expected = read(folder, f"ddp_{replica}_0")["predicted"]["all"]
        assert [len(part) for part in expected["predictions"]] == [16, 3 - replica]
        assert len(expected["written"]) == 3
        for stage in (0, 1):
            found = read(folder, f"{order}_{replica}_{stage}")["predicted"][gather]
            predictions = expected["predictions"] if stage in has else [None] * 2
            check(found["predictions"], predictions, "predictions")
            check(found["written"], expected["written"] if stage == has[0] else [], "written")


def test_the_mesh_order_places_processes(folder):
    places = {
        order: sorted(
            tuple(read(folder, f"{order}_{replica}_{stage}")["place"]) for replica in (0, 1) for stage in (0, 1)
        )
        for order in ("dp_pp", "pp_dp")
    }
    assert places["dp_pp"] == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert places["pp_dp"] == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]


def test_impossible_meshes_are_refused():
    check_mesh_sizes(2, 2, 8)
    with pytest.raises(ConfigurationError, match=r"number of processes \(4\).*got 3. Use one of \[1, 2, 4\]"):
        check_mesh_sizes(3, 1, 4)
    with pytest.raises(ConfigurationError, match=r"\(8\) / tensor_parallel_size=2 into.*got 3. Use one of \[1, 2, 4\]"):
        check_mesh_sizes(3, 2, 8)
    with pytest.raises(ConfigurationError, match=r"tensor_parallel_size divides.*got 5. Use one of \[1, 2, 3, 6\]"):
        check_mesh_sizes(1, 5, 6)
    for order in ("tp", "dp_pp_pp", "dp-pp"):
        with pytest.raises(ConfigurationError, match=f"mesh_order lists dp, pp and tp.*got '{order}'.*'dp_pp'"):
            PfoPipelineStrategy(mesh_order=order)
