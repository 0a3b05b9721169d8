"""Trains a case on one device and on the stages of a pipeline, in processes of their own, and compares.

One device trains on the same microbatches and averages their losses, so that batch norm sees the same samples. Both
start from the same weights: all processes of a case are forks of the one that made the module.
"""

from __future__ import annotations

import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader
from typing_extensions import Self

from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.step.batches.splitting import split_batch
from tests.strategy.zoo.case import Case
from tests.strategy.zoo.processes import Failure, run_together

NUM_MICROBATCHES = 4
EQUAL_LOSSES = 2e-5
"""Largest relative difference of losses that counts as equal: rounding, which AdamW amplifies."""
EQUAL_WEIGHTS = 1e-2
"""Likewise of weights and buffers, relative to how far they have moved."""
ALIKE = 0.3
"""Largest relative difference of mean losses where random numbers are others than on one device."""

_CPU = torch.device("cpu")
_Losses = list[float]


@dataclass(frozen=True)
class Settings:
    """How cases are run.

    Attributes:
        steps: Steps of AdamW.
        limit_s: How long one training may take.
        partition: Option of the strategy.
        schedule: Option of the strategy.
        check_loss: Option of the strategy.
    """

    steps: int = 8
    limit_s: float = 120.0
    partition: str = "uniform"
    schedule: str = "1f1b"
    check_loss: bool = True


@dataclass(frozen=True)
class Outcome:
    """What came of a case on so many stages.

    Attributes:
        case: The case.
        stages: Number of stages.
        status: `equal`, `alike` (random numbers are others than on one device), `differs`, or why there is nothing to
            compare: `refused`, `crashed`, `ended`, `too slow`, `broken` (one device cannot train it) or `skipped`.
        message: What the failure says, or what differs.
        loss_difference: Largest relative difference of a step's loss to one device.
        weight_difference: Distance of the weights to those of one device, as a share of the way they went.
        held_twice: Share of the parameters that more than one rank holds: the sum over ranks / all of them - 1.
        largest_share: Share of the parameters on the rank with most.
        seconds: What the training on stages took.
        details: The traceback of a failure.
    """

    case: Case
    stages: int
    status: str
    message: str = ""
    loss_difference: float = float("nan")
    weight_difference: float = float("nan")
    held_twice: float = float("nan")
    largest_share: float = float("nan")
    seconds: float = float("nan")
    details: str = ""

    @classmethod
    def of_failure(cls, case: Case, stages: int, failure: Failure, seconds: float = float("nan")) -> Self:
        """The outcome of a training that failed."""
        return cls(case, stages, failure.kind, failure.message, seconds=seconds, details=failure.details)


def measure(case: Case, stages: Sequence[int], settings: Settings) -> Iterator[Outcome]:
    """Train the case on one device, and on each number of stages; never raises what a model raises."""
    if not case.is_possible:
        yield from (Outcome(case, number, "skipped", f"there is no package {case.needs}") for number in stages)
        return
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder, "reference.pt")
        try:
            torch.manual_seed(0)
            module, make_batch = case.make()
            generator = torch.Generator().manual_seed(1)
            batches = [make_batch(generator) for _ in range(settings.steps)]
            number = 1 if case.whole else NUM_MICROBATCHES
            alone = run_together(_train_alone, 1, settings.limit_s, module, batches, number, reference)
        except Exception as error:  # whatever a constructor raises
            alone = Failure("crashed", f"{type(error).__name__}: {error}", traceback.format_exc())
        for number in stages:
            if isinstance(alone, Failure):
                yield Outcome(case, number, "broken", f"on one device: {alone.message}", details=alone.details)
                continue
            begin_s = time.monotonic()
            train = partial(_train_on_stages, module, batches, reference, number, settings)
            ranks = run_together(train, number, settings.limit_s)
            seconds = time.monotonic() - begin_s
            if isinstance(ranks, Failure):
                yield Outcome.of_failure(case, number, ranks, seconds)
            else:
                yield compare(case, number, alone[0], ranks, seconds)


def _train_alone(module: L.LightningModule, batches: list[Any], num_microbatches: int, path: Path) -> _Losses:
    """Train on one device, and save the weights before and after; returns the losses."""
    _quietly()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    optimizer: Any = module.configure_optimizers()
    module.train()
    losses = []
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    for index, batch in enumerate(batches):
        parts = []
        for number, microbatch in enumerate(split_batch(batch, num_microbatches)):
            random_state.seed(_CPU, 0, 0, 0, 0, index, index, number, 0)  # what a microbatch's step draws first
            output = module.training_step(microbatch, *([index] if takes_index else []))
            loss = output["loss"] if isinstance(output, dict) else output
            (loss / num_microbatches).backward()
            parts.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(parts) / num_microbatches)
    total = sum(parameter.numel() for parameter in module.parameters())
    torch.save({"before": before, "after": module.state_dict(), "total": total}, path)
    return losses


class LossHistory(L.Callback):
    """The loss of every step."""

    def __init__(self) -> None:
        self.losses: _Losses = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


@dataclass(frozen=True)
class Rank:
    """What a rank saw: losses, parameters held, and squared distances of weights (to one device, to the start)."""

    losses: _Losses
    num_held: int
    total: int
    held: frozenset[str]
    moved: frozenset[str]
    distance: float
    way: float
    worst_buffer: tuple[float, str]


def _train_on_stages(
    module: L.LightningModule, batches: list[Any], reference: Path, stages: int, settings: Settings
) -> Rank:
    _quietly()
    history = LossHistory()
    strategy = PfoPipelineStrategy(
        num_microbatches=NUM_MICROBATCHES,
        partition=settings.partition,
        schedule=settings.schedule,
        check_loss=settings.check_loss,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=stages,
        strategy=strategy,
        max_epochs=1,
        callbacks=[history],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    saved = torch.load(reference, mmap=True)
    before, after = saved["before"], saved["after"]
    held = {name: p for name, p in module.named_parameters() if not p.is_meta}
    distance = sum(float((p.detach() - after[name]).square().sum()) for name, p in held.items())
    way = sum(float((after[name] - before[name]).square().sum()) for name in held)
    buffers = [(name, b) for name, b in module.named_buffers() if name in after and not b.is_meta]
    rank = trainer.global_rank
    gaps = [(_relative(b.float(), after[name].float()), f"{name} on rank {rank}") for name, b in buffers]
    names = [name for name, _ in module.named_parameters()]
    moved = frozenset(name for name in names if not torch.equal(before[name], after[name]))
    return Rank(
        history.losses,
        sum(p.numel() for p in held.values()),
        saved["total"],
        frozenset(held),
        moved,
        distance,
        way,
        max(gaps, default=(0.0, "")),
    )


def _relative(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    if tensor.shape != expected.shape or not tensor.numel():
        return 0.0 if tensor.shape == expected.shape else float("inf")
    return float((tensor - expected).norm() / expected.norm().clamp(min=1e-6))


def compare(case: Case, stages: int, alone: _Losses, ranks: list[Rank], seconds: float) -> Outcome:
    losses = ranks[0].losses
    pairs = [*zip(losses, alone, strict=False)]
    gap = max((abs(a - b) / abs(b) if a == a else float("inf") for a, b in pairs), default=float("inf"))
    way = sum(rank.way for rank in ranks)
    weights = (sum(rank.distance for rank in ranks) / way) ** 0.5 if way else float("inf")
    lost = ranks[0].moved - frozenset().union(*(rank.held for rank in ranks))
    buffer, name = max(rank.worst_buffer for rank in ranks)
    mean_gap = abs(sum(losses) - sum(alone)) / abs(sum(alone))
    status, message = "differs", ""
    if len(losses) != len(alone):
        message = f"{len(losses)} losses, {len(alone)} on one device"
    elif any(rank.losses != losses for rank in ranks):
        message = "ranks have different losses"
    elif lost:
        message = f"no rank holds {', '.join(sorted(lost)[:3])}" + (" ..." if len(lost) > 3 else "")
    elif gap <= EQUAL_LOSSES and weights <= EQUAL_WEIGHTS and buffer <= EQUAL_WEIGHTS:
        status = "equal"
    elif case.draws and mean_gap < ALIKE:
        status, message = "alike", "draws other random numbers"
    elif gap <= EQUAL_LOSSES:
        message = f"buffer {name}" if buffer > EQUAL_WEIGHTS else "weights"
    else:
        message = f"losses {' '.join(f'{a:.4g}/{b:.4g}' for a, b in pairs[:3])} ..."
    total = ranks[0].total
    return Outcome(
        case,
        stages,
        status,
        message,
        gap,
        weights,
        sum(rank.num_held for rank in ranks) / total - 1,
        max(rank.num_held for rank in ranks) / total,
        seconds,
    )


def _quietly() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
