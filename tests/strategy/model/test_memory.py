"""What is said of memory: what several ranks hold, which stage is heavy, why, and what to do."""

import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.calls import layer_calls
from lightning_pfo.strategy.model.memory import memory_of, warnings_of
from lightning_pfo.strategy.model.split import split_units
from tests.strategy.model.stages import Followed, Holder


def divide(root, step, boundaries, uncalled="everywhere"):
    """A model as its step shows it; the step, followed, must be closed."""
    followed = Followed(root, step, len(boundaries) - 1)
    trace = followed.trace()
    calls = layer_calls(followed.units, trace)
    return split_units(root, followed.units, calls, boundaries, trace, uncalled=uncalled), followed


def of(root, step, boundaries, placement=None, uncalled="everywhere"):
    """What is said of a model that is divided as its step shows."""
    placement = placement or range(len(boundaries) - 1)
    split, followed = divide(root, step, boundaries, uncalled)
    followed.close()
    memory = memory_of(root, split, placement)
    return memory, warnings_of(root, memory, split, placement)


def layers(*widths):
    return nn.Sequential(*(nn.Linear(4, 4) if width == 4 else Wide(width) for width in widths))


class Wide(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.down(self.up(x))


def chain(owner):
    return owner.model(torch.ones(2, 4)).mean()


def test_nothing_is_said_of_equal_stages():
    memory, warnings = of(Holder(layers(4, 4)), chain, (0, 1, 2))
    assert [amount.number for amount in memory.of_stages] == [20, 20]
    assert (str(memory), warnings) == ("  held twice: nothing", [])


def test_parameters_of_the_users_own_code_are_held_by_the_stages_that_use_them():
    root = Holder(layers(4, 4, 4))
    root.scale, root.shift, root.gain = (nn.Parameter(torch.ones(2, 4)) for _ in range(3))

    def step(owner, gain=1.0):
        x = owner.model[1](owner.model[0](torch.ones(2, 4)) * owner.scale[:1])
        return (owner.model[2](x) + owner.shift.t().t()).mean() * gain

    split, followed = divide(root, lambda owner: step(owner) * owner.gain.sum(), (0, 1, 2, 3))
    try:
        held = {name: stages for name, stages in split.held.items() if "." not in name}
        assert held == {"scale": {0}, "shift": {2}, "gain": {0, 1, 2}}  # all make the sum
        assert split.cuts(followed.trace()) == [2, 3]
        followed.step = lambda: step(root, root.shift.sum())
        with pytest.raises(
            ConfigurationError, match=r"'shift' is held by stage 2.*this step uses it on stages 0, 1, 2"
        ):
            split.cuts(followed.trace())
        followed.step = lambda: (root.model(torch.ones(2, 4)) * root.scale).mean()
        with pytest.raises(ConfigurationError, match=r"'scale', which stage 0 has, is used after 'model.2'"):
            split.cuts(followed.trace())
    finally:
        followed.close()


def tied():
    root = Holder(embedding=nn.Embedding(30, 4), model=layers(4, 4, 4), head=nn.Linear(4, 30, bias=False))
    root.head.weight = root.embedding.weight
    return root, lambda owner: owner.head(owner.model(owner.embedding(torch.arange(8)))).mean()


def test_tied_weights_are_held_by_their_users_or_once_where_these_are_one_rank():
    memory, (warning,) = of(*tied(), (0, 1, 2, 3))
    assert memory.share_held_twice == pytest.approx(120 / 180)
    assert "held twice: 120 parameters (480 B), 66.7% of all, most of it in 'embedding'" in str(memory)
    assert "'embedding', which stages 0, 2 use, as tied weights are." in warning
    assert "schedule='zbv'" in warning
    memory, warnings = of(*tied(), (0, 1, 2, 3), placement=[0, 1, 0])
    assert (memory.held_twice.number, warnings) == (0, [])


def test_tied_weights_that_are_called_by_another_name_only_are_said_to_be_that():
    root = Holder(shared=nn.Embedding(30, 4), encoder=nn.Embedding(30, 4), model=layers(4, 4, 4), head=nn.Linear(4, 30))
    root.head.weight = root.encoder.weight = root.shared.weight
    _, (warning, *_) = of(
        root, lambda owner: owner.head(owner.model(owner.encoder(torch.arange(8)))).mean(), (0, 1, 2, 3)
    )
    assert "'shared', which stages 0, 2 use, as tied weights are." in warning


def test_layers_called_on_several_stages_and_what_no_step_calls_are_named():
    def repeated(owner):
        x = torch.ones(2, 4)
        for _ in range(2):
            x = owner.model(x)
        return x.mean()

    _, (warning,) = of(Holder(layers(4, 4)), repeated, (0, 2, 4))
    assert "'model.0', which is called on stages 0, 1" in warning
    assert "data_parallel_size=2 with fully_shard=True" in warning
    _, warnings = of(Holder(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))), repeated, (0, 2, 4))
    assert [warning for warning in warnings if "'model.0' changes its buffers, such as running statistics" in warning]

    def mixed(owner):
        x = owner.model.train()(torch.ones(2, 4))
        x = owner.model.eval()(x)
        owner.model.train()
        return x.mean()

    with pytest.raises(ConfigurationError, match=r"'model.0' changes its buffers.*, and uses them without a change"):
        of(Holder(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))), mixed, (0, 2, 4))

    def penalised(owner):
        return chain(owner) + sum(parameter.square().sum() for parameter in owner.parameters())

    memory, warnings = of(Holder(layers(4, 4)), penalised, (0, 1, 2))
    assert (memory.held_twice.number, warnings) == (0, [])  # what comes of a weight is sent, which is one number

    def together(owner):
        return chain(owner) + torch.cat([parameter.flatten() for parameter in owner.parameters()]).norm()

    memory, (warning,) = of(Holder(layers(4, 4)), together, (0, 1, 2))
    assert memory.held_twice.number == 20
    assert "'model.0', which the step uses by itself on stages 0, 1, together with other weights" in warning
    _, (warning,) = of(Holder(layers(4, 4), unused=nn.Linear(4, 4)), chain, (0, 1, 2))
    assert "33.3% of the parameters" in warning
    assert "'unused', which no layer holds that the first batch is known to call" in warning
    assert "hold_uncalled='once'" in warning


def test_what_no_step_calls_is_held_once_where_that_is_asked_for():
    tied = nn.Linear(4, 4)
    for unused, held in ((nn.Linear(4, 4), 60), (tied, 40)):
        root = Holder(nn.Sequential(tied, nn.Linear(4, 4)), unused=unused)
        memory, warnings = of(root, chain, (0, 1, 2), uncalled="once")
        assert (memory.total.number, memory.held_twice.number, warnings) == (held, 0, [])
    _, (warning,) = of(Holder(layers(4, 4), unused=Wide(64)), chain, (0, 1, 2), uncalled="once")
    assert "Stage 1 has 1.94 times the mean" in warning
    assert "most of it in 'unused." in warning
    assert "stays there with any partition" in warning


@pytest.mark.parametrize("uncalled", ["everywhere", "once"])
def test_a_module_that_shares_what_it_uses_is_refused_without_a_way_out_that_is_none(uncalled):
    root = Holder(again=nn.Linear(4, 4), model=layers(4, 4))
    root.model[0].weight, root.model[0].bias = root.again.weight, root.again.bias
    split, followed = divide(root, chain, (0, 1, 2), uncalled)
    followed.step = lambda: root.again(root.model(torch.ones(2, 4))).mean()
    try:
        with pytest.raises(ConfigurationError, match=r"'again', which stage 0 has, is used after 'model.1'") as refused:
            split.stages(followed.trace())
    finally:
        followed.close()
    assert "hold_uncalled" not in str(refused.value)  # it is stage 0 that has it, either way


def test_what_no_stage_has_together_is_named():
    def step(owner):
        return owner.model(torch.ones(2, 4)).mean() + owner.teacher(torch.ones(2, 4)).mean()

    def averages(owner):
        with torch.no_grad():
            owner.teacher[1].weight.mul_(0.9).add_(owner.model[0].weight, alpha=0.1)
        return step(owner)

    root = Holder(model=layers(4, 4), teacher=layers(4, 4))
    split, followed = divide(root, step, (0, 2, 3, 4))
    followed.step = lambda: averages(root)
    try:
        with pytest.raises(
            ConfigurationError, match=r"model\.0\.weight', which stage 0 has, is used together"
        ) as refused:
            split.stages(followed.trace())
    finally:
        followed.close()
    assert "with 'teacher.1.weight', which stage 2 has. Move the boundaries" in str(refused.value)
    assert "in training from the first batch on" in str(refused.value)


def test_a_heavy_stage_is_named_with_boundaries_that_are_better():
    root = Holder(layers(*[16] * 6))
    memory, (warning,) = of(root, chain, (0, 4, 5, 6))
    assert memory.imbalance == pytest.approx(2)
    assert "Stage 0 has 2.00 times the mean" in warning
    assert "partition='custom:0,2,4,6' gives 1.00 times the mean" in warning
    _, (warning,) = of(Holder(layers(4, 4, 64)), chain, (0, 1, 2, 3))
    assert "most of it in 'model.2', which is not divided. Hold the parts of 'model.2' in an nn.Sequential" in warning
