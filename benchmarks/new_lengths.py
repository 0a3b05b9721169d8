"""What a batch of a new length costs: its step is traced, once for each length.

    python benchmarks/new_lengths.py [layers=8] [width=128] [lengths=50] [ranks=2]

Trains a Llama with random weights twice through batches of as many lengths, so that in the second epoch every length is
known, and prints one JSON line of rank 0: the medians (s) of steps of new and of known lengths, of their difference,
and the memory (MB) of all tensors alive after the first epoch that were not there after its first step.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from omegaconf import OmegaConf
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_pfo.strategy import PfoPipelineStrategy

DEFAULTS = {"layers": 8, "width": 128, "lengths": 50, "ranks": 2}
NUM_MICROBATCHES = 4
VOCABULARY = 512


class Module(L.LightningModule):
    """A Llama, and how long its steps took."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
        self.model = LlamaForCausalLM(config)
        self.times_s: list[float] = []
        self.kept_bytes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss of the next tokens."""
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return an optimizer without state."""
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begin to measure."""
        self._begin_s = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Measure, and look at what is kept after the first step of all and the last of an epoch."""
        self.times_s.append(time.perf_counter() - self._begin_s)
        if batch_idx in (0, self.trainer.num_training_batches - 1):
            gc.collect()
            self.kept_bytes.append(bytes_of_tensors())


def bytes_of_tensors() -> int:
    """Of all tensors alive, memory that several share once."""
    sizes: dict[int, int] = {}
    for value in gc.get_objects():
        if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta and value.layout == torch.strided:
            storage = value.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def main() -> None:
    """Train, and print what was measured."""
    settings = OmegaConf.merge(DEFAULTS, OmegaConf.from_cli(sys.argv[1:]))
    generator = torch.Generator().manual_seed(1)
    shapes = [(2 * NUM_MICROBATCHES, 32 + number) for number in range(settings.lengths)]
    batches: Any = [torch.randint(VOCABULARY, shape, generator=generator) for shape in shapes]
    module = Module(settings.layers, settings.width)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=settings.ranks,
        strategy=PfoPipelineStrategy(num_microbatches=NUM_MICROBATCHES),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    if trainer.global_rank == 0:
        new, known = module.times_s[1 : settings.lengths], module.times_s[settings.lengths + 1 :]
        result = {
            **settings,
            "new_s": round(median(new), 4),
            "known_s": round(median(known), 4),
            "difference_s": round(median(a - b for a, b in zip(new, known, strict=True)), 4),
            "kept_mb": round((module.kept_bytes[1] - module.kept_bytes[0]) / 1e6, 3),
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
