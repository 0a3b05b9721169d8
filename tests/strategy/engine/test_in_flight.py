"""Memory is that of the microbatches in flight, orders in which EnvPipe hangs run, and hosts do not wait for GPUs.

4 processes, plain torch.
"""

import json
from pathlib import Path

import pytest

from lightning_pfo.core.schedules.in_flight import peak_in_flight
from lightning_pfo.core.schedules.registry import make_schedule
from tests.core.schedules.original_envpipe import unclamped
from tests.launch import run_script

pytestmark = pytest.mark.slow

RANKS = range(4)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("in_flight")
    run_script(Path(__file__).parents[1] / "scripts" / "in_flight.py", folder)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in RANKS]


def test_1f1b_keeps_the_activations_of_stages_minus_stage_microbatches(ranks):
    for rank, seen in enumerate(ranks):
        by_microbatch = seen["measured"]["gpipe"]["8"]["activations"] // 8  # GPipe keeps those of all microbatches
        assert by_microbatch >= 3  # tensors that the two layers of a stage save
        for num_microbatches in ("8", "12"):
            assert seen["measured"]["1f1b"][num_microbatches]["activations"] == (4 - rank) * by_microbatch


@pytest.mark.parametrize("name", ["gpipe", "envpipe"])
@pytest.mark.parametrize("num_microbatches", [8, 12])
def test_peaks_are_as_declared(ranks, name, num_microbatches):
    declared = peak_in_flight(make_schedule(name, 4, num_microbatches))
    for rank, seen in enumerate(ranks):
        by_microbatch = seen["measured"]["gpipe"]["8"]["activations"] // 8
        assert seen["measured"][name][str(num_microbatches)]["activations"] == declared[rank] * by_microbatch


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv"])
def test_more_microbatches_need_no_more_memory(ranks, name):
    for seen in ranks:
        assert seen["measured"][name]["8"] == seen["measured"][name]["12"]


def test_receive_buffers_are_those_of_microbatches_in_flight(ranks):
    for rank, seen in enumerate(ranks):
        of_1f1b = seen["measured"]["1f1b"]["12"]["received"]
        in_flight = 4 - rank if rank else 0  # the first stage receives gradients only
        assert 1 <= of_1f1b <= in_flight + 2  # an activation and a gradient may be under way


def test_nothing_is_left_after_a_step(ranks):
    for seen in ranks:
        assert {run["left"] for runs in seen["measured"].values() for run in runs.values()} == {0}


def test_orders_in_which_envpipe_hangs_run_and_give_the_gradients_of_one_process(ranks):
    cases = ranks[0]["cases"]
    assert [[0, 1, 2, 0], 4] in cases
    assert len(cases) >= 10
    for number, (k, num_microbatches) in enumerate(cases):
        expected = ranks[0]["alone"][str(num_microbatches)]
        norms = []
        for rank, seen in enumerate(ranks):
            ran = seen["orders"][number]
            assert ran["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert ran["order"] == [str(inst) for inst in unclamped(k, num_microbatches).orders[rank]]
            norms += ran["norms"]
        assert norms == pytest.approx(expected["norms"], rel=1e-4)


def test_what_listeners_exchange_waits_for_no_gpu(ranks):
    """An exchange over nccl, each iteration, would let the host wait until the GPU has done all of it."""
    for seen in ranks:
        assert seen["exchanged"] == {"values": [[0, 1, 2, 3]] * 3, "backends": ["gloo"] * 3}
