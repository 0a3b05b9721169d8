"""The Trainer's dicts of metrics, which a step may write into, and where it finds what it has just logged.

A pipeline logs when a batch is done, so Lightning does not have the values yet. A step that asks for them
(`scheduler.step(self.trainer.callback_metrics["loss"])`) gets those of its microbatch, of which what it does with them
is put together as for values that it has itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from lightning_pfo.strategy.model.compat import METRICS, hold_metrics, metrics_of
from lightning_pfo.strategy.model.reach.of_trainer import trainer_of

_ARGUMENTS = ("prog_bar", "logger", "on_step", "on_epoch")
"""Those of `self.log` that may be given by position."""


def metrics_set_of(owner: Any, is_named: Callable[[str], bool]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The Trainer's dicts of metrics that a step names, which it may write into, and how they are told.

    Args:
        owner: The user's module.
        is_named: Whether a name is in what the step runs.
    """
    named = [name for name in METRICS if is_named(name)]
    trainer = trainer_of(owner) if named else None
    for name, metrics in metrics_of(trainer).items() if named else ():
        if name in named:
            if type(metrics) is dict and name != "progress_bar_metrics":  # of numbers, which only the last stage has
                metrics = _Shown(metrics)
                hold_metrics(trainer, name, metrics)
            yield f"trainer.{name}", metrics


class _Shown(dict[str, Any]):
    """Metrics of the Trainer, with what the step under way has logged, which Lightning's updates do not know yet.

    Attributes:
        logged: That.
    """

    logged: Mapping[str, Any] = MappingProxyType({})

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update them."""
        super().update(*args, **kwargs)
        super().update(self.logged)

    def __reduce__(self) -> Any:  # others get a plain one, which may be in a checkpoint
        return dict, (dict(self),)


class ShowingLogged:
    """Stands for `self.log` in a training step, which finds what it has logged among the Trainer's metrics.

    Args:
        log: What logs.
        metrics: The Trainer's dicts of them, by name.
    """

    def __init__(self, log: Callable[..., Any], metrics: Mapping[str, _Shown]) -> None:
        self._log = log
        self._metrics = metrics

    def __enter__(self) -> None:
        for metrics in self._metrics.values():
            metrics.logged = {}

    def __exit__(self, *_: object) -> None:
        for metrics in self._metrics.values():
            vars(metrics).pop("logged", None)

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Log a value."""
        result = self._log(name, value, *args, **kwargs)
        arguments = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        is_number = isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if not is_number or arguments.get("on_step") is False:  # metric objects say themselves what they have
            return result
        value = value.detach().clone().reshape(()) if isinstance(value, torch.Tensor) else torch.tensor(value)
        value = value if value.is_floating_point() else value.to(torch.get_default_dtype())
        of_step = f"{name}_step" if arguments.get("on_epoch") else name
        self._show("callback_metrics", {name: value, of_step: value})
        if arguments.get("logger") is not False:
            self._show("logged_metrics", {of_step: value})
        return result

    def _show(self, where: str, values: dict[str, Any]) -> None:
        if (metrics := self._metrics.get(where)) is not None:
            metrics.logged = {**metrics.logged, **values}
            metrics.update()


def shown_logged(trainer: Any) -> dict[str, _Shown]:
    """Where a step of now finds what it logs; nowhere in evaluations, which log for their epoch."""
    held = metrics_of(trainer) if getattr(trainer, "training", False) else {}
    return {name: metrics for name, metrics in held.items() if isinstance(metrics, _Shown)}
