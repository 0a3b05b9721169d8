"""A loop of one rank, whose server is none: training goes on, and the log says why."""

import json
import logging

import pytest

from lightning_pfo.client import PipelineFrequencyOptimizer

PLAN = {"version": 1, "from_step": 0, "frequencies": [["forward", 1410]], "purpose": "plan", "label": "x"}
OURS = {"/register_job": (b'"job"', "0"), "/register_rank": (b"null", "0")}


def train(url):
    """Returns the versions of the plans of a few steps."""
    optimizer = PipelineFrequencyOptimizer(0, 0, 0, 0, 0, 1, 1, 1, 1, url, first_plan_s=0.05)
    versions = []
    for _ in range(3):
        optimizer.on_step_begin()
        optimizer.on_instruction_begin("forward")
        optimizer.on_instruction_end("forward")
        optimizer.on_step_end()
        versions.append(optimizer.plan.version)
    optimizer.close()
    return versions


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", [b"[1, 2]", b"12", b"null", b"<html>", b'"\xff"', b"[" * 100_000])
def test_a_server_of_another_kind_is_as_good_as_none(serve_json, text, caplog):
    assert train(serve_json({"/": (text, "0")})) == [0, 0, 0]
    told = [record.getMessage() for record in caplog.records if "goes on without the server" in record.getMessage()]
    assert len(told) == 1
    assert text.decode(errors="replace")[:4].replace("null", "None") in told[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("plan", "promised"),
    [(PLAN, "many"), (PLAN | {"frequencies": [["forward", float("inf")]]}, "1000"), ([], "1000")],
)
def test_plans_that_are_none_are_told_once(serve_json, plan, promised, caplog):
    caplog.set_level(logging.WARNING)
    assert train(serve_json(OURS | {"/jobs": (json.dumps(plan).encode(), promised)})) == [0, 0, 0]
    told = [record.getMessage() for record in caplog.records if "goes on without the server" in record.getMessage()]
    assert len(told) == 1
    assert "the server sends" in told[0]


@pytest.mark.timeout(60)
def test_a_plan_is_followed(serve_json, caplog):
    assert train(serve_json(OURS | {"/jobs": (json.dumps(PLAN).encode(), "1000")})) == [1, 1, 1]
    if "own clocks" in caplog.text:  # there is no GPU, and the driver's reason may name an emulated one
        assert "(An emulated GPU needs to know the work of instructions" in caplog.text
