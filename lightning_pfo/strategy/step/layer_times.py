"""How long each layer takes: a training step of the whole model on one device, with time stamps between layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.compat.tensors import tree_flatten, tree_unflatten
from lightning_pfo.strategy.model.ownership import move_local_tensors
from lightning_pfo.strategy.model.reach.untouched import untouched
from lightning_pfo.strategy.model.tracing.tracked import follow_units, following
from lightning_pfo.strategy.model.units import Unit, Units
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.groups import tell_all
from lightning_pfo.strategy.step.gradients import loss_of
from lightning_pfo.strategy.step.metrics.compat import without_synchronisation
from lightning_pfo.strategy.step.metrics.states import metrics_in, modules_around

_REPEATS = 3


class _Stamp(torch.autograd.Function):
    """Identity that tells when its gradient is there."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, on_backward: Callable[[], None]) -> torch.Tensor:
        ctx.on_backward = on_backward
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.on_backward()
        return gradients[0], None


def measure_layer_times(
    units: Units, step: Callable[[], torch.Tensor], device: torch.device, repeats: int = _REPEATS
) -> list[float]:
    """Measure forward and backward of each call of a layer.

    What runs between two layers counts for the one before; what runs before the first layer counts for that, and what
    follows the last one, the loss too, for the last. So the times add up to that of the whole step.

    Args:
        units: The layers are timed.
        step: Runs one microbatch forward and returns the loss. Its gradients are left in `.grad`.
        device: Where it runs.
        repeats: Number of steps measured, after one to warm up.

    Returns:
        Seconds for each call, the median over steps.
    """
    with Patches() as patches:
        follow_units(units.all, patches)
        runs = [_TimedRun(device).measure(step) for _ in range(repeats + 1)]
    return [median(times) for times in zip(*runs[1:], strict=True)]


class _TimedRun:
    """Notes when each layer of a step begins, and when its gradient is there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._forward: list[float] = []
        self._backward: dict[int, float] = {}

    def measure(self, step: Callable[[], torch.Tensor]) -> list[float]:
        """Run the step forward and backward; returns the seconds of each call."""
        began = self._now()
        with following(self):
            loss = step()
        forward = [began, *self._forward[1:], self._now()]
        num_calls = len(self._forward)
        self._note_backward(num_calls)
        loss.backward()  # type: ignore[no-untyped-call]
        backward = self._backward
        self._note_backward(0)
        times_s = [0.0] * num_calls
        for index in reversed(range(num_calls)):
            backward.setdefault(index, backward[0])  # the layers before are frozen: backward ends with this one
            times_s[index] = forward[index + 1] - forward[index] + backward[index] - backward[index + 1]
        return times_s

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _note_backward(self, index: int) -> None:
        self._backward[index] = self._now()

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Nothing is tracked here."""
        return function(*args, **kwargs)

    def told(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> Any:
        """Nothing is tracked here."""
        return answer

    def decide(self, labels: Iterable[int]) -> None:
        """Nothing is tracked here."""

    def call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit is called."""
        if unit.is_layer:
            index = len(self._forward)
            leaves, structure = tree_flatten((args, kwargs))
            for position, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaves[position] = _Stamp.apply(leaf, partial(self._note_backward, index))  # type: ignore[no-untyped-call]
                    break
            args, kwargs = tree_unflatten(leaves, structure)
            self._forward.append(self._now())
        return unit.compute(*args, **kwargs)

    def enter(self, unit: Unit) -> None:
        """A layer begins that is followed into."""
        self._forward.append(self._now())

    def note(self, values: Any) -> None:
        """Values are wanted at the end."""

    def optimize(self, loss: Any, changed: Iterable[nn.Parameter] = ()) -> None:
        """What the step does to optimize is left out."""

    def looks_again(self, weights: Sequence[torch.Tensor]) -> bool:
        """Weights have not changed here."""
        return False


def measure_training_step(owner: nn.Module, units: Units, step: Callable[[], Any], device: torch.device) -> list[float]:
    """Measure the layers in a user's training step; nothing of the step remains, neither logs nor gradients nor state.

    Args:
        owner: The user's module, which logs.
        units: Its layers are timed.
        step: The user's step on one microbatch.
        device: Where to run it; the whole model has to fit there.

    Raises:
        ConfigurationError: If the model has no values yet.
    """
    if any(tensor.is_meta for tensor in (*owner.parameters(), *owner.buffers())):
        raise ConfigurationError(
            "partition='profile' runs the whole model on one device, but it was built on the meta device, for models "
            "that are too large for that. Use partition='parameters' or 'type:REGEX'."
        )
    move_local_tensors(owner, device)
    metrics = metrics_in(modules_around(owner))
    buffers = [(buffer, buffer.clone()) for buffer in owner.buffers()]
    owner.__dict__["log"] = lambda *args, **kwargs: None
    try:
        with random_state.isolated(device), without_synchronisation(metrics), untouched(owner):
            return measure_layer_times(units, lambda: loss_of(step()), device)
    finally:
        del owner.__dict__["log"]
        for metric in metrics:
            metric.reset()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter in owner.parameters():
            parameter.grad = None


def agree_on_layer_times(measure: Callable[[], list[float]] | None) -> list[float]:
    """Measure on the first rank and tell all; a collective call of all processes.

    Args:
        measure: Returns the times; None where there is nothing to measure with.

    Raises:
        ConfigurationError: On every rank, if `measure` is None or fails.
    """
    if measure is None:
        raise ConfigurationError(
            "partition='profile' measures layers in a training step, so it needs Trainer.fit, or, in a plain loop, "
            "example_batch=... Elsewhere use partition='parameters', or measure with "
            "lightning_pfo.strategy.step.layer_times and use 'custom:...'."
        )
    times_s: list[float] = []
    problem = ""
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            times_s = measure()
        except Exception as error:
            failure, problem = error, f"{type(error).__name__}: {error}"
    times_s, problem = tell_all((times_s, problem), None)
    if failure is not None:
        raise failure
    if problem:
        raise ConfigurationError(f"Measuring layers for partition='profile' failed on rank 0. {problem}")
    return times_s
