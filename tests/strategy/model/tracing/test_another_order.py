"""Steps that call parts of later stages first, and steps that optimize several times."""

import inspect

import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.calls import layer_calls
from lightning_pfo.strategy.model.tracing.dividing.flow import Flow
from lightning_pfo.strategy.model.tracing.dividing.phases import phases_of
from lightning_pfo.strategy.model.tracing.noticing.content import Contents
from lightning_pfo.strategy.model.tracing.tracked import current_run
from tests.strategy.model.stages import Followed, Holder, Stages, assert_equal, run_plainly


def _parts(width=4):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)]
    judge = nn.Sequential(nn.Linear(width, width), nn.LeakyReLU(0.2, inplace=True), nn.Linear(width, 1))
    return Holder(make=nn.Sequential(*layers), judge=judge)


X, Z = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))


def _in_order(owner):
    return owner.judge(owner.make(Z)).mean()


def _judge_first(owner):
    real = owner.judge(X).sigmoid()
    fake = owner.judge(owner.make(Z)).sigmoid()
    return (real.log() + (1 - fake).log()).mean()


def _in_place(owner):
    real = owner.judge(X).sigmoid_()
    made = (owner.make(Z) + 1).mul_(2)
    return (real + owner.judge(made)).mean()


def _twice(owner):
    first = owner.judge(X)
    made = owner.make(Z)
    second = owner.judge(made.detach())
    return (first * second).mean() + made.square().mean()


def _checks(owner):
    normal = torch.distributions.Normal(owner.judge(X), 1.0, validate_args=True)
    return normal.log_prob(owner.judge(owner.make(Z))).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_tensors_of_the_steps_own_tell_calls_apart(dtype):
    """Ranks may make calls in other orders."""
    one, other = torch.ones(3).to(dtype), torch.full((3,), 2.0).to(dtype)
    numbers = [Contents().of_call(torch.add, (), [each]) for each in (one, other, one.clone())]
    assert numbers[0] != numbers[1]
    assert numbers[0] == numbers[2]
    assert Contents().of_call(torch.add, (), [one.to_sparse()]) == Contents().of_call(torch.add, (), [one.to_sparse()])


SAYS_THAT_IT_CHECKS = "_is_all_true" in inspect.getsource(torch.distributions.distribution)


@pytest.mark.parametrize("step", [_judge_first, _in_place, _twice, _checks])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_later_stage_may_be_called_first(step, num_stages):
    if step is _checks and not SAYS_THAT_IT_CHECKS:
        pytest.skip(f"the distributions of torch {torch.__version__} look at their values as any other code does")
    stages = Stages(_parts(), _in_order, num_stages=num_stages)
    output = stages.run(step)
    assert_equal((output, stages.gradients()), run_plainly(_parts(), step))
    assert any(program.others for program in stages.programs)
    stages.close()


def _back(owner):
    return owner.make(owner.judge(X) * Z).mean()


def _decides(owner):
    if owner.judge(X).mean().item() > -100:
        return owner.judge(owner.make(Z)).mean()
    return owner.judge(X).mean()


def _differentiates(owner):
    real = owner.judge(X)
    made = owner.make(Z)
    (slope,) = torch.autograd.grad(owner.judge(made).sum(), made, create_graph=True)
    return real.mean() + slope.square().mean()


def test_what_distributions_refuse_is_refused_on_the_stage_that_has_it():
    def step(owner):
        return torch.distributions.Bernoulli(probs=owner.judge(owner.make(Z)) + 5, validate_args=True).mean.mean()

    stages = Stages(_parts(), _in_order, num_stages=2)
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        stages.run(step)
    stages.close()


@pytest.mark.parametrize("step", [_back, _decides])
def test_what_leads_back_is_refused(step):
    stages = Stages(_parts(), _in_order, num_stages=2)
    with pytest.raises(ConfigurationError, match="Stages run one after the other"):
        stages.run(step)
    stages.close()


def test_differentiating_over_a_boundary_is_refused():
    stages = Stages(_parts(), _in_order, num_stages=3)
    with pytest.raises(ConfigurationError, match=r"torch\.autograd\.grad in a step can only differentiate"):
        stages.run(_differentiates)
    stages.close()


def _optimizes(owner):
    """Tells its run what manual optimization would."""
    run, made, judged = current_run(), list(owner.make.parameters()), list(owner.judge.parameters())
    fake = owner.make(Z)
    loss = owner.judge(fake.detach()).mean() + owner.judge(X).mean()
    run.optimize(loss)
    run.optimize(None, judged)
    accuracy = (loss > 0).float()  # of the first phase still, as another act follows it
    run.optimize(None, made if owner.steps_both else [])
    second = owner.judge(fake).mean()
    run.optimize(second)
    run.optimize(None, made)
    return {"loss": second, "accuracy": accuracy}


def _phases(*, steps_both):
    owner = _parts()
    owner.steps_both = steps_both
    followed = Followed(owner, _optimizes, 2)
    trace = followed.trace()
    followed.close()
    assert trace.failure is None
    return trace, phases_of(trace, Flow(trace)), layer_calls(followed.units, trace)


def test_phases_compute_again_what_they_differentiate_by():
    trace, (first, second), calls = _phases(steps_both=False)
    names = [unit.name for event in (trace.events[position] for position in second.computed) for unit in event.units]
    assert names == ["make.0", "make.1", "judge.0", "judge.1", "judge.2"]
    assert second.computed[:2] == (0, 1)
    assert second.stop is None
    assert first.computed == tuple(range(first.stop))
    assert [trace.values[label].form.shape for label in sorted(first.kept)] == [(), ()]  # the loss, and the accuracy
    assert second.imported == first.kept
    assert [unit.name for unit in calls.layers] == ["make.0", "make.1", "judge.0", "judge.1", "judge.2"]


def test_phases_that_differentiate_by_what_has_changed_are_refused():
    with pytest.raises(ConfigurationError, match=r"before it changed the weights .*x\.detach\(\)"):
        _phases(steps_both=True)
