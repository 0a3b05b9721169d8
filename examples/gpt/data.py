"""Real text that every machine has: the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import lightning
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.ranges import check_between


@dataclass
class TextConfig:
    """What text, and how it is cut into batches."""

    sequence_length: int = 64
    """Bytes per sequence."""
    batch_size: int = 32
    """Sequences per iteration; a multiple of schedule.num_microbatches."""
    max_bytes: int = 2_000_000
    """Read at most this many bytes."""
    val_fraction: float = 0.1
    """Share of the text that is kept for validation (0 to 1), cut from its end."""

    def __post_init__(self) -> None:
        for name in ("sequence_length", "batch_size", "max_bytes"):
            check_between(f"data.{name}", getattr(self, name), 1)
        check_between("data.val_fraction", self.val_fraction, 0, 1)


def read_stdlib(max_bytes: int) -> bytes:
    """Read the top-level modules of the standard library in alphabetical order, up to `max_bytes`."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    return bytes(text[:max_bytes])


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Successive windows of a text: (bytes, the bytes that follow each), both of shape (sequence_length,)."""

    def __init__(self, text: bytes, sequence_length: int) -> None:
        self.text = torch.from_numpy(np.frombuffer(bytearray(text), dtype=np.uint8))
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.sequence_length
        window = self.text[start : start + self.sequence_length + 1].long()
        return window[:-1], window[1:]


class StdlibText(lightning.LightningDataModule):
    """Batches of the standard library's text; the last partial batch of a pass is dropped.

    Raises:
        ConfigurationError: If the text is too short for one batch of training and one of validation.
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        text = read_stdlib(config.max_bytes)
        cut = int(len(text) * (1 - config.val_fraction))
        self.train_set = Windows(text[:cut], config.sequence_length)
        self.val_set = Windows(text[cut:], config.sequence_length)
        if min(len(self.train_set), len(self.val_set)) < config.batch_size:
            raise ConfigurationError(
                f"Training and validation need a batch of {config.batch_size} sequences of {config.sequence_length} "
                f"bytes each; {len(text)} bytes give {len(self.train_set)} and {len(self.val_set)} sequences. "
                "Raise data.max_bytes or data.val_fraction, or lower data.batch_size."
            )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.train_set, self.config.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.val_set, self.config.batch_size, drop_last=True)
