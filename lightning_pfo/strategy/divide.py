"""How a model is divided into stages: by what its step does with a first microbatch."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError, PartitionError
from lightning_pfo.strategy.earlier import earlier_split
from lightning_pfo.strategy.fitted_units import fit_units
from lightning_pfo.strategy.model.calls import LayerCalls, calls_by_need, check_measurable, layer_calls
from lightning_pfo.strategy.model.memory import memory_of
from lightning_pfo.strategy.model.partition import partition_layers
from lightning_pfo.strategy.model.split import Split, split_units
from lightning_pfo.strategy.model.tracing.dividing.phases import has_phases
from lightning_pfo.strategy.model.tracing.ends import told_of_look
from lightning_pfo.strategy.model.tracing.events import Trace
from lightning_pfo.strategy.model.tracing.forms.values import remember_buffers
from lightning_pfo.strategy.model.tracing.noticing.applied import is_transform
from lightning_pfo.strategy.model.units import Unit, Units, find_units
from lightning_pfo.strategy.step.layer_times import agree_on_layer_times, measure_training_step
from lightning_pfo.strategy.step.programs import Agree
from lightning_pfo.strategy.step.values import ALIKE, Prints

_log = logging.getLogger(__name__)


def divide(
    model: nn.Module,
    pipeline_module: str | None,
    partition: str,
    num_stages: int,
    first_step: Callable[[], Callable[[torch.device], Any] | None] | None,
    device: torch.device,
    agree: Agree,
    uncalled: str = "everywhere",
    *,
    provide: Callable[[], bool] = bool,
    trains: bool = True,
    follows_weights: bool = True,
) -> tuple[Split, list[float]]:
    """Divide a model into stages.

    Args:
        model: The user's module.
        pipeline_module: Dotted name of what is split; None finds it.
        partition: See `partition_layers`.
        num_stages: Number of stages.
        first_step: Makes what runs the step on a first microbatch, on a device; None where there is no batch yet.
        device: Where layers are measured.
        agree: Raises on all ranks what goes wrong with the trace on any; see `agree_on_trace`.
        uncalled: Who holds what the step does not use; see `split_units`.
        provide: Makes what a step that has failed may have missed, and tells whether there is something.
        trains: Whether stages have to run the step; an evaluation that they cannot runs unit by unit.
        follows_weights: Whether what uses weights of layers by themselves may run where the layers are.

    Returns:
        The divided model, and the times (s) of its layers, where they were measured for it.

    Raises:
        ConfigurationError: If it cannot be divided so.
    """
    units = find_units(model, pipeline_module, num_stages)
    before = earlier_split(model, units)  # layers can be measured, and their order found, only while all are there
    if before is not None and partition == "profile":
        return before, []
    if before is None:
        remember_buffers(model)
    is_wanted = before is None and (num_stages > 1 or partition == "profile")
    step = first_step() if first_step is not None and is_wanted else None
    if before is not None:
        split = _split(
            model,
            before.units,
            partition,
            num_stages,
            uncalled,
            before.calls,
            None,
            follows_weights=follows_weights,
            look=before.look,
        )
        held = split.held | {n: s for n, s in before.held.items() if n in split.held}  # it had a trace
        return replace(split, held=held, weights=before.weights, holds_once=before.holds_once), []
    trace: Trace | None = None
    look, by_name = "", False
    if step is not None:
        on_cpu = partial(step, torch.device("cpu"))
        find = partial(find_units, model, pipeline_module, num_stages)
        make = partial(fit_units, model, units, on_cpu, find, at_least=num_stages, follows_weights=follows_weights)
        try:
            make = partial(make, may_look_elsewhere=pipeline_module is None)
            units, found, by_name = _agreed_trace(make, agree)
            if found.failure is not None and provide():
                units, found, by_name = _agreed_trace(make, agree)
            look = "" if found.failure is None else told_of_look(found.failure)
            trace = _telling(found)
        except ConfigurationError as error:
            if trains:
                raise
            _log.info("Layers are taken as the module has them, since stages cannot run the step: %s", error)
    times_s: list[float] = []
    if partition == "profile":
        check_measurable(trace)
        measure = partial(measure_training_step, model, units, partial(step, device), device) if step else None
        times_s = agree_on_layer_times(measure)
    divide_by = partial(
        _split,
        model,
        units,
        partition,
        num_stages,
        uncalled,
        times_s=times_s,
        follows_weights=follows_weights,
        look=look,
    )
    divided: tuple[Split, list[float]] | None = None
    refused: Exception | None = None
    try:
        if trains and trace is not None and follows_weights:
            divided = _holding_least(model, trace, divide_by, _orders(units, trace, times_s, by_name=by_name))
        else:
            divided = _divided(units, trace, divide_by, times_s, trains=trains)
    except Exception as failed:
        refused = failed
    if step is not None:
        agree(refused, None, ALIKE if divided is None else _prints_of(divided[0]))
    if divided is None:
        assert refused is not None
        raise refused
    return divided


def _prints_of(split: Split) -> Prints:
    """What is another one where stages have other weights."""
    number = zlib.crc32(repr(sorted((name, sorted(of)) for name, of in split.held.items())).encode())
    return Prints(number, number, number)


def _prints_of_order(trace: Trace) -> Prints:
    """What is another one where layers are called in another order."""
    return Prints(by_order=zlib.crc32(repr([unit.name for unit, _ in trace.marks]).encode()))


def _divided(
    units: Units, trace: Trace | None, divide_by: Callable[..., Split], times_s: list[float], *, trains: bool
) -> tuple[Split, list[float]]:
    """Divide the layers in the order of their calls, or of the module."""
    if trains or trace is None:
        return divide_by(layer_calls(units, trace), trace), times_s
    called = [unit for unit, _ in trace.marks]
    if len(set(called)) < len(called):  # as where text is generated; stages would have all layers
        with suppress(ConfigurationError):  # there are too few
            return divide_by(layer_calls(units, trace, once=True), None), times_s
    try:
        return divide_by(layer_calls(units, trace), trace), times_s
    except ConfigurationError as error:
        _log.info("Layers are taken as the module has them, since stages cannot run the step: %s", error)
        return divide_by(layer_calls(units, None), None), times_s


def _orders(units: Units, trace: Trace, times_s: list[float], *, by_name: bool) -> list[tuple[LayerCalls, list[float]]]:
    """The orders in which layers may be divided, with their times (s): that of their calls, and that of their need.

    If `by_name`, ranks call them in different orders: those that do not need each other are as the module has them.
    """
    by_call = layer_calls(units, trace)
    called = [unit for unit, _ in trace.marks]
    may_differ = len(set(called)) < len(called) or bool(trace.weights)
    if trace.failure is not None or has_phases(trace) or not (may_differ or by_name):
        return [(by_call, times_s)]
    by_need = calls_by_need(trace, units.layers if by_name else None)
    of_layers: dict[Unit, float] = {}
    for unit, time_s in zip(by_call.layers, times_s, strict=False):
        of_layers[unit] = of_layers.get(unit, 0.0) + time_s
    found = [(by_call, times_s), (by_need, [of_layers[unit] for unit in by_need.layers] if times_s else [])]
    return found[1:] if by_name else found


def _holding_least(
    model: nn.Module,
    trace: Trace,
    divide_by: Callable[..., Split],
    orders: Sequence[tuple[LayerCalls, list[float]]],
) -> tuple[Split, list[float]]:
    """Divide the layers in the order in which ranks hold least together."""
    splits: list[tuple[Split, list[float]]] = []
    errors: list[ConfigurationError] = []
    for calls, times_s in orders:
        try:
            splits.append((divide_by(calls, trace, times_s=times_s), times_s))
        except ConfigurationError as error:
            errors.append(error)
    if not splits:
        raise errors[0]
    return min(splits, key=lambda found: memory_of(model, found[0], range(found[0].num_stages)).held_twice.num_bytes)


def _split(
    model: nn.Module,
    units: Units,
    partition: str,
    num_stages: int,
    uncalled: str,
    calls: LayerCalls,
    trace: Trace | None,
    *,
    times_s: Sequence[float] = (),
    follows_weights: bool,
    look: str = "",
) -> Split:
    """Divide the calls of layers into stages; what is known beside is kept with them."""
    try:
        boundaries = partition_layers(
            partition, calls.num_parameters, num_stages, types=calls.types, times_s=times_s, undivided=calls.undivided
        )
    except PartitionError as error:
        raise PartitionError(f"{error}{_within_transforms(trace)}") from None
    return replace(
        split_units(model, units, calls, boundaries, trace, uncalled=uncalled),
        follows_weights=follows_weights,
        look=look,
    )


def _within_transforms(trace: Trace | None) -> str:
    """What is said of layers that a step calls inside of `torch.func.jvp` and the like."""
    for event in trace.events if trace is not None else ():
        if is_transform(event.what) and len(event.units) > 1:
            return (
                f" The step calls {len(event.units)} parts of the model inside of torch's {event.what.cls}, which is "
                f"one layer, as no stage ends inside: train on one device, or call it around some layers only."
            )
    return ""


def _agreed_trace(make: Callable[[], tuple[Units, Trace]], agree: Agree) -> tuple[Units, Trace, bool]:
    """Units and a trace, with what all ranks have; and whether ranks call layers in different orders."""
    found: tuple[Units, Trace] | None = None
    error: Exception | None = None
    try:
        found = make()
    except Exception as failed:
        error = failed
    by_name = agree(error, *((None, ALIKE) if found is None else (found[1].failure, _prints_of_order(found[1]))))
    if found is None:
        assert error is not None
        raise error
    return *found, by_name


def _telling(trace: Trace) -> Trace | None:
    """A trace, if it says something."""
    if trace.failure is not None and not trace.marks:
        _log.info("The step does not run before training; layers are taken as the module has them: %s", trace.failure)
        return None
    if trace.skips:
        _log.info("The step skips the first batch, by None; layers are taken as the module has them.")
        return None
    return trace
