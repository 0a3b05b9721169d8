"""What a run of a step changes in the settings of optimizers and schedulers, such as learning rates."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_pfo.core.errors import ConfigurationError

Settings = list[dict[str, Any]]
"""Of each group of parameters, all but the parameters."""
Changes = list[tuple[int, str, Any]]
"""The groups of which a setting is another, its name, and what it is."""


class RunSettings:
    """Settings as they were when a run of a step began, and as the run has left them so far.

    Args:
        optimizers: The optimizers.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._first = [_settings_of(optimizer) for optimizer in optimizers]
        self._latest = list(self._first)
        self._schedulers: dict[int, tuple[Any, Any]] = {}

    def changes(self) -> list[tuple[int, Changes]]:
        """What the step itself has set since it was asked for the last time, by the index of the optimizer.

        Raises:
            ConfigurationError: If it has added or removed groups of parameters.
        """
        found = []
        for index, before in enumerate(self._latest):
            now = self._latest[index] = _settings_of(self._optimizers[index])
            if len(now) != len(before):
                raise ConfigurationError(
                    f"A step on a pipeline runs once for each microbatch, so it adds no groups of parameters to its "
                    f"optimizers; optimizer {index} had {len(before)} and has {len(now)} now. Add them in "
                    f"on_train_batch_end, or in another hook."
                )
            changed = [
                (group, name, value)
                for group, (one, other) in enumerate(zip(now, before, strict=True))
                for name, value in one.items()
                if not _is_same(value, other.get(name))
            ]
            if changed:
                found.append((index, changed))
        return found

    def try_scheduler(self, scheduler: Any, step: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Let a scheduler make its step, so that the run sees what it sets; `put_back` undoes it."""
        if id(scheduler) not in self._schedulers:
            self._schedulers[id(scheduler)] = scheduler, copy.deepcopy(state_of(scheduler))
        # where a stage has not the value that it decides by, or the scheduler fails: it will tell of it when it is done
        with warnings.catch_warnings(), suppress(Exception):
            warnings.simplefilter("ignore")  # no optimizer has made a step in this run
            step(*args, **kwargs)
        self._latest = [_settings_of(optimizer) for optimizer in self._optimizers]

    def put_back(self) -> None:
        """Let all be as when the run began."""
        for scheduler, state in self._schedulers.values():
            scheduler.load_state_dict(state)
        for optimizer, groups in zip(self._optimizers, self._first, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=False):
                apply(group, settings)


class Moment:
    """Settings of optimizers and schedulers as they are when this is made, so that a run sees them again.

    Args:
        optimizers: The optimizers.
        schedulers: The schedulers.
        progress: What counts steps of optimizers.
    """

    def __init__(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any], progress: Any) -> None:
        self._settings = [(optimizer, _settings_of(optimizer)) for optimizer in optimizers]
        self._schedulers = [(scheduler, copy.deepcopy(state_of(scheduler))) for scheduler in schedulers]
        self._progress, self._completed = progress, progress.completed

    def show(self) -> None:
        """Let all be as it was."""
        for scheduler, state in self._schedulers:
            scheduler.load_state_dict(copy.deepcopy(state))
        for optimizer, groups in self._settings:
            for group, settings in zip(optimizer.param_groups, groups, strict=False):
                apply(group, settings)
        self._progress.completed = self._completed


def state_of(scheduler: Any) -> dict[str, Any]:
    """The state of a scheduler, without what stands in for its step in a run."""
    step = vars(scheduler).get("step")
    return {name: value for name, value in scheduler.state_dict().items() if step is None or value is not step}


def apply(group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Give settings to a group of parameters; tensors are written into, since others may have them."""
    for name, value in settings.items():
        now = group.get(name)
        if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
            now.copy_(value)
        elif now is not value:
            group[name] = value


def _settings_of(optimizer: Optimizer) -> Settings:
    return [
        {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(value, other)
    return value is other or bool(value == other)
