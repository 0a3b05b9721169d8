"""What a step may set of its Trainer: `self.trainer.should_stop = True`, learning rates, schedulers, limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_pfo.strategy.model.variables import AllBut, is_library

_OF_OPTIMIZERS = ("optimizers", "lr_schedulers", "lr_scheduler_configs", "param_groups")
_OF_LOADERS = frozenset(("val_check_batch", "_train_start_time", "_last_val_time"))
"""What Lightning sets together with loaders, which reading `trainer.estimated_stepping_batches` may make."""
_OF_CALLBACKS = ("early_stopping_callback", "checkpoint_callback")
"""Properties that have the first of them; with an s, all of them."""
_PARTS = ("dataset", "sampler", "batch_sampler", "collate_fn")
"""Of a loader."""
_ITERATOR = "_iterator"
"""What a loader with workers keeps for its next epoch."""
_LOADERS = ("train_dataloader", "val_dataloaders", "test_dataloaders", "predict_dataloaders")


def trainer_of(owner: Any) -> Any:
    """The Trainer of a module; None without one."""
    try:
        return getattr(owner, "trainer", None)
    except RuntimeError:  # Lightning's modules have none outside of a run
        return None


def settings_of(owner: Any, is_named: Callable[[str], bool]) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    """The attributes and groups of parameters that a step may set, and how they are told.

    A step that optimizes by itself is left out: what it sets for its optimizers is noted elsewhere.

    Args:
        owner: The user's module.
        is_named: Whether a name is in what the step runs.
    """
    trainer = trainer_of(owner)
    if trainer is None:
        return
    if is_named("trainer") and hasattr(trainer, "__dict__"):
        yield "trainer", AllBut(vars(trainer), _OF_LOADERS.__contains__)
    for path, loader in _loaders(trainer, is_named):
        if hasattr(loader, "__dict__"):
            yield path, AllBut(vars(loader), _ITERATOR.__eq__)
    for kind in _OF_CALLBACKS:
        for index, callback in enumerate(getattr(trainer, f"{kind}s", ()) if _is_any(is_named, kind) else ()):
            if is_library(type(callback).__module__):  # of the user's own classes all is noted, see `others_of`
                yield f"trainer.{kind}s[{index}]", vars(callback)
    if is_named("fit_loop") and hasattr(trainer, "fit_loop"):
        yield "trainer.fit_loop", vars(trainer.fit_loop)
    if not any(map(is_named, _OF_OPTIMIZERS)) or not getattr(owner, "automatic_optimization", True):
        return
    for index, optimizer in enumerate(getattr(trainer, "optimizers", ())):
        yield from _groups(f"trainer.optimizers[{index}]", optimizer)
    for index, config in enumerate(getattr(trainer, "lr_scheduler_configs", ())):
        for path, scheduler in _and_inner(f"trainer.lr_scheduler_configs[{index}].scheduler", config.scheduler):
            yield path, vars(scheduler)


def settings_held(owner: Any, held: Mapping[str, Any]) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    """The same of optimizers and schedulers that the module, or an object that it reaches, holds itself.

    A step that optimizes by itself notes elsewhere what it sets for optimizers, and schedulers that the Trainer has.

    Args:
        owner: The user's module.
        held: Optimizers, schedulers, and objects of libraries that may have an optimizer, by how they are told.
    """
    is_automatic = getattr(owner, "automatic_optimization", True)
    noted = [] if is_automatic else [each.scheduler for each in getattr(trainer_of(owner), "lr_scheduler_configs", ())]
    for told, value in held.items():
        if isinstance(value, LRScheduler) and not any(value is each for each in noted):
            for path, scheduler in _and_inner(told, value):
                yield path, vars(scheduler)
        if is_automatic:
            of_it = {} if isinstance(value, Optimizer) else getattr(value, "__dict__", {})
            for path, each in {told: value, **{f"{told}.{name}": each for name, each in of_it.items()}}.items():
                if isinstance(each, Optimizer):
                    yield from _groups(path, each)


def _groups(path: str, optimizer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is set for the groups of an optimizer's parameters, and for further ones."""
    yield f"{path}.defaults", optimizer.defaults
    for number, group in enumerate(optimizer.param_groups):
        yield f"{path}.param_groups[{number}]", group


def _and_inner(path: str, scheduler: Any) -> Iterator[tuple[str, Any]]:
    """A scheduler, and those that it runs."""
    yield path, scheduler
    for name, value in vars(scheduler).items():
        for index, inner in enumerate(value if isinstance(value, (list, tuple)) else ()):
            if isinstance(inner, LRScheduler):
                yield from _and_inner(f"{path}.{name}[{index}]", inner)


def others_of(owner: Any, is_named: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    """Objects of the Trainer that a step names, which may be of the user's own classes, and how they are told.

    Args:
        owner: The user's module.
        is_named: Whether a name is in what the step runs.
    """
    trainer = trainer_of(owner)
    if is_named("datamodule"):
        yield "trainer.datamodule", getattr(trainer, "datamodule", None)
    if is_named("callbacks") or any(_is_any(is_named, kind) for kind in _OF_CALLBACKS):
        for index, callback in enumerate(getattr(trainer, "callbacks", ())):
            yield f"trainer.callbacks[{index}]", callback
    parts = list(filter(is_named, _PARTS))
    for path, loader in _loaders(trainer, is_named) if parts else ():
        for part in parts:
            yield f"{path}.{part}", getattr(loader, part, None)


def _is_any(is_named: Callable[[str], bool], kind: str) -> bool:
    return is_named(kind) or is_named(f"{kind}s")


def _loaders(trainer: Any, is_named: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    """The loaders of the Trainer that a step names; there may be several in a list or dict."""
    for name in filter(is_named, _LOADERS):
        loaders = getattr(trainer, name, None)
        if isinstance(loaders, (list, tuple, Mapping)):
            items = loaders.items() if isinstance(loaders, Mapping) else enumerate(loaders)
            yield from ((f"trainer.{name}[{key!r}]", loader) for key, loader in items)
        elif loaders is not None:
            yield f"trainer.{name}", loaders
