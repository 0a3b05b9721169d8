"""What a case is: an ordinary LightningModule and its batches, made by a function of the case's name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional

MakeBatch = Callable[[torch.Generator], Any]
NUM_CLASSES = 5
GROUPS = ("own", "steps", "torchvision", "timm", "transformers")
"""Where cases come from, in the order of tables."""


@dataclass(frozen=True)
class Case:
    """A model that a user might bring.

    Attributes:
        name: What it is called in tables and in the command line.
        make: Makes the module, and the function that makes a batch.
        group: Where it comes from, one of `GROUPS`.
        needs: The package that it needs.
        draws: Whether its forward draws random numbers, which need not be those of one device.
        whole: Whether one device gets whole batches; else it averages the same microbatches, as batch norms want.
    """

    name: str
    make: Callable[[], tuple[L.LightningModule, MakeBatch]]
    group: str
    needs: str | None = None
    draws: bool = False
    whole: bool = False

    @property
    def is_possible(self) -> bool:
        """Whether the package that it needs is there."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


CASES: dict[str, Case] = {}


def case(group: str, name: str | None = None, **options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register the decorated function as a case; its name is that of the function."""

    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        known_as = name or make.__name__
        assert group in GROUPS, group
        assert known_as not in CASES, f"two cases are called {known_as}"
        CASES[known_as] = Case(known_as, make, group, **options)
        return make

    return register


def matching(patterns: Sequence[str]) -> list[Case]:
    """The cases whose name or group matches one of the patterns, group by group."""
    found = [one for one in CASES.values() if any(fnmatch(one.name, p) or fnmatch(one.group, p) for p in patterns)]
    return sorted(found, key=lambda one: GROUPS.index(one.group))


class Module(L.LightningModule):
    """Base of all cases: AdamW on all parameters."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Classifier(Module):
    """Classifies what `model` gives logits for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return functional.cross_entropy(self.model(x), y)


class Regressor(Module):
    """Predicts vectors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return functional.mse_loss(self.model(x), y)


def vectors(width: int = 16, batch_size: int = 16) -> MakeBatch:
    """Vectors to be mapped to vectors."""

    def make(generator: torch.Generator) -> Any:
        x = torch.randn(batch_size, width, generator=generator)
        return x, x.roll(1, 1).tanh()

    return make


def tokens(length: int = 10, batch_size: int = 8, vocabulary: int = 40) -> MakeBatch:
    """Sequences of token numbers (0 is padding, at the end of every other one), and a class for each."""

    def make(generator: torch.Generator) -> Any:
        ids = torch.randint(1, vocabulary, (batch_size, length), generator=generator)
        ids[::2, length - 3 :] = 0
        return ids, torch.randint(NUM_CLASSES, (batch_size,), generator=generator)

    return make


def images(size: int = 32, batch_size: int = 16, channels: int = 3) -> MakeBatch:
    """Images, and a class for each."""

    def make(generator: torch.Generator) -> Any:
        x = torch.randn(batch_size, channels, size, size, generator=generator)
        return x, torch.randint(NUM_CLASSES, (batch_size,), generator=generator)

    return make
