"""Classifiers of torchvision, with random weights, as an ordinary LightningModule.

Shapes: B microbatch, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.ranges import check_between

from model import NUM_CLASSES, ModelConfig


@dataclass
class TorchvisionConfig(ModelConfig):
    """Which model, and the images it sees."""

    architecture: str = "wide_resnet50_2"
    """Name of a function of torchvision.models, such as resnet18."""
    image_size: int = 32
    """Height and width in pixels to which images are enlarged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("model.image_size", self.image_size, 8)


class Classifier(lightning.LightningModule):
    """Classifies images of digits, with batch norm over microbatches.

    Raises:
        ConfigurationError: If torchvision is not installed, or has no such model.
    """

    def __init__(self, config: TorchvisionConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _make(config.architecture)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self.model(self._enlarged(images)), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.model(self._enlarged(images))
        self.log("val_loss", functional.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_accuracy", (logits.argmax(dim=1) == labels).float().mean())

    def _enlarged(self, images: Tensor) -> Tensor:
        """Grey images (B, 1, 8, 8) as (B, 3, H, W): as large as the layers want, and in their three colours."""
        return functional.interpolate(images, self.config.image_size, mode="bilinear").expand(-1, 3, -1, -1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.config.learning_rate)


def _make(architecture: str) -> nn.Module:
    try:
        from torchvision import models  # only for those who choose such a model
    except ImportError as error:
        raise ConfigurationError(
            f"model.architecture={architecture} comes from torchvision, which is not installed. Run "
            "pip install 'lightning-pfo[examples]', or use model=wide_resnet."
        ) from error
    if architecture not in models.list_models(models):
        raise ConfigurationError(
            f"model.architecture is a function of torchvision.models, such as wide_resnet50_2; got {architecture!r}."
        )
    made: nn.Module = models.get_model(architecture, weights=None, num_classes=NUM_CLASSES)
    return made
