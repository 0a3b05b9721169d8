"""All that the package uses of Accelerate although it is not public; see `strategy.compat`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn

from lightning_pfo.strategy.compat.patches import Patches

SEEN_IN = "accelerate 1.10 to 1.15, torch 2.6 to 2.15"
PRIVATE = {
    "accelerate.Accelerator._models": (
        "`save_state` and `load_state` would leave the model out, and a model that went through `prepare` before "
        "could not be told."
    ),
    "accelerate.Accelerator._dataloaders": (
        "`save_state` would leave out how far a loader was read, the end of an epoch would not be noticed, and loaders "
        "prepared before would give every rank other batches."
    ),
    "accelerate.Accelerator._optimizers": (
        "An optimizer prepared before would train parameters from before the split, and save a part of its state."
    ),
    "accelerate.Accelerator._schedulers": "Schedulers that were prepared before would make a step for each process.",
    "accelerate.Accelerator._is_accelerate_prepared": (
        "`prepare` would wrap the pipeline in DDP, and shard a loader a second time."
    ),
    "torch.autograd._engine_run_backward": (
        "`torch.autograd.grad` of a step's loss by parameters would blame the user's code, or give None without a word."
    ),
    "torch.optim.lr_scheduler.LRScheduler._step_count": (
        "OneCycleLR would raise after its last step, where Accelerate stops stepping it."
    ),
}
"""Private names, and what they are needed for."""


def is_prepared(item: Any) -> bool:
    """Whether a loader went through `accelerator.prepare`."""
    return bool(getattr(item, "_is_accelerate_prepared", False))


def mark_prepared(item: Any) -> None:
    """Let `accelerator.prepare` leave a model or loader alone."""
    item._is_accelerate_prepared = True


def knows_model(accelerator: Any, model: nn.Module) -> bool:
    """Whether a model went through `accelerator.prepare`."""
    return model in accelerator._models


def number_of_model(accelerator: Any, model: nn.Module) -> int:
    """How many models of its type an accelerator had before; from the lists that hooks are given, some take models."""
    return [id(each) for each in accelerator._models if type(each) is type(model)].index(id(model))


def add_model(accelerator: Any, model: nn.Module, patches: Patches) -> None:
    """Let an accelerator save and load a model."""
    accelerator._models.append(model)
    patches.callback(_remove, accelerator._models, model)


def add_loader(accelerator: Any, loader: Any) -> None:
    """Let an accelerator save and load a loader."""
    accelerator._dataloaders.append(loader)


def loaders_of(accelerator: Any) -> list[Any]:
    """The loaders that an accelerator has prepared."""
    loaders: list[Any] = accelerator._dataloaders
    return loaders


def optimizers_of(accelerator: Any) -> list[Any]:
    """The optimizers that an accelerator has prepared."""
    optimizers: list[Any] = accelerator._optimizers
    return optimizers


def schedulers_of(accelerator: Any) -> list[Any]:
    """The schedulers that an accelerator has prepared."""
    schedulers: list[Any] = accelerator._schedulers
    return schedulers


def has_steps_left(scheduler: Any) -> bool:
    """Whether Accelerate would step one of torch's schedulers: OneCycleLR has an end."""
    return not hasattr(scheduler, "total_steps") or scheduler._step_count <= scheduler.total_steps


def heed_differentiation(heed: Callable[[Sequence[Any], Sequence[Any]], None], patches: Patches) -> None:
    """Call something whenever outputs are differentiated by inputs that are named, with both.

    Torch's own `grad` and `backward` stay what they are: steps are recorded by what they call.
    """
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @wraps(run)
    def heeded(outputs: Any, gradients: Any, keep: bool, create: bool, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if inputs:
            heed(outputs, inputs)
        return run(outputs, gradients, keep, create, inputs, *args, **kwargs)

    patches.set(torch.autograd, "_engine_run_backward", heeded)


def _remove(items: list[Any], item: Any) -> None:
    items[:] = [other for other in items if other is not item]  # `free_memory` may have emptied the list before
