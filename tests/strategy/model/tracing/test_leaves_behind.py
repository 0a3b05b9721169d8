"""What remains of a stage: ordinary tensors, and stages that have nothing to compute."""

import torch

from tests.strategy.model.stages import Followed, assert_equal, run_cut, run_plainly
from tests.strategy.model.tracing.cases import CASES


def outputs(name, place):
    owner, step = CASES[name].make()
    followed = Followed(owner, step, 2)
    try:
        trace = followed.trace()
        found = run_cut(owner, followed.step, trace, [place(trace)])
    finally:
        followed.close()
    return found, run_plainly(owner, step)


def test_a_step_returns_ordinary_tensors():
    (output, _), _ = outputs("dicts", lambda trace: len(trace.events) - 2)
    assert type(output["logits"]) is torch.Tensor


def test_a_last_stage_may_have_nothing_to_compute():
    assert_equal(*outputs("chain", lambda trace: len(trace.events)))
