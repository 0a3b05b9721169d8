"""Kinds of training on one GPU that all ranks share: losses against plain Lightning's, memory against the forecast.

    python benchmarks/one_gpu.py [cases='offload*,zero3'] [stages=1,2] [device=cuda] [steps=6] [limit_s=120]

A Llama of 66 million parameters is trained (on `device=cpu` a tiny one): precisions, recomputed and offloaded
activations, schedules, a loss over the whole batch, `torch.compile`, replicas, and layers divided over two replicas
(FSDP2). Ranks talk by gloo, since nccl refuses two of them on one GPU. No clock is changed.

Prints a JSON line for each case and number of stages: `largest_gap`, the largest relative difference of a step's loss
to plain Lightning with the same options (rounding: other sizes of microbatches have other kernels), and for each rank
the peak that torch has seen over the peak that was foretold. Exits with the number of cases that failed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from lightning_pfo.cli.settings import read_settings, without_dashes
from lightning_pfo.core.errors import PfoError
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.quiet import QUIET
from tests.strategy.zoo.processes import Failure, run_together

SIZES: dict[str, dict[str, int]] = {
    "cuda": {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12},
    "cpu": {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
}
SHAPES = {"cuda": (32, 256), "cpu": (16, 32)}
"""Samples of a batch, and tokens of each."""


@dataclass
class Settings:
    """What can be told on the command line."""

    cases: str = "*"
    stages: str = "1,2"
    device: str = "cuda"
    steps: int = 6
    limit_s: float = 120.0


class Language(L.LightningModule):
    """A Llama that predicts tokens."""

    def __init__(self, size: dict[str, int], *, fused: bool = False) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM  # here, as it takes seconds

        heads = size["num_attention_heads"]
        self.model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, num_key_value_heads=heads, **size))
        self.fused = fused
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The mean over tokens."""
        loss: torch.Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the loss."""
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One for all."""
        return torch.optim.AdamW(self.parameters(), 1e-4, fused=self.fused or None)


class Pairs(Language):
    """Compares all samples of a batch with one another."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Which is which?"""
        found = self.model(input_ids=batch[0], output_hidden_states=True).hidden_states[-1].mean(1)
        alike = nn.functional.normalize(found, dim=-1)
        return nn.functional.cross_entropy(alike @ alike.T / 0.1, torch.arange(len(alike), device=alike.device))


@dataclass(frozen=True)
class Case:
    """A kind of training: options of the strategy and of the Trainer."""

    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    make: Callable[[dict[str, int]], Language] = Language

    @property
    def replicas(self) -> int:
        """How many there are."""
        return int(self.strategy.get("data_parallel_size", 1))


_BATCH = {"schedule": "gpipe", "loss_over": "batch"}
CASES = {
    "plain": Case(),
    "fused": Case(make=partial(Language, fused=True)),
    "fp16-mixed": Case(trainer={"precision": "16-mixed"}),
    "bf16-mixed": Case(trainer={"precision": "bf16-mixed"}),
    "bf16-true": Case({"precise_gradients": True}, {"precision": "bf16-true"}),
    "recomputed": Case({"activation_checkpointing": "full"}),
    "selective": Case({"activation_checkpointing": "selective"}),
    "offload": Case({"offload_activations": True}),
    "offload-gpipe": Case({"offload_activations": True, "schedule": "gpipe"}),
    "offload-bf16": Case({"offload_activations": True}, {"precision": "bf16-mixed", "gradient_clip_val": 0.5}),
    "zbv": Case({"schedule": "zbv"}),
    "interleaved": Case({"schedule": "interleaved_1f1b"}),
    "batch": Case(_BATCH, make=Pairs),
    "batch-offload": Case({**_BATCH, "offload_activations": True}, make=Pairs),
    "accumulated": Case(trainer={"accumulate_grad_batches": 2}),
    "compile": Case({"compile": True}),
    "replicas": Case({"data_parallel_size": 2}),
    **{stage: Case({"data_parallel_size": 2, "fully_shard": stage}) for stage in ("zero1", "zero2", "zero3")},
    "zero3-bf16": Case({"data_parallel_size": 2, "fully_shard": "zero3"}, {"precision": "bf16-mixed"}),
    "zero3-host": Case({"data_parallel_size": 2, "fully_shard": "zero3", "shard_offload": True}),
}


def train(case: Case, device: str, steps: int, num_ranks: int) -> dict[str, Any]:
    """Train on so many ranks; 0: by plain Lightning. Returns the losses, and bytes foretold and seen."""
    L.seed_everything(0, verbose=False)
    strategy: Any = "auto"
    if num_ranks:
        shared = {"parallel_devices": [torch.device(device)] * num_ranks, "process_group_backend": "gloo"}
        strategy = PfoPipelineStrategy(num_microbatches=4, memory_report=True, **case.strategy, **shared)
    samples, tokens = SHAPES[device]
    data = torch.randint(256, (samples * steps, tokens), generator=torch.Generator().manual_seed(1))
    replicas = case.replicas if num_ranks else 1
    rank = int(os.environ.get("RANK", 0)) * replicas // max(num_ranks, 1)
    # Lightning's own shuffles, and one device has its batches in order
    sampler = DistributedSampler(range(len(data)), replicas, rank, shuffle=False)
    options = {**QUIET, "use_distributed_sampler": False, **case.trainer}
    trainer = L.Trainer(accelerator=device, devices=1, strategy=strategy, max_epochs=1, **options)
    module = case.make(SIZES[device])
    trainer.fit(module, DataLoader(TensorDataset(data), samples // replicas, sampler=sampler))
    found: dict[str, Any] = {"losses": module.losses}
    if num_ranks:
        found["foretold"] = strategy.memory_report.ranks[trainer.global_rank].peak_bytes
        found["seen"] = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return found


def compared(name: str, stages: int, settings: Settings) -> dict[str, Any]:
    """A case on so many stages beside plain Lightning."""
    case = CASES[name]
    run = partial(train, case, settings.device, settings.steps)
    told: dict[str, Any] = {"case": name, "stages": stages, "replicas": case.replicas}
    alone = run_together(run, 1, settings.limit_s, 0)
    ranks = run_together(run, stages * case.replicas, settings.limit_s, stages * case.replicas)
    for found in (alone, ranks):
        if isinstance(found, Failure):
            return {**told, "failed": f"{found.kind}: {found.message}"[:500]}
    assert not isinstance(alone, Failure)
    of_steps = zip(*(rank["losses"] for rank in ranks), strict=True)
    means = [sum(losses) / len(losses) for losses in of_steps]  # replicas have their own
    pairs = zip(means, alone[0]["losses"], strict=True)
    told["largest_gap"] = max(abs(ours - one) / abs(one) for ours, one in pairs)
    told["seen_over_foretold"] = [r["seen"] and round(r["seen"] / r["foretold"], 3) for r in ranks]
    return told


def main(arguments: Sequence[str]) -> int:
    """Run the cases; returns how many failed."""
    try:
        settings: Settings = read_settings(Settings, without_dashes(arguments))
    except PfoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    patterns = settings.cases.split(",")
    num_failed = 0
    for name in (name for name in CASES if any(fnmatchcase(name, pattern) for pattern in patterns)):
        for stages in map(int, settings.stages.split(",")):
            if stages > 1 and "fully_shard" in CASES[name].strategy:
                continue
            told = compared(name, stages, settings)
            num_failed += "failed" in told
            print(json.dumps(told), flush=True)
    return num_failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
