"""Models of torchvision and timm: batch norm, chains of attributes, and heads after lists of layers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from tests.strategy.zoo.case import NUM_CLASSES, Classifier, case, images

_DRAWING = {"Dropout": "p", "StochasticDepth": "p", "DropPath": "drop_prob"}


def _torchvision() -> Any:
    return importlib.import_module("torchvision.models")


def without_dropout(model: nn.Module) -> nn.Module:
    """Set what makes outputs random to nothing: dropout, and layers that are skipped at random."""
    for module in model.modules():
        for class_name, attribute in _DRAWING.items():
            if type(module).__name__ == class_name:
                setattr(module, attribute, 0.0)
    return model


def torchvision_case(name: str, size: int = 32, batch_size: int = 16, change: Any = None, **options: Any) -> None:
    """Register a model of torchvision by its function's name."""

    def make() -> Any:
        model = getattr(_torchvision(), name)(weights=None, num_classes=NUM_CLASSES, **options)
        if change is not None:
            change(model)
        return Classifier(without_dropout(model)), images(size, batch_size)

    case("torchvision", name, needs="torchvision")(make)


def _small_classifier(width: int) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        head = [nn.Linear(width, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, NUM_CLASSES)]
        model.classifier = nn.Sequential(*head)

    return change


for _name in ("resnet18", "wide_resnet50_2", "convnext_tiny", "efficientnet_b0", "regnet_y_400mf"):
    torchvision_case(_name)
torchvision_case("shufflenet_v2_x0_5")
torchvision_case("mobilenet_v3_small", size=64)
torchvision_case("squeezenet1_1", size=64)
torchvision_case("googlenet", size=64, aux_logits=False, init_weights=False)
torchvision_case("vgg11_bn", change=_small_classifier(512 * 7 * 7))
torchvision_case("alexnet", size=64, change=_small_classifier(256 * 6 * 6))


@case("torchvision", needs="torchvision")
def densenet() -> Any:
    return Classifier(_torchvision().DenseNet(8, (2, 2, 2, 2), 16, num_classes=NUM_CLASSES)), images(64)


@case("torchvision", needs="torchvision")
def vit_b_16() -> Any:
    vit = _torchvision().VisionTransformer
    return Classifier(vit(32, 8, 4, 2, 16, 32, num_classes=NUM_CLASSES)), images(32)


@case("torchvision", needs="torchvision")
def swin_t() -> Any:
    model = _torchvision().SwinTransformer([4, 4], 16, [2, 2, 2], [2, 4, 4], [2, 2], num_classes=NUM_CLASSES)
    return Classifier(without_dropout(model)), images(32)


def timm_case(name: str, model: str, size: int = 32, **options: Any) -> None:
    """Register a model of timm by the name that it has there."""

    def make() -> Any:
        made = importlib.import_module("timm").create_model(model, num_classes=NUM_CLASSES, **options)
        return Classifier(without_dropout(made)), images(size)

    case("timm", name, needs="timm")(make)


timm_case("timm_resnet", "resnet18")
timm_case("timm_convnext", "convnext_atto", depths=(2, 2, 2, 2), dims=(8, 16, 24, 32))
timm_case("timm_efficientnet", "efficientnet_lite0", size=64)
timm_case("timm_regnet", "regnety_002", size=64)
timm_case("timm_vit", "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=4, num_heads=2)
timm_case("timm_mobilenet", "mobilenetv3_small_050", size=64)


@case("timm", needs="timm")
def timm_mixer() -> Any:
    mixer = importlib.import_module("timm.models.mlp_mixer").MlpMixer
    model = mixer(num_classes=NUM_CLASSES, img_size=32, patch_size=8, num_blocks=4, embed_dim=16)
    return Classifier(model), images(32)
