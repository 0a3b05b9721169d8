"""How a model is divided into stages: by what its step does with a first microbatch."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError, PartitionError
from lightning_pfo.strategy.earlier import earlier_split
from lightning_pfo.strategy.model.calls import LayerCalls, calls_by_need, check_measurable, layer_calls
from lightning_pfo.strategy.model.memory import memory_of
from lightning_pfo.strategy.model.partition import partition_layers
from lightning_pfo.strategy.model.reach.caches import Caches
from lightning_pfo.strategy.model.split import Split, split_units
from lightning_pfo.strategy.model.tracing.backward_hooks import take_backward_hooks
from lightning_pfo.strategy.model.tracing.dividing.cutting import undivided
from lightning_pfo.strategy.model.tracing.dividing.phases import has_phases
from lightning_pfo.strategy.model.tracing.ends import told_of_look
from lightning_pfo.strategy.model.tracing.events import Trace
from lightning_pfo.strategy.model.tracing.forms.values import remember_buffers
from lightning_pfo.strategy.model.tracing.noticing.applied import AppliedFunction, is_transform
from lightning_pfo.strategy.model.tracing.tracked import follow_units
from lightning_pfo.strategy.model.units import Unit, Units, find_units
from lightning_pfo.strategy.parallel.patches import Patches
from lightning_pfo.strategy.step.layer_times import agree_on_layer_times, measure_training_step
from lightning_pfo.strategy.step.programs import Agree
from lightning_pfo.strategy.step.tracing import trace_untouched
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
        make = partial(_trace, model, units, on_cpu, find, at_least=num_stages, follows_weights=follows_weights)
        try:
            units, found, by_name = _agreed_trace(partial(make, may_look_elsewhere=pipeline_module is None), agree)
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


def _trace(
    model: nn.Module,
    units: Units,
    step: Callable[[], Any],
    find: Callable[..., Units],
    *,
    at_least: int,
    follows_weights: bool,
    may_look_elsewhere: bool,
    opened: frozenset[str] = frozenset(),
    whole: tuple[str, ...] = (),
    beside: tuple[str, ...] = (),
) -> tuple[Units, Trace]:
    """The step on a first microbatch, and the units that it needs.

    Of layers that the step does not call, but parts of which it uses, the parts are layers. A module with some of the
    layers whose own code looks at values, as one that leaves out experts without tokens, is a layer as a whole if
    enough are left, and so is one that calls its layers in an autograd.Function, as a reversible one does. Where the
    step calls none of the layers, as those of a large image encoder with a batch of text, they are looked for in what
    it does call. Where it calls too few, as of a network that grows or one that an autograd.Function runs, all that it
    calls beside are layers too.

    Args:
        model: The user's module.
        units: Its units.
        step: The step.
        find: Finds other units; see `find_units`.
        at_least: How many layers there should be.
        follows_weights: See `divide`.
        may_look_elsewhere: Whether layers may be others than those of a module that was named.
        opened: Layers that have been found not to be called.
        whole: Modules that have been found to look at values.
        beside: Modules that are layers too, as of others the step calls too few.
    """
    again = partial(
        _trace,
        model,
        step=step,
        find=find,
        at_least=at_least,
        follows_weights=follows_weights,
        may_look_elsewhere=may_look_elsewhere,
        opened=opened,
        whole=whole,
        beside=beside,
    )
    split = Split(units, layer_calls(units, None), (), {}, {})
    trace_once = partial(trace_untouched, model, step, torch.device("cpu"), Caches(), follows_weights=follows_weights)
    with Patches() as patches:
        follow_units(units.all, patches)
        take_backward_hooks(model, units.all, patches)
        trace = trace_once()
        while split.follow_into(trace.listened, patches):
            trace = trace_once()
    if (trace.failure is not None and not trace.marks) or trace.skips:
        return units, trace
    owners = _owners_of_applied(model, units, trace) - set(whole)
    if owners and len((fewer := find(opened=opened, whole=(*whole, *sorted(owners)))).layers) >= at_least:
        return again(fewer, whole=(*whole, *sorted(owners)))
    in_parts = opened | _used_in_parts(units, trace)
    if in_parts != opened:
        return again(find(opened=in_parts, whole=whole), opened=in_parts)
    for runs_whole in (_deciding(model, units, trace), _differentiating(model, units, trace, at_least)):
        if runs_whole is not None:
            fewer = find(opened=opened, whole=(*whole, runs_whole))
            if len(fewer.layers) >= at_least:
                return again(fewer, whole=(*whole, runs_whole))
    if not trace.marks:
        called = {unit.name for event in trace.events for unit in event.units}
        if may_look_elsewhere and called:
            with suppress(ConfigurationError):  # what is said of those that were found first helps more
                others = find(called=called)
                if len(others.layers) >= at_least and _names(others) != _names(units):
                    return again(others, may_look_elsewhere=False)
    if may_look_elsewhere and not beside and len({unit for unit, _ in trace.marks}) < at_least:
        called_by_itself = {event.what: None for event in trace.events if isinstance(event.what, Unit)}
        further = tuple(unit.name for unit in called_by_itself if not unit.is_layer and unit.num_parameters)
        if further:
            return again(find(opened=opened, whole=whole, beside=further), beside=further)
    if not trace.marks:
        inside = [event.what for event in trace.events if not set(units.layers).isdisjoint(event.units)]
        if inside:
            name = inside[0].cls if isinstance(inside[0], AppliedFunction) else inside[0]
            raise ConfigurationError(
                f"Layers are divided where the step calls them; those of {units.name!r} are called inside of "
                f"{getattr(name, '__name__', name)}, a function that one stage runs as a whole. Divide layers that "
                f"are called elsewhere (pipeline_module=...), if the model has some, or train it on one stage."
            )
        raise ConfigurationError(
            f"A step calls the layers that are divided into stages; this one calls none of those of {units.name!r}. "
            f"Name the module that it calls: pipeline_module=... of PfoPipelineStrategy or of the pipelined model."
        )
    return units, trace


def _names(units: Units) -> list[str]:
    return [unit.name for unit in units.layers]


def _owners_of_applied(model: nn.Module, units: Units, trace: Trace) -> set[str]:
    """The names of modules with lists of layers whose weights an autograd.Function is given, and of their class."""
    applied = [event for event in trace.events if isinstance(event.what, AppliedFunction)]
    used = [name for event in applied for name in event.held]
    found = set()
    for layer in units.layers:
        if not any(name.startswith(f"{layer.name}.") for name in used):
            continue
        name = layer.name.rpartition(".")[0]
        while name and isinstance(model.get_submodule(name), (nn.ModuleList, nn.ModuleDict)):
            name = name.rpartition(".")[0]
        found.add(name)
    kinds = {type(model.get_submodule(name)) for name in found - {""}}
    # that of the first layers is not noted, as it takes the batch alone
    return {name for name, module in model.named_modules() if name and type(module) in kinds}


def _deciding(model: nn.Module, units: Units, trace: Trace) -> str | None:
    """The name of a module with some of the layers, but not all, whose own code looks at values."""
    return next(
        (name for name, within in _with_layers(model, units, trace.deciding) if within < len(units.layers)), None
    )


def _differentiating(model: nn.Module, units: Units, trace: Trace, at_least: int) -> str | None:
    """The name of a module with layers whose own code differentiates, where that leaves too few places to divide."""
    if not trace.differentiations or len(trace.marks) - len(undivided(trace)) >= at_least:
        return None
    return next(
        (name for name, _ in _with_layers(model, units, [each.module for each in trace.differentiations])), None
    )


def _with_layers(model: nn.Module, units: Units, modules: Sequence[Any]) -> Iterator[tuple[str, int]]:
    """The names of those modules that have layers, and of how many."""
    names: dict[Any, str] = {module: name for name, module in model.named_modules()}
    for name in (names.get(module, "") for module in modules):
        within = sum(unit.name.startswith(f"{name}.") for unit in units.layers) if name else 0
        if within:
            yield name, within


def _used_in_parts(units: Units, trace: Trace) -> frozenset[str]:
    """The names of layers that are not called, but of which a part is."""
    called = {unit for unit, _ in trace.marks}.union(*(event.units for event in trace.events))
    used = {name for event in trace.events for name in event.held}
    if not trace.marks:  # parts that take tensors of the batch alone are no events
        used.update(trace.everywhere)
    return frozenset(
        unit.name
        for unit in units.layers
        if unit not in called and any(name.rpartition(".")[0].startswith(f"{unit.name}.") for name in used)
    )
