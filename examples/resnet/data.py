"""Real images that come with a package: scikit-learn's handwritten digits."""

from __future__ import annotations

from dataclasses import dataclass

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.ranges import check_between


@dataclass
class DigitsConfig:
    """How the images are cut into batches."""

    batch_size: int = 64
    """Images per iteration; a multiple of schedule.num_microbatches."""
    val_fraction: float = 0.1
    """Share of the images that is kept for validation (0 to 1)."""

    def __post_init__(self) -> None:
        check_between("data.batch_size", self.batch_size, 1)
        check_between("data.val_fraction", self.val_fraction, 0, 1)


class Digits(lightning.LightningDataModule):
    """1797 images of shape (1, 8, 8) with values 0 to 1, and their digits; the last partial batch is dropped.

    Raises:
        ConfigurationError: If there are too few images for one batch of training and one of validation.
    """

    def __init__(self, config: DigitsConfig) -> None:
        super().__init__()
        self.config = config
        pixels, labels = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        digits = torch.tensor(labels)
        cut = int(len(images) * (1 - config.val_fraction))
        self.train_set = TensorDataset(images[:cut], digits[:cut])
        self.val_set = TensorDataset(images[cut:], digits[cut:])
        if min(len(self.train_set), len(self.val_set)) < config.batch_size:
            raise ConfigurationError(
                f"Training and validation need a batch of {config.batch_size} images each; there are "
                f"{len(self.train_set)} and {len(self.val_set)}. Lower data.batch_size or change data.val_fraction."
            )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train_set, self.config.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val_set, self.config.batch_size, drop_last=True)
