"""The Trainer's dicts of metrics, which a step may write into, and where it finds what it has just logged.

A pipeline logs when a batch is done, so Lightning does not have the values yet. A step that asks for them
(`scheduler.step(self.trainer.callback_metrics["loss"])`) gets those of its microbatch, of which what it does with them
is put together as for values that it has itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.compat import METRICS, has_logged, hold_metrics, metrics_of
from lightning_pfo.strategy.model.reach.of_trainer import trainer_of
from lightning_pfo.strategy.model.tracing.forms.varying import plain_number
from lightning_pfo.strategy.model.tracing.tracked import Tracked
from lightning_pfo.strategy.model.variables import users_line

BY_POSITION = ("prog_bar", "logger", "on_step", "on_epoch")
"""Those of `self.log` that may be given by position."""
_OF_TENSORS = ("callback_metrics", "logged_metrics")
"""The others are numbers, which only the last stage has."""
_ABSENT = object()


def type_of_logged() -> torch.dtype:
    """That in which Lightning keeps numbers that are logged: the default, where that is not narrower than float32."""
    default = torch.get_default_dtype()
    return default if default in (torch.float32, torch.float64) else torch.float32


def metrics_set_of(owner: Any, is_named: Callable[[str], bool]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The Trainer's dicts of metrics that a step names, which it may write into, and how they are told.

    Args:
        owner: The user's module.
        is_named: Whether a name is in what the step runs.
    """
    named = [name for name in METRICS if is_named(name)]
    trainer = trainer_of(owner) if named else None
    shown = shown_logged(trainer) if named else {}
    for name, metrics in metrics_of(trainer).items() if named else ():
        if name in named:
            yield f"trainer.{name}", shown.get(name, metrics)


class _Shown(dict[str, Any]):
    """Metrics of the Trainer, with what the step under way has logged: Lightning updates them when they are asked for.

    Attributes:
        of_loggers: Whether it has what goes to loggers, by the names that it has there.
        of_replicas: Whether there are several.
        is_first: Whether nothing has been logged yet in this epoch, so that Lightning would not update it.
        logged: What the step has logged: names, values and arguments.
        before: What was there instead.
        apart: Names of what replicas will have the mean of, which nobody knows within a step.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.of_loggers = self.of_replicas = self.is_first = False
        self.logged: list[tuple[str, Any, dict[str, Any]]] = []
        self.before: dict[str, Any] = {}
        self.apart: set[str] = set()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update them."""
        super().update(*args, **kwargs)
        self.show()

    def show(self) -> None:
        """Have what was logged."""
        for name, value, arguments in self.logged:
            if self.of_loggers and arguments.get("logger") is False:
                continue
            of_step = f"{name}_step" if arguments.get("on_epoch") else name
            if not isinstance(value, Tracked):  # that would be calls of the step, which are made where it logs only
                if isinstance(value, (int, float)):
                    value = plain_number(value)  # a trace need not follow what is only logged
                value = value.detach().clone().reshape(()) if isinstance(value, torch.Tensor) else torch.tensor(value)
                value = value if value.is_floating_point() else value.to(type_of_logged())
            for key in {of_step} if self.of_loggers else {name, of_step}:
                self.before.setdefault(key, super().get(key, _ABSENT))
                self[key] = value

    def put_back(self) -> None:
        """The step is over."""
        for key, value in self.before.items():
            if value is _ABSENT:
                self.pop(key, None)
            else:
                self[key] = value
        if self.logged:
            self.logged, self.before, self.apart = [], {}, set()

    def __getitem__(self, key: str) -> Any:
        self._check(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """One of them."""
        self._check(key)
        return super().get(key, default)

    def _check(self, key: str) -> None:
        if key in self.apart:
            raise ConfigurationError(
                f"What a step logs with sync_dist=True is the mean over the replicas when the batch is done; within "
                f"the step there is none yet, but it reads trainer.callback_metrics[{key!r}]: {users_line()} Do that "
                f"in on_train_batch_end, where it is the same on all ranks."
            )

    def __reduce__(self) -> Any:  # others get what may be in a checkpoint that is loaded with weights_only=True
        return OrderedDict, (dict(self),)


class ShowingLogged:
    """Stands for `self.log` in a training step, which finds what it has logged among the Trainer's metrics.

    Args:
        log: What logs.
        metrics: The Trainer's dicts of them, by name.
    """

    def __init__(self, log: Callable[..., Any], metrics: Mapping[str, _Shown]) -> None:
        self._log = log
        self._metrics = metrics

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Log a value."""
        result = self._log(name, value, *args, **kwargs)
        arguments = dict(zip(BY_POSITION, args, strict=False)) | kwargs
        is_number = isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if not is_number or arguments.get("on_step") is False:  # metric objects say themselves what they have
            return result
        for metrics in self._metrics.values():
            metrics.logged.append((name, value, arguments))
            if metrics.of_replicas and arguments.get("sync_dist"):
                metrics.apart |= {name, f"{name}_step"}
            if metrics.is_first:
                metrics.show()
        return result

    def close(self) -> None:
        """The step is over."""
        for metrics in self._metrics.values():
            metrics.put_back()


def shown_logged(trainer: Any) -> dict[str, _Shown]:
    """Where a step of now finds what it logs; nowhere in evaluations, which log for their epoch."""
    if not getattr(trainer, "training", False):
        return {}
    found: dict[str, _Shown] = {}
    for name, metrics in metrics_of(trainer).items():
        if name in _OF_TENSORS:
            if not isinstance(metrics, _Shown):
                metrics = _Shown(metrics)
                metrics.of_loggers = name == "logged_metrics"
                metrics.of_replicas = getattr(trainer.strategy, "data_parallel_size", 1) > 1
                hold_metrics(trainer, name, metrics)
            metrics.is_first = not has_logged(trainer)
            found[name] = metrics
    return found
