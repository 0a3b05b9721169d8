"""A byte-level GPT as an ordinary LightningModule; it knows nothing of pipelines.

Shapes: B microbatch, T sequence, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.ranges import check_above, check_between

NUM_BYTES = 256


@dataclass
class ModelConfig:
    """What all models of this example share."""

    learning_rate: float = 3e-3
    """Step size of AdamW."""

    def __post_init__(self) -> None:
        check_above("model.learning_rate", self.learning_rate, 0)


@dataclass
class GptConfig(ModelConfig):
    """Size of the GPT."""

    num_blocks: int = 10
    """Transformer blocks."""
    width: int = 64
    """Width D of the residual stream; a multiple of num_heads."""
    num_heads: int = 4
    """Attention heads."""
    sequence_length: int = 64
    """Bytes T per sequence."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_blocks", "width", "num_heads", "sequence_length"):
            check_between(f"model.{name}", getattr(self, name), 1)
        if self.width % self.num_heads:
            raise ConfigurationError(
                f"model.width is a multiple of model.num_heads; got {self.width} and {self.num_heads}. Use "
                f"model.width={self.num_heads * max(1, self.width // self.num_heads)}."
            )


class Embedding(nn.Module):
    """Bytes (B, T) to vectors (B, T, D): the byte's own plus its position's."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.byte = nn.Embedding(NUM_BYTES, config.width)
        self.position = nn.Embedding(config.sequence_length, config.width)

    def forward(self, text: Tensor) -> Tensor:
        return self.byte(text) + self.position(torch.arange(text.shape[1], device=text.device))


class Block(nn.Module):
    """A pre-norm transformer block, (B, T, D) to (B, T, D) (Radford et al. 2019)."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm_1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_out(self._attend(self.qkv(self.norm_1(x))))
        return x + self.mlp(self.norm_2(x))

    def _attend(self, qkv: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class Gpt(lightning.LightningModule):
    """Predicts the next byte.

    `model` is a sequence of `num_blocks + 2` layers. Embedding and head cost less than a block, so equal numbers of
    layers are unequal work: that is where a plan saves energy.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        head = nn.Sequential(nn.LayerNorm(config.width), nn.Linear(config.width, NUM_BYTES))
        self.model = nn.Sequential(Embedding(config), *(Block(config) for _ in range(config.num_blocks)), head)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        text, next_bytes = batch
        return functional.cross_entropy(self.model(text).flatten(0, 1), next_bytes.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.config.learning_rate)
