import sys
from types import ModuleType

import pytest
import torch
from torch.nn import functional

from lightning_pfo.core.errors import ConfigurationError
from tests.example_scripts import load_example

resnet = load_example("resnet")
TINY = resnet.model.ResNetConfig(blocks_per_group=1, base_width=8)


def test_layers_are_stem_blocks_and_head_of_different_shapes():
    shapes, x = [], torch.zeros(2, 1, 8, 8)
    for layer in resnet.model.build_layers(resnet.model.ResNetConfig(blocks_per_group=2, base_width=4, widening=2)):
        x = layer(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(4, 8, 8), *[(8, 8, 8)] * 2, *[(16, 4, 4)] * 2, *[(32, 2, 2)] * 2, (10,)]


def test_28_convolutions_deep():
    layers = resnet.model.build_layers(resnet.model.ResNetConfig(blocks_per_group=4, base_width=16, widening=4))
    convolutions = [m for m in layers.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(convolutions) == 25  # WideResNet-28 counts its three shortcut convolutions too
    assert layers[-1][-1].in_features == 16 * 4 * 4


def test_microbatches_change_nothing():
    torch.manual_seed(0)
    model, images = resnet.model.ResNet(TINY).model, torch.rand(8, 1, 8, 8)
    torch.testing.assert_close(model(images), torch.cat([model(part) for part in images.split(2)]))


def test_images_are_real_and_normalised():
    data = resnet.data.Digits(resnet.data.DigitsConfig())
    images, labels = data.train_set.tensors
    assert (len(data.train_set), len(data.val_set)) == (1617, 180)
    assert images.shape[1:] == (1, 8, 8)
    assert (images.min(), images.max()) == (0, 1)
    assert set(labels.tolist()) == set(range(10))


def test_partial_batches_are_dropped():
    data = resnet.data.Digits(resnet.data.DigitsConfig(batch_size=64))
    assert {len(batch[0]) for batch in data.train_dataloader()} == {64}
    assert {len(batch[0]) for batch in data.val_dataloader()} == {64}


def test_too_few_images_are_refused():
    with pytest.raises(ConfigurationError, match=r"there are 1617 and 180. Lower data.batch_size"):
        resnet.data.Digits(resnet.data.DigitsConfig(batch_size=256))


@pytest.mark.slow
def test_it_learns_on_one_device():
    torch.manual_seed(0)
    module, data = resnet.model.ResNet(TINY), resnet.data.Digits(resnet.data.DigitsConfig())
    optimizer = module.configure_optimizers()
    for images, labels in data.train_dataloader():
        loss = functional.cross_entropy(module.model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 1.5  # log(10) = 2.3 without learning


class FakeModels(ModuleType):
    """As much of torchvision.models as the example asks for; it need not be installed."""

    def list_models(self, of):
        return ["tiny"]

    def get_model(self, name, weights, num_classes):
        assert weights is None
        return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())


@pytest.fixture
def torchvision(monkeypatch):
    package = ModuleType("torchvision")
    package.models = FakeModels("torchvision.models")
    monkeypatch.setitem(sys.modules, "torchvision", package)


def test_models_of_torchvision_see_enlarged_images_in_colour(torchvision):
    module = resnet.train.make_model(resnet.torchvision_models.TorchvisionConfig(architecture="tiny", image_size=12))
    enlarged = module._enlarged(torch.rand(2, 1, 8, 8))
    assert enlarged.shape == (2, 3, 12, 12)
    assert torch.equal(enlarged[:, 0], enlarged[:, 2])
    assert module.training_step((torch.rand(2, 1, 8, 8), torch.tensor([0, 3])), 0).requires_grad


def test_unknown_models_of_torchvision_are_refused(torchvision):
    with pytest.raises(ConfigurationError, match="such as wide_resnet50_2; got 'resnet_18'"):
        resnet.train.make_model(resnet.torchvision_models.TorchvisionConfig(architecture="resnet_18"))


def test_where_torchvision_is_missing_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'lightning-pfo\[examples\]'"):
        resnet.train.make_model(resnet.torchvision_models.TorchvisionConfig())
