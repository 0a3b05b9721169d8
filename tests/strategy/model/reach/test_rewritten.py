import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.reach.rewritten import RewrittenWeights


class Program:
    def __init__(self, module, names):
        self.writing = [(module, names)] if names else []


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)


def begun(names=("weight",)):
    model = Model()
    return model, RewrittenWeights(model), [[Program(model.layer, names)]] * 2


def set_data(weight):
    weight.data = weight.data * 0.5


@pytest.mark.parametrize("write", [torch.no_grad()(lambda weight: weight.mul_(0.5)), set_data])
@pytest.mark.parametrize("use", [lambda layer, x: layer(x), lambda layer, x: x @ layer.weight.t()])
def test_each_microbatch_writes_what_one_device_does_once(write, use):
    model, rewritten, programs = begun()
    weight, x = model.layer.weight, torch.ones(1, 2, requires_grad=True)
    before, losses = weight.detach().clone(), []
    with rewritten.of_run(programs, [0], trains=True, counts=True):
        for _ in range(2):
            with rewritten.of_microbatch(0):
                write(weight)
                losses.append(use(model.layer, x).sum())  # autograd keeps the weight, or a view of it
    assert torch.equal(weight, before * 0.5)
    assert rewritten.names == {"layer.weight"}
    for loss in losses:
        loss.backward()  # torch looks at versions
    assert torch.equal(x.grad, 2 * (before * 0.5).sum(0, keepdim=True))


def test_what_depends_on_the_microbatch_goes_on_from_one_to_the_next():
    model, rewritten, programs = begun()
    weight = model.layer.weight
    before = weight.detach().clone()

    def run():
        with rewritten.of_run(programs, [0], trains=True, counts=True):
            for index in range(2):
                with rewritten.of_microbatch(0), torch.no_grad():
                    weight.add_(index + 1)

    with pytest.raises(ConfigurationError, match=r"self\.layer\.weight in its forward something else for each"):
        run()
    rewritten.restore()
    assert torch.equal(weight, before)
    assert rewritten.give_up()
    assert not rewritten.are_open
    run()
    assert torch.equal(weight, before + 1 + 2)
    assert not rewritten.give_up()
    rewritten.settle()
    run()
    assert torch.equal(weight, before + 2 * (1 + 2))


def test_nothing_remains_of_a_run_that_does_not_count():
    model, rewritten, programs = begun()
    weight = model.layer.weight
    before = weight.detach().clone()
    with (
        rewritten.of_run(programs, [0], trains=False, counts=False),
        rewritten.of_microbatch(0),
        torch.no_grad(),
    ):
        weight.zero_()
    assert torch.equal(weight, before)


def test_embeddings_that_limit_norms_and_what_a_layer_is_given_are_left_alone():
    model = Model()
    model.layer = nn.Embedding(4, 2, max_norm=1.0)
    rewritten = RewrittenWeights(model)
    with rewritten.of_run([[Program(model.layer, ("weight", "given.0.weight"))]], [0], trains=True, counts=True):
        assert not rewritten.names


def test_layers_that_write_for_the_first_time_later_go_on():
    model, rewritten, programs = begun()
    with rewritten.of_run([[Program(model.layer, ())]], [0], trains=True, counts=True):
        pass
    rewritten.settle()
    with rewritten.of_run(programs, [0], trains=True, counts=True):
        assert not rewritten.names


def test_what_a_comparison_finds_is_no_begin_of_the_batch():
    model, rewritten, programs = begun()
    weight = model.layer.weight
    before = weight.detach().clone()
    with rewritten.of_run(programs, [0], trains=True, counts=True), rewritten.of_microbatch(0), torch.no_grad():
        weight.mul_(0.5)
    with rewritten.of_run(programs, [0], trains=False, counts=False), rewritten.of_microbatch(0), torch.no_grad():
        weight.mul_(0.5)
    assert torch.equal(weight, before * 0.5)
    rewritten.restore()
    assert torch.equal(weight, before)
    rewritten.forget()
    weight.data.zero_()
    rewritten.restore()
    assert not weight.any()
