"""In which mode layers are where a batch is compared: what moves in training only, as dropout, would tell nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_pfo.strategy.compat.patches import Patches


@contextmanager
def modes_set(modes: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Set of modules whether they are in training mode; who opens the context puts that back.

    Those that were and are not stay so while it is open, also where the step says otherwise (`self.net.train()`).
    """
    stay = {module for module, is_training in modes.items() if module.training and not is_training}
    for module, is_training in modes.items():
        module.training = is_training
    train: Any = nn.Module.train

    def train_others(module: nn.Module, mode: bool = True) -> Any:
        result = train(module, mode)
        for part in stay.intersection(module.modules()) if mode else ():
            part.training = False
        return result

    with Patches() as patches:
        patches.set(nn.Module, "train", train_others)
        yield
