"""Traces of a user's step that leave nothing behind: no attribute, buffer, log, random number or entry of a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_pfo.strategy.compat.patches import all_of
from lightning_pfo.strategy.model.reach.caches import Caches
from lightning_pfo.strategy.model.reach.places import NO_MODULES
from lightning_pfo.strategy.model.reach.untouched import untouched
from lightning_pfo.strategy.model.tracing.dividing.phases import to_be_followed
from lightning_pfo.strategy.model.tracing.events import Trace
from lightning_pfo.strategy.model.tracing.forms.selecting import Selected
from lightning_pfo.strategy.model.tracing.noticing.held import Place
from lightning_pfo.strategy.model.tracing.trace import trace_step
from lightning_pfo.strategy.model.tracing.tracked import Tracked, current_run, following
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.step.batches.rules import form_of
from lightning_pfo.strategy.step.effects.attributes import Attributes
from lightning_pfo.strategy.step.effects.left import Left
from lightning_pfo.strategy.step.effects.outward.calls import Outlets, redirected
from lightning_pfo.strategy.step.effects.outward.noted import Call
from lightning_pfo.strategy.step.effects.outward.opening import openings_told
from lightning_pfo.strategy.step.effects.outward.streams import others_stand_in
from lightning_pfo.strategy.step.effects.tensors import SMALL_BYTES
from lightning_pfo.strategy.step.effects.within import step_under_way


def trace_untouched(
    owner: nn.Module,
    step: Callable[[], Any],
    device: torch.device,
    caches: Caches,
    seed: tuple[int, ...] = (),
    modules: Mapping[str, nn.Module] = NO_MODULES,
    left: Left | None = None,
    *,
    weights: Sequence[Place] = (),
    follows_weights: bool = True,
    on_zeros: bool = True,
) -> Trace:
    """Trace a step of which nothing remains: no attribute, buffer, log, random number or entry of a cache.

    If it does not run with all selected where values of stages decide about shapes, the zeros of the trace decide. If
    it looks at these and fails, as one that divides by them, it is traced with other numbers. If it uses weights by
    themselves it is traced once more, with these followed.

    Args:
        owner: The user's module.
        step: Runs its step.
        device: Where it runs.
        caches: Caches of the process.
        seed: What random numbers of the step derive from.
        modules: Further modules that it may leave something in, by name.
        left: Takes what it leaves, in form.
        weights: Parameters that are followed from the begin; see `trace_step`.
        follows_weights: Whether those of layers may be followed that the step uses by themselves.
        on_zeros: Whether zeros stand for what layers compute; else other numbers do, at once.
    """

    def traced(selected: Selected, rising: bool, weights: Sequence[Place]) -> Trace:
        if left is not None:
            left.logged.clear()
            left.calls.clear()
        with caches.left_alone(), untouched(owner), random_state.isolated(device), logs_noted(owner, left, modules):
            random_state.seed(device, *seed, 0)
            seeded = random_state.get_state(device)
            run = partial(_noting_attributes, owner, modules, step, left)
            trace = trace_step(owner, run, device, selected, rising=rising, weights=weights)
            random_state.notice_draws_on_host(seeded)
        trace.everywhere = list(dict.fromkeys((*trace.everywhere, *_small_buffers(owner))))
        return trace

    failed: list[Trace] = []
    ways = ((Selected.ALL, False), (Selected.BY_VALUES, False), (Selected.ALL, True))
    for selected, rising in ways if on_zeros else ways[-1:]:
        if selected is Selected.BY_VALUES and not failed[0].has_sizes:
            continue
        trace = traced(selected, rising, weights)
        if trace.failure is None:
            if used := to_be_followed(trace, of_layers=follows_weights):
                followed = traced(selected, rising, [*weights, *map(partial(place_of, owner), used)])
                return followed if can_be_followed(followed, trace) else trace
            return trace
        failed.append(trace)
        if not (trace.deciding or trace.has_sizes):
            break
    return _furthest(failed)


def can_be_followed(followed: Trace, trace: Trace) -> bool:
    """Whether a step runs with weights followed; without phases none can use weights that it has changed by itself."""
    return followed.failure is None and (bool(trace.optimizing) or not followed.optimizing)


def _small_buffers(owner: nn.Module) -> Iterator[str]:
    """The names of small buffers of the user's module itself, which all ranks have: hooks look at them."""
    for name, buffer in owner.named_buffers(recurse=False):
        if buffer.numel() * buffer.element_size() <= SMALL_BYTES:
            yield name


def place_of(owner: nn.Module, name: str) -> Place:
    """Where a parameter is, by its name."""
    path, _, attribute = name.rpartition(".")
    return owner.get_submodule(path), attribute


def _furthest(failed: Sequence[Trace]) -> Trace:
    """Of traces that failed the one that has called most layers; of those on zeros, the last."""
    return max(reversed(failed), key=lambda trace: len(trace.marks))


def _noting_attributes(
    owner: nn.Module, modules: Mapping[str, nn.Module], step: Callable[[], Any], left: Left | None
) -> Any:
    """Run a step; the values that it leaves in attributes are wanted at its end."""
    with following(None):
        attributes = Attributes(owner, modules)
    try:
        result = step()
        run = current_run()
        if run is not None:
            run.note(attributes.changed_values())
        if left is not None:
            with following(None):
                changes = {path: (kind, _form_of(value)) for path, (kind, value) in attributes.take_back().items()}
                left.output, left.growth = _form_of(result), attributes.growth(changes)
    finally:
        with following(None):
            attributes.take_back()
    return result


def _form_of(value: Any) -> Any:
    return form_of(value, lambda tensor: not isinstance(tensor, Tracked))


def _note(call: Call, left: Left | None) -> int | None:
    """A call of others is made: which values it wants is told the run under way. Returns its number in `left`."""
    run = current_run()
    if run is not None:
        run.note(call[1:])
    if left is None:
        return None
    with following(None):
        left.calls.append((call[0], *_form_of(call[1:])))
    return len(left.calls) - 1


@contextmanager
def logs_noted(
    owner: nn.Module, left: Left | None = None, modules: Mapping[str, nn.Module] = NO_MODULES
) -> Iterator[None]:
    """Let `self.log` only tell the run under way which values are wanted, and other calls too; nobody is told.

    Iterators give what they will give again, and nothing is written into files.
    """

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        run = current_run()
        if run is not None:
            run.note(value)
        if left is not None:
            with following(None):
                number = _form_of(value) if isinstance(value, (int, float, torch.Tensor)) else None
                left.logged.append((name, number, kwargs.get("batch_size")))

    note = partial(_note, left=left)
    nothing_written = all_of([others_stand_in(owner, modules, note), openings_told(counts=False)])
    with redirected(Outlets(owner), log, note), nothing_written, step_under_way(ends_here=False):
        yield
