"""A (Wide-)ResNet as an ordinary LightningModule; it knows nothing of pipelines.

Shapes: B microbatch, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_pfo.core.ranges import check_above, check_between

NUM_CLASSES = 10


@dataclass
class ModelConfig:
    """What all models of this example share."""

    learning_rate: float = 3e-3
    """Step size of AdamW."""

    def __post_init__(self) -> None:
        check_above("model.learning_rate", self.learning_rate, 0)


@dataclass
class ResNetConfig(ModelConfig):
    """Size of the ResNet."""

    blocks_per_group: int = 3
    """Residual blocks in each of the three groups; the second and third group halve the image."""
    base_width: int = 8
    """Channels of the stem, and with `widening` of the first group; doubled in each further group."""
    widening: int = 1
    """Factor on the channels of all groups: 1 a ResNet, more a WideResNet."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("blocks_per_group", "base_width", "widening"):
            check_between(f"model.{name}", getattr(self, name), 1)


def _norm(channels: int) -> nn.Module:
    # Per image, so that cutting a batch into microbatches changes nothing (batch statistics would).
    return nn.GroupNorm(min(8, channels), channels)


class ResidualBlock(nn.Module):
    """Two convolutions around a shortcut, pre-activation (He et al. 2016).

    (B, C, H, W) to (B, C', H/stride, W/stride).
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _norm(channels_in),
            nn.ReLU(),
            nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False),
            _norm(channels_out),
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
        )
        same = channels_in == channels_out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.residual(x)


def build_layers(config: ResNetConfig) -> nn.Sequential:
    """Stem, `3 * blocks_per_group` blocks, head: (B, 1, H, W) grey images to (B, 10) logits."""
    channels = config.base_width
    layers: list[nn.Module] = [nn.Conv2d(1, channels, 3, padding=1, bias=False)]
    for group in range(3):
        width = config.base_width * config.widening * 2**group
        for block in range(config.blocks_per_group):
            layers.append(ResidualBlock(channels, width, stride=2 if group > 0 and block == 0 else 1))
            channels = width
    layers.append(
        nn.Sequential(
            _norm(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, NUM_CLASSES)
        )
    )
    return nn.Sequential(*layers)


class ResNet(lightning.LightningModule):
    """Classifies images of digits."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.model = build_layers(config)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self.model(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.model(images)
        self.log("val_loss", functional.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_accuracy", (logits.argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.config.learning_rate)
