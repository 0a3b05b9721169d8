"""The units that a step needs: it is traced, with others each time, until its layers can be divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.calls import layer_calls
from lightning_pfo.strategy.model.reach.caches import Caches
from lightning_pfo.strategy.model.split import Split
from lightning_pfo.strategy.model.tracing.backward_hooks import take_backward_hooks
from lightning_pfo.strategy.model.tracing.dividing.cutting import undivided
from lightning_pfo.strategy.model.tracing.events import Trace
from lightning_pfo.strategy.model.tracing.noticing.applied import AppliedFunction
from lightning_pfo.strategy.model.tracing.tracked import follow_units
from lightning_pfo.strategy.model.units import Unit, Units
from lightning_pfo.strategy.step.tracing import trace_untouched

_LARGEST_SHARE = 0.5
"""Of all parameters: a module with more is divided, whatever its own code does with its buffers ..."""
_MOST_OF_STAGE = 2.0
"""... and so is one that is larger than an even share of a stage by this factor."""


def fit_units(
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
    """Trace the step on a first microbatch, and find the units that it needs.

    Of layers that the step does not call, but parts of which it uses, the parts are layers. A module with some of the
    layers whose own code looks at values, as one that leaves out experts without tokens, is a layer as a whole if
    enough are left; so is one that calls its layers in an autograd.Function, as a reversible one does; and one that is
    not too large and whose own code changes its buffers, as the bias by which experts are chosen, so that they can be
    those of one device. Where the step calls none of the layers, as those of a large image encoder with a batch of
    text, they are looked for in what it does call. Where it calls too few, as of a network that grows or one that an
    autograd.Function runs, all that it calls beside are layers too.

    Args:
        model: The user's module.
        units: Its units.
        step: The step.
        find: Finds other units; see `find_units`.
        at_least: How many layers there should be.
        follows_weights: Whether what uses weights of layers by themselves may run where the layers are.
        may_look_elsewhere: Whether layers may be others than those of a module that was named.
        opened: Layers that have been found not to be called.
        whole: Modules that have been found to look at values, or to be better not divided.
        beside: Modules that are layers too, as of others the step calls too few.

    Returns:
        The units, and what the step does with them.

    Raises:
        ConfigurationError: If the step calls no layers that could be divided.
    """
    again = partial(
        fit_units,
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
    modules = (
        _deciding(model, units, trace),
        _differentiating(model, units, trace, at_least),
        _keeping(model, units, trace, at_least),
    )
    for runs_whole in modules:
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
        if not any(event.units for event in trace.events):
            raise ConfigurationError(
                "Layers, which are divided into stages, are modules that a step calls; this one calls none that has "
                "parameters. Those that it takes by themselves (nn.Parameter, nn.ParameterList, "
                "functional.linear(x, layer.weight)) are no layers: let modules compute with them, and call these, or "
                "train on one stage."
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


def _keeping(model: nn.Module, units: Units, trace: Trace, at_least: int) -> str | None:
    """The name of a module with layers, but not too large for one stage, whose own code changes its buffers."""
    buffers = (name for name in trace.changes if name in dict(model.named_buffers()))
    modules = [model.get_submodule(name.rpartition(".")[0]) for name in buffers]
    most = min(_LARGEST_SHARE, _MOST_OF_STAGE / at_least) * _size_of(model)
    return next(
        (name for name, _ in _with_layers(model, units, modules) if _size_of(model.get_submodule(name)) <= most), None
    )


def _size_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


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
