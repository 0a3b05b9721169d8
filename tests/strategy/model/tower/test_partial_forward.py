"""Modules with lists of layers of a user's own: the stages together compute what the module does."""

import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from tests.strategy.model.stages import Holder, Stages


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *, extra):
        return self.linear(x + extra["first"]).tanh() + extra["bias"], {"ignored": x.argmax(-1)}


class Tower(nn.Module):
    """The embedding goes to every layer, a scale is applied between layers, and a layer comes twice."""

    def __init__(self, num_layers=5):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.scale = nn.Parameter(torch.rand(num_layers))
        self.bias = nn.Parameter(torch.rand(4))
        blocks = [Block() for _ in range(num_layers)]
        blocks[3] = blocks[1]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(4, 10)

    def forward(self, ids, scale=1.0):
        x = first = self.embed(ids)
        bias = self.bias * scale
        for factor, block in zip(self.scale, self.blocks, strict=True):
            x, _ = block(x * factor, extra={"first": first, "bias": bias})
        return {"logits": self.head(x), "ids": ids}


@pytest.fixture
def ids():
    return torch.arange(12).reshape(3, 4) % 10


@pytest.mark.parametrize("boundaries", [(0, 5), (0, 1, 5), (0, 2, 3, 4, 5)])
@pytest.mark.parametrize("has_example", [True, False])
def test_stages_compute_what_the_module_does(boundaries, has_example, ids):
    torch.manual_seed(0)
    model = Tower()
    if has_example:
        model.dummy_inputs = {"ids": ids}
    stages = Stages(model, boundaries)
    output, expected = stages.run(ids, scale=0.5), model(ids, scale=0.5)
    assert torch.allclose(output["logits"], expected["logits"], atol=1e-6)
    assert output["ids"] is ids
    for result in (output, expected):
        result["logits"].square().mean().backward()
    found = stages.gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)
    again = stages.run(ids[:, :2], scale=2.0)  # another form
    assert torch.allclose(again["logits"], model(ids[:, :2], scale=2.0)["logits"], atol=1e-6)


def test_what_surrounds_the_layers_is_where_it_is_used_if_that_can_be_known(ids):
    model = Tower()
    first, last = Stages(model, (0, 2, 5)).roots
    assert not any(p.is_meta for root in (first, last) for p in (root.model.embed.weight, root.model.head.weight))
    model.dummy_inputs = {"ids": ids}
    first, last = Stages(model, (0, 2, 5)).roots
    assert [first.model.embed.weight.is_meta, first.model.head.weight.is_meta] == [False, True]
    assert [last.model.embed.weight.is_meta, last.model.head.weight.is_meta] == [True, False]
    for root in (first, last):  # used directly, or by two stages
        assert not any(p.is_meta for p in (root.model.scale, root.model.bias, root.model.blocks[1].linear.weight))


def test_the_example_of_a_model_inside_counts(ids):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Tower()
            self.classifier = nn.Linear(10, 2)

        def forward(self, ids):
            return self.classifier(self.inner(ids)["logits"])

    model = Wrapper()
    model.inner.dummy_inputs = {"ids": ids}
    stages = Stages(model, (0, 2, 5))
    assert torch.allclose(stages.run(ids), model(ids), atol=1e-6)
    held = [{name for name, p in root.model.named_parameters() if not p.is_meta} for root in stages.roots]
    assert "inner.embed.weight" in held[0] - held[1]
    assert "inner.head.weight" in held[1] - held[0]
    assert "classifier.weight" in held[0] & held[1]


def test_weights_of_surroundings_that_are_read_are_kept_everywhere(ids):
    class Tied(Tower):
        def forward(self, ids):
            x = super().forward(ids)["logits"]
            return x + self.embed.weight.sum()

    model = Tied()
    model.dummy_inputs = {"ids": ids}
    stages = Stages(model, (0, 2, 5))
    assert torch.allclose(stages.run(ids), model(ids), atol=1e-6)
    assert not stages.roots[1].model.embed.weight.is_meta


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Leaks(Plain):
    def forward(self, ids):
        return super().forward(ids) + self.embed(ids)


class LeaksBetween(Plain):
    def forward(self, ids):
        x = first = self.embed(ids)
        for layer in self.layers:
            x = layer(x) + first
        return x


class Skips(Plain):
    def forward(self, ids):
        return self.layers[1](self.layers[0](self.embed(ids)))


class Reverses(Plain):
    def forward(self, ids):
        x = self.embed(ids)
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class IgnoresEarlierLayers(Plain):
    def forward(self, ids):
        return [layer(torch.ones(2, 4)) for layer in self.layers][-1]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Leaks, None),
        (LeaksBetween, "stage of layers 1-1 .* arguments of layer 2 contain NaN.*Pass the value as an argument"),
        (Skips, "calling 2 of 3. Do not skip layers"),
        (Reverses, "in order; layer 2 was called when 0 was next"),
        (IgnoresEarlierLayers, "Layer 1 of IgnoresEarlierLayers .* does not take what earlier layers computed"),
    ],
)
def test_what_cannot_be_split_is_refused(model, message, ids):
    model = model()
    stages = Stages(model, (0, 1, 2, 3))
    if message is None:  # the embedding is on every rank, so calling it again after the layers is fine
        assert torch.allclose(stages.run(ids), model(ids), atol=1e-6)
        return
    with pytest.raises(ConfigurationError, match=message):
        stages.run(ids)


def test_the_module_is_as_it_was_after_a_forward_that_ends_early(ids):
    model = Holder(Plain())
    stages = Stages(model.model, (0, 1, 3))
    layers = [list(root.model.layers) for root in stages.roots]
    stages.run(ids)
    assert [list(root.model.layers) for root in stages.roots] == layers
