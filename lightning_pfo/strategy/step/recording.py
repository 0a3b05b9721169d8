"""What a step logs, microbatch by microbatch, on the rank of the last stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.step.compat import batch_value
from lightning_pfo.strategy.step.metrics import is_metric, path_of
from lightning_pfo.strategy.step.values import StepValues


@dataclass
class LogRecorder:
    """Collects `self.log` calls of the microbatches of one step.

    Attributes:
        owner: The user's module, which holds the metric objects that are logged.
        weights: How much each microbatch counts.
        index: The microbatch whose step runs.
        values: What was logged, by name, and for which microbatch.
        arguments: The other arguments of `self.log`, by name.
        metrics: For names under which a metric object was logged, where `owner` holds it.
    """

    owner: nn.Module
    weights: Sequence[float] = ()
    index: int = 0
    values: dict[str, list[tuple[int, torch.Tensor | float]]] = field(default_factory=dict)
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stand in for `LightningModule.log`."""
        if is_metric(value):
            self.metrics[name] = path_of(self.owner, value)
            of_batch = batch_value(value)
            value = math.nan if of_batch is None else of_batch
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.detach().reshape(())
        elif not isinstance(value, (int, float)):
            raise ConfigurationError(
                f"self.log in a pipelined step takes a number, a one-element tensor or a metric object; {name!r} is a "
                f"{type(value).__name__}. Log its mean, or the parts one by one."
            )
        if args:  # prog_bar, logger, on_step, on_epoch may be given by position
            kwargs.update(zip(("prog_bar", "logger", "on_step", "on_epoch"), args, strict=False))
        if kwargs.get("batch_size") is not None:  # the user counts microbatches; what is logged stands for the batch
            kwargs["batch_size"] += self.arguments.get(name, {}).get("batch_size", 0)
        self.values.setdefault(name, []).append((self.index, value))
        self.arguments[name] = kwargs

    def step_values(self, results: list[Any]) -> StepValues:
        """Summarise: the step's scalar result first (if it has one), then each logged value over microbatches."""
        numbers: list[Any] = []
        result_kind = _result_kind(results)
        if result_kind is not None:
            losses = [result["loss"] if result_kind == "dict" else result for result in results]
            numbers.append(self._mean(list(enumerate(loss.detach().reshape(()) for loss in losses)), is_loss=True))
        for name, values in self.values.items():
            numbers.append(self._reduce(values, self.arguments[name].get("reduce_fx", "mean")))
        logged = tuple((name, self.metrics.get(name), arguments) for name, arguments in self.arguments.items())
        return StepValues(numbers, (result_kind, logged))

    def _reduce(self, values: list[tuple[int, Any]], how: Any) -> torch.Tensor:
        name = how if isinstance(how, str) else getattr(how, "__name__", "mean")
        if name in ("sum", "max", "min"):
            return cast(torch.Tensor, getattr(_stack([value for _, value in values]), name)())
        return self._mean(values)

    def _mean(self, values: list[tuple[int, Any]], *, is_loss: bool = False) -> torch.Tensor:
        """The weighted mean; of losses the sum, if weights say that they are to be added."""
        weights = [self.weights[index] if self.weights else 1.0 for index, _ in values]
        counted = [(weight, value) for weight, (_, value) in zip(weights, values, strict=True) if weight]
        if not counted:
            return _stack([value for _, value in values]).mean()
        stacked = _stack([value for _, value in counted])
        total = 1.0 if is_loss and self.weights else sum(weight for weight, _ in counted)
        return (stacked * stacked.new_tensor([weight / total for weight, _ in counted])).sum()


def _stack(values: Sequence[Any]) -> torch.Tensor:
    on_device = next((value for value in values if isinstance(value, torch.Tensor)), torch.empty(0))
    return torch.stack([torch.as_tensor(value, dtype=torch.float64, device=on_device.device) for value in values])


def _result_kind(results: list[Any]) -> str | None:
    def is_scalar(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.numel() == 1

    if results and all(is_scalar(result) for result in results):
        return "tensor"
    if results and all(isinstance(result, dict) and is_scalar(result.get("loss")) for result in results):
        return "dict"
    return None
