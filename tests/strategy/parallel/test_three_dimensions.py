"""Data, tensor and pipeline parallelism at once, and FSDP2 within a stage, train like one device."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor.parallel import api as parallel_api

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.compat.processes import OLDEST_FSDP
from lightning_pfo.strategy.parallel.fsdp import ShardedLayers, Sharding, check_shardable
from tests.comparing import check
from tests.launch import run_script

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "scripts" / "three_dimensions.py"
RANKS = {"tensor": range(8), "sharded": range(8), "sharded_zero_bubble": range(4)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three_dimensions")
    run_script(SCRIPT, folder)
    return folder


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize("name", RANKS)
def test_losses_and_weights_are_those_of_one_device(folder, name):
    """Clipping by global norm, accumulation, two parameter groups, parameters outside the layers."""
    single = read(folder, "single")
    ranks = [read(folder, f"{name}_{rank}") for rank in RANKS[name]]
    losses = {seen["place"][0]: seen["loss"] for seen in ranks}
    means = [sum(of_replicas) / 2 for of_replicas in zip(losses[0], losses[1], strict=True)]
    assert means == pytest.approx(single["loss"], abs=2e-5)
    assert losses[0] != losses[1]
    held = {}
    for seen in ranks:
        assert seen["loss"] == losses[seen["place"][0]]
        assert seen["val"][: len(single["val"])] == pytest.approx(single["val"], abs=2e-5)
        assert seen["validated"] == pytest.approx(single["val"][-1], abs=2e-5)
        for key, weights in seen["weights"].items():
            assert held.setdefault(key, weights) == weights, key  # the same, to the last bit, wherever it is held
    assert set(held) == set(single["weights"])
    for key, weights in single["weights"].items():
        for mine, theirs in zip(held[key], weights, strict=True):
            assert mine == pytest.approx(theirs, abs=2e-5), key


@pytest.mark.parametrize("name", RANKS)
def test_the_whole_module_is_on_the_first_process_alone(folder, name):
    """Put together in a hook, and after `fit`, of parts of tensor parallelism and FSDP2."""
    single = read(folder, "single")
    for loss, weights in read(folder, f"{name}_0")["wholes"]:
        assert loss == pytest.approx(single["val"][-1], abs=2e-5)
        assert list(weights) == list(single["weights"])
        for key, expected in single["weights"].items():
            for mine, theirs in zip(weights[key], expected, strict=True):
                assert mine == pytest.approx(theirs, abs=2e-5), key
    for others in (read(folder, f"{name}_{rank}") for rank in RANKS[name][1:]):
        assert others["wholes"] == [None, None]
        assert others["others_at_once"] == 0  # each tensor is gone before the next one is put together
    assert read(folder, f"{name}_0")["others_at_once"] > 5  # which keeps what it has put together itself


def test_processes_are_where_the_mesh_order_says(folder):
    def places(name):
        return [tuple(read(folder, f"{name}_{rank}")["place"]) for rank in RANKS[name]]

    # replica, stage, part of a layer
    assert places("tensor") == [(d, p, t) for d in (0, 1) for p in (0, 1) for t in (0, 1)]
    assert read(folder, "tensor_0")["dimensions"] == ["data_parallel", "pipeline_parallel", "tensor_parallel"]
    if hasattr(parallel_api, "_validate_tp_mesh_dim"):
        pytest.skip("this torch refuses other orders under tensor parallelism")
    assert places("sharded") == [(d, p, t) for d in (0, 1) for t in (0, 1) for p in (0, 1)]
    assert read(folder, "sharded_0")["dimensions"] == ["data_parallel", "tensor_parallel", "pipeline_parallel"]


@pytest.mark.skipif(torch.__version__ < OLDEST_FSDP["cpu"], reason="this torch keeps replicas whole")
def test_what_is_divided_is_held_in_parts(folder):
    whole = {"norm.weight": 8, "up.weight": 128, "down.bias": 8}
    num_parts = {
        "tensor": {"norm.weight": 1, "up.weight": 2, "down.bias": 1},
        "sharded": {"norm.weight": 2, "up.weight": 4, "down.bias": 2},
        "sharded_zero_bubble": {"norm.weight": 2, "up.weight": 2, "down.bias": 2},
    }
    for name, parts in num_parts.items():
        seen = read(folder, f"{name}_0")
        for key, number in parts.items():
            assert seen["num_held"][f"model.0.{key}"] == whole[key] / number
        assert seen["num_held"]["stem.weight"] == 48  # outside the layers: on every rank
        assert seen["num_states"] == sum(seen["num_held"].values())


@pytest.mark.skipif(torch.__version__ < OLDEST_FSDP["cpu"], reason="this torch keeps replicas whole")
def test_each_stage_of_zero_divides_what_it_says(folder):
    """While an iteration runs: weights after a forward and a backward, and gradients before the last backward."""
    for rank in range(4):
        seen = read(folder, f"zero_{rank}")
        of_stage = {name: seen[name].get("divided") for name in seen}
        # (weights are divided, there are divided gradients)
        assert of_stage["zero1"] == {"F": [False, False], "B": [False, False]} | _last(of_stage["zero1"], False, False)
        assert of_stage["zero2"] == {"F": [False, False], "B": [False, True]} | _last(of_stage["zero2"], False, True)
        assert of_stage["zero3"] == {"F": [True, False], "B": [True, True]} | _last(of_stage["zero3"], True, True)
        assert seen["bf16"]["loss"] == pytest.approx(seen["zero1"]["loss"], abs=0.02)
        assert seen["bf16"]["loss"] != seen["zero1"]["loss"]
        assert seen["offloaded"]["policies"] == ["CPUOffloadPolicy"]


@pytest.mark.skipif(torch.__version__ < OLDEST_FSDP["cpu"], reason="this torch keeps replicas whole")
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "offloaded"])
def test_each_stage_of_zero_trains_like_ddp(folder, name):
    """Clipping by global norm, accumulation; two replicas, which read different batches."""
    ddp = [read(folder, f"ddp_of_zero_{replica}") for replica in (0, 1)]
    assert ddp[0]["loss"] != ddp[1]["loss"]
    for rank in range(4):
        found = read(folder, f"zero_{rank}")[name]
        assert len(found["loss"]) == 8
        assert found["loss"] == pytest.approx(ddp[rank // 2]["loss"], abs=2e-5)
        assert len(found["norms"]) == 4
        assert found["norms"] == pytest.approx(ddp[0]["norms"], abs=2e-5)
        if rank == 0:
            check(found["weights"], ddp[0]["weights"], "weights")
        else:
            assert found["weights"] is None


@pytest.mark.skipif(torch.__version__ < OLDEST_FSDP["cpu"], reason="this torch keeps replicas whole")
def test_copies_of_divided_layers_train_as_if_all_replicas_divided_them(folder):
    for rank in range(4):
        seen = read(folder, f"zero_{rank}")
        assert seen["pairs"]["loss"] == pytest.approx(seen["all"]["loss"], abs=2e-5)
        for name, parts in (("all", 4), ("pairs", 2)):
            assert seen[name]["held"]["model.0.up.weight"] == 128 / parts
            assert seen[name]["held"]["stem.weight"] == 48
        assert (seen["pairs"]["weights"] is None) == (rank > 0)
    seen = read(folder, "zero_0")
    check(seen["pairs"]["weights"], seen["all"]["weights"], "weights")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"shard_size": 3}, r"got 3\. Use one of \[2, 4\], or None"),
        ({"shard_size": 1}, r"got 1\. Use one of"),
        ({"shard_size": 2, "data_parallel_size": 1}, r"Use more replicas"),
        ({"shard_size": 2, "tensor_parallel_size": 2}, "cannot be had with tensor parallelism"),
        ({"shard_size": 2, "fully_shard": False}, "shard_size says how many replicas divide layers"),
        ({"shard_offload": True, "fully_shard": False}, r"fully_shard=False\. Use fully_shard='zero3'"),
    ],
)
def test_sizes_of_groups_that_cannot_be(options, error):
    with pytest.raises(ConfigurationError, match=error):
        PfoPipelineStrategy(**({"data_parallel_size": 4, "fully_shard": True} | options))


def _last(seen, weights, gradients):
    return {"B last": [weights, gradients], "F last": seen["F last"]}


def test_schedules_that_cut_backwards_take_zero1_only():
    schedule = make_schedule("zbv", 2, 4)
    check_shardable(Sharding(None, 1), schedule)
    check_shardable(Sharding(None, 3), make_schedule("1f1b", 2, 4))
    with pytest.raises(ConfigurationError, match=r"'zbv'.*fully_shard='zero2' exchanges.*Use fully_shard='zero1'"):
        check_shardable(Sharding(None, 2), schedule)
    with pytest.raises(ConfigurationError, match=r"fully_shard is one of .*'zero3'.*; got 'zero4'"):
        PfoPipelineStrategy(fully_shard="zero4")


@pytest.mark.parametrize(("version", "device", "oldest"), [("2.8.0", "cpu", "2.9"), ("2.6.0", "cuda", "2.7")])
def test_a_torch_that_would_divide_wrongly_is_refused(monkeypatch, version, device, oldest):
    """FSDP2 of older torch trains on CPUs with sums of gradients in place of means."""
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    with pytest.raises(ConfigurationError, match=rf"torch {oldest} or newer .*{device}.*got {version}"):
        ShardedLayers([torch.nn.Linear(2, 2)], Sharding(SimpleNamespace(device_type=device)), [])
