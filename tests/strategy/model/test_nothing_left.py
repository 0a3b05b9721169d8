"""What tracing a step must not leave behind."""

import functools
import gc
import random
from collections import deque

import pytest
import torch
from torch import nn

from lightning_pfo.strategy.model.reach.caches import Caches, freeze
from lightning_pfo.strategy.model.reach.untouched import untouched
from tests.strategy.model.stages import Holder, Stages


@functools.lru_cache(maxsize=4)
def positions(length):
    return torch.arange(length, dtype=torch.float32)


def with_own_cache(function):
    cached = functools.lru_cache(function)
    return lambda *args: cached(*args)  # found nowhere by name, as in transformers


ramp = with_own_cache(lambda length: torch.linspace(0, 1, length))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.lazily_made = None
        self.by_length = {}

    def forward(self, x):
        length = x.shape[-1]
        if self.lazily_made is None:
            self.lazily_made = torch.full((length,), 0.5)
        if length not in self.by_length:
            self.by_length[length] = torch.ones(length)
        return x + self.linear(x) * positions(length) + ramp(length) * self.lazily_made * self.by_length[length]


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = Layer()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_caches_and_attributes_hold_nothing_of_a_run_on_meta():
    torch.manual_seed(0)
    model, x = Tower(), torch.randn(4, 6)
    stages = Stages(Holder(model), lambda owner: owner.model(x), (0, 1, 3))
    output = stages.run(train=False)
    torch.testing.assert_close(output, model(x), rtol=0, atol=1e-6)
    layer = stages.roots[1].model.layers[0]  # an earlier stage has it: here it was traced only
    assert layer.lazily_made is None
    assert layer.by_length == {}


@pytest.mark.parametrize(("how", "length"), [(gc.freeze, 3), (freeze, 4)])
def test_caches_among_frozen_objects_hold_nothing_either(how, length):
    positions.cache_clear()
    how()
    try:
        with Caches().left_alone():
            positions(length)
            zeros = ramp(length).zero_()
        assert positions.cache_info().currsize == 0
        assert ramp(length) is not zeros
    finally:
        gc.unfreeze()


def test_beit_with_relative_positions_computes_what_the_whole_model_does():
    hf = pytest.importorskip("transformers", reason="the dev extra installs it")
    config = hf.BeitConfig(
        **{"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24},
        **{"image_size": 16, "patch_size": 8, "use_relative_position_bias": True, "drop_path_rate": 0.0},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3},
    )
    torch.manual_seed(0)
    model = hf.BeitForImageClassification(config)
    for name, parameter in model.named_parameters():
        if "relative_position_bias_table" in name:  # zeros at first
            nn.init.normal_(parameter)
    images = torch.randn(2, 3, 16, 16)
    stages = Stages(Holder(model), lambda owner: owner.model(pixel_values=images), (0, 2, 4))
    output = stages.run(train=False).logits
    for cache in gc.get_objects():
        if type(cache) is type(positions) and "beit" in str(cache.__module__):
            cache.cache_clear()  # which the whole model would share
    torch.testing.assert_close(output, model(pixel_values=images).logits, rtol=0, atol=1e-6)


def test_attributes_containers_buffers_and_generators_are_put_back():
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5))
    kept, queue = [1, {"a": torch.zeros(2)}], deque([1], maxlen=3)
    generator, python = torch.Generator().manual_seed(3), random.Random(3)
    numpy = pytest.importorskip("numpy").random.default_rng(3)
    module.kept, module.queue, module.generators = kept, queue, (generator, python, numpy)
    module.count = 0
    module.repeated = torch.ones(1).expand(3)  # cannot be written to

    def draw():
        return torch.rand(1, generator=generator).item(), python.random(), numpy.random()

    expected = draw()
    generator.manual_seed(3)
    python.seed(3)
    numpy.bit_generator.state = pytest.importorskip("numpy").random.default_rng(3).bit_generator.state
    with untouched(module):
        module.eval()
        module.requires_grad_(False)
        module[0](torch.randn(4, 2))
        module[0].running_mean += 1
        module[0].running_var = torch.zeros(2)
        module.count += 1
        module.extra = 1
        kept[1]["a"] += 1
        kept.append(2)
        queue.extend([2, 3, 4])
        draw()
    assert module.training
    assert module[1].training
    assert module[0].weight.requires_grad
    assert module[0].running_mean.tolist() == [0, 0]
    assert module[0].running_var.tolist() == [1, 1]
    assert module.count == 0
    assert not hasattr(module, "extra")
    assert module.kept is kept
    assert len(kept) == 2
    assert kept[1]["a"].tolist() == [0, 0]
    assert list(queue) == [1]
    assert draw() == expected


def test_a_parameter_whose_data_another_tensor_became_has_its_memory_again():
    module = nn.Linear(3, 3)
    before, values = module.bias.data_ptr(), module.bias.detach().clone()
    with untouched(module):
        module.bias.data = torch.ones(3)
    assert module.bias.data_ptr() == before
    assert torch.equal(module.bias, values)


def test_a_buffer_whose_data_another_tensor_became_has_its_memory_and_values_again():
    module = nn.BatchNorm1d(3)
    before, values = module.running_mean.data_ptr(), module.running_mean.clone()
    with untouched(module):
        module.running_mean.data = module.running_mean + 1
        module.running_mean.add_(1)
    assert module.running_mean.data_ptr() == before
    assert torch.equal(module.running_mean, values)


def test_buffers_that_a_trial_has_resized_have_their_size_again():
    module = nn.Module()
    module.register_buffer("least", torch.zeros(0))
    module.register_buffer("scale", torch.tensor([2.0]))
    with untouched(module):
        module.least.resize_(4).fill_(3)
        module.scale.resize_(4).fill_(5)
    assert module.least.shape == (0,)
    assert module.scale.tolist() == [2.0]
