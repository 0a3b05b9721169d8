"""Running an unchanged `training_step` on a pipeline.

The first stage calls the user's step for each microbatch only to learn what it feeds to the pipelined module: the
module's `forward` is patched to record its arguments and abort the step (capture). The last stage calls the step again
when the module's output for that microbatch has arrived: the patched `forward` returns it, and the step goes on to its
loss (replay). What the step logs during the replays is collected, averaged over microbatches, and logged on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.sequential import ModuleInputs
from lightning_pfo.strategy.parallel.patches import Patches
from lightning_pfo.strategy.step.compat import batch_value, without_synchronisation
from lightning_pfo.strategy.step.metrics import is_metric, metrics_of, path_of
from lightning_pfo.strategy.step.values import StepValues


class _InputsCaptured(BaseException):
    """Ends a captured step; a BaseException because users may write `except Exception` around their model."""

    def __init__(self, inputs: ModuleInputs) -> None:
        super().__init__()
        self.inputs = inputs


@dataclass
class LogRecorder:
    """Collects `self.log` calls of the microbatches of one step.

    Attributes:
        owner: The user's module, which holds the metric objects that are logged.
        values: What was logged, by name, one for each microbatch.
        arguments: The other arguments of `self.log`, by name.
        metrics: For names under which a metric object was logged, where `owner` holds it.
    """

    owner: nn.Module
    values: dict[str, list[torch.Tensor | float]] = field(default_factory=dict)
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
        self.values.setdefault(name, []).append(value)
        self.arguments[name] = kwargs

    def step_values(self, results: list[Any]) -> StepValues:
        """Summarise: the step's scalar result first (if it has one), then each logged value over microbatches."""
        numbers: list[Any] = []
        result_kind = _result_kind(results)
        if result_kind is not None:
            losses = [result["loss"] if result_kind == "dict" else result for result in results]
            numbers.append(torch.stack([loss.detach().reshape(()).double() for loss in losses]).mean())
        for name, values in self.values.items():
            numbers.append(_reduce(values, self.arguments[name].get("reduce_fx", "mean")))
        logged = tuple((name, self.metrics.get(name), arguments) for name, arguments in self.arguments.items())
        return StepValues(numbers, (result_kind, logged))


def _result_kind(results: list[Any]) -> str | None:
    def is_scalar(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.numel() == 1

    if results and all(is_scalar(result) for result in results):
        return "tensor"
    if results and all(isinstance(result, dict) and is_scalar(result.get("loss")) for result in results):
        return "dict"
    return None


def _reduce(values: list[Any], how: Any) -> torch.Tensor:
    on_device = next((value for value in values if isinstance(value, torch.Tensor)), torch.empty(0))
    stacked = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=on_device.device) for value in values])
    name = how if isinstance(how, str) else getattr(how, "__name__", "mean")
    if name in ("sum", "max", "min"):
        return cast(torch.Tensor, getattr(stacked, name)())
    return stacked.mean()


class StepRedirection:
    """Patches the pipelined module of a user's module while the pipeline runs it.

    Args:
        owner: The user's module, e.g. a LightningModule.
        pipelined: Its submodule that is split into stages.
        name: Name of that submodule, for messages.
    """

    def __init__(self, owner: nn.Module, pipelined: nn.Module, name: str) -> None:
        self._owner = owner
        self._pipelined = pipelined
        self._name = name
        self._metrics = metrics_of(owner)
        self._on_call: Callable[[tuple[Any, ...], dict[str, Any]], Any] = self._refuse

    def install(self, patches: Patches) -> None:
        """Patch the pipelined module's `forward` on the instance, so that its class and names stay as they are."""
        patches.set(self._pipelined, "forward", lambda *args, **kwargs: self._on_call(args, kwargs))

    def _refuse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise ConfigurationError(
            f"The pipelined module {self._name!r} can only be called inside training_step, validation_step, test_step "
            f"or predict_step: elsewhere this process holds the layers of its own stage only. Move the call there."
        )

    @contextmanager
    def _redirected(self, on_call: Callable[[tuple[Any, ...], dict[str, Any]], Any], log: Any) -> Iterator[None]:
        self._on_call = on_call
        self._owner.__dict__["log"] = log
        try:
            yield
        finally:
            self._on_call = self._refuse
            del self._owner.__dict__["log"]

    def capture(self, step: Callable[[], Any]) -> ModuleInputs:
        """Call `step` up to its use of the pipelined module and return what it passes to the module.

        Raises:
            ConfigurationError: If the step ends without calling the module.
        """

        def on_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            raise _InputsCaptured((args, kwargs))

        with self._redirected(on_call, lambda *args, **kwargs: None):
            try:
                step()
            except _InputsCaptured as captured:
                return captured.inputs
        raise ConfigurationError(
            f"Each step calls the pipelined module {self._name!r} exactly once; this one returned without calling it. "
            f"Call self.{self._name}(...) in the step, or name another module with pipeline_module=."
        )

    def replay(self, step: Callable[[], Any], output: Any, recorder: LogRecorder) -> Any:
        """Call `step` with the pipelined module's output and return the step's result.

        Raises:
            ConfigurationError: If the step calls the module a second time.
        """
        calls = 0

        def on_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise ConfigurationError(
                    f"Each step calls the pipelined module {self._name!r} exactly once; this one calls it a second "
                    f"time. Join the inputs of both calls into one batch, e.g. with torch.cat, and split the output."
                )
            return output

        with self._redirected(on_call, recorder.log), without_synchronisation(self._metrics):
            return step()
