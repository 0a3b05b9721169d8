"""Language models of Hugging Face's transformers, with random weights, as an ordinary LightningModule.

Shapes: B microbatch, T sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning
import torch
from torch import Tensor

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.wording import cut, did_you_mean

from model import NUM_BYTES, ModelConfig

MASK = NUM_BYTES
"""The token that stands for a hidden byte; models need one more token than there are bytes."""
_HIDDEN_EVERY = 6
_IGNORED = -100  # as labels of transformers: not part of the loss
_AUTO_MODELS = {
    "next_byte": "AutoModelForCausalLM",
    "hidden_bytes": "AutoModelForMaskedLM",
    "second_half": "AutoModelForSeq2SeqLM",
}


@dataclass
class TransformersConfig(ModelConfig):
    """Which model, how large, and what it learns."""

    family: str = "llama"
    """The model's type in transformers, such as llama, gpt2, bert, t5, mixtral."""
    task: str = "next_byte"
    """next_byte (decoders), hidden_bytes (encoders), or second_half (both: read the first half, write the second)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the family's config in transformers, such as num_hidden_layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task not in _AUTO_MODELS:
            raise ConfigurationError(f"model.task is one of {', '.join(_AUTO_MODELS)}; got {self.task!r}.")


class LanguageModel(lightning.LightningModule):
    """Learns text by the model's own loss.

    Raises:
        ConfigurationError: If transformers is not installed, or has no such model.
    """

    def __init__(self, config: TransformersConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _make(config)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**self._inputs(batch)).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**self._inputs(batch)).loss, prog_bar=True)

    def _inputs(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        text, _ = batch  # models of transformers find the next bytes themselves
        if self.config.task == "next_byte":
            return {"input_ids": text, "labels": text}
        if self.config.task == "second_half":
            half = text.shape[1] // 2
            return {"input_ids": text[:, :half], "labels": text[:, half:].contiguous()}
        hidden = torch.arange(text.shape[1], device=text.device) % _HIDDEN_EVERY == 0
        return {"input_ids": text.masked_fill(hidden, MASK), "labels": text.masked_fill(~hidden, _IGNORED)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.config.learning_rate)


def _make(config: TransformersConfig) -> Any:
    try:
        import transformers  # only for those who choose such a model: it takes seconds
    except ImportError as error:
        raise ConfigurationError(
            f"model.family={config.family} comes from transformers, which is not installed. Run "
            "pip install 'lightning-pfo[examples]', or use model=gpt_tiny."
        ) from error
    if config.family not in transformers.CONFIG_MAPPING:
        raise ConfigurationError(
            f"model.family is a model type of transformers, such as llama, bert, t5; got {config.family!r}."
            f"{did_you_mean(config.family, transformers.CONFIG_MAPPING)}"
        )
    try:
        of_family = transformers.AutoConfig.for_model(config.family, **config.options)
        return getattr(transformers, _AUTO_MODELS[config.task]).from_config(of_family)
    except Exception as error:  # transformers checks options in many ways
        reason = cut(" ".join(str(error).split()), 200)
        raise ConfigurationError(
            f"transformers makes no model of model.family={config.family}, model.task={config.task} and these "
            f"model.options: {reason} Use another task, or options as in conf/model/llama_tiny.yaml."
        ) from error
