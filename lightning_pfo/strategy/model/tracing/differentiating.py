"""`torch.autograd.grad` in a traced step: its result in form, and what it differentiates by."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from lightning_pfo.strategy.model.tracing.events import Differentiation, Event
from lightning_pfo.strategy.model.tracing.forms.values import zeros_of
from lightning_pfo.strategy.model.tracing.noticing.leaves import is_value
from lightning_pfo.strategy.model.tracing.tracked import Tracked, natively, value_of
from lightning_pfo.strategy.model.variables import users_line, users_module

_SIGNATURE = inspect.signature(torch.autograd.grad)


def gradients_in_form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `torch.autograd.grad` returns, of zeros: in a trace no graph leads through units."""
    given = _SIGNATURE.bind(*args, **kwargs).arguments
    try:
        found = natively(torch.autograd.grad, args, kwargs)
    except RuntimeError:
        if given.get("is_grads_batched"):
            raise
        found = (None,) * len(_inputs(given))
    with torch.set_grad_enabled(bool(given.get("create_graph"))):
        return tuple(
            zeros_of(value_of(by)) if gradient is None else gradient
            for gradient, by in zip(found, _inputs(given), strict=True)
        )


def differentiation(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    position: int,
    events: Sequence[Event],
    taken: Iterable[tuple[int, torch.Tensor]],
    names_of: Callable[[Sequence[Any]], Iterable[str]],
) -> Differentiation:
    """What a call of `torch.autograd.grad` differentiates by.

    Args:
        args: Its arguments.
        kwargs: Its named arguments.
        position: The event that it is.
        events: All events up to it.
        taken: Ordinary tensors with gradients, and the events that take them.
        names_of: Names parameters and buffers, of which other ranks have placeholders that something stands for.
    """
    inputs = _inputs(_SIGNATURE.bind(*args, **kwargs).arguments)
    labels = tuple(tensor.label for tensor in inputs if is_value(tensor))
    others = [tensor for tensor in inputs if not isinstance(tensor, Tracked)]
    takes = [place for place, leaf in taken if place < position and any(_leads_to(leaf, other) for other in others)]
    names = set(names_of(others))
    takes += [place for place, event in enumerate(events[:position]) if not names.isdisjoint(event.held)]
    takes += [
        place
        for place, event in enumerate(events[:position])
        for unit in event.units
        if any(parameter is other for parameter in unit.module.parameters() for other in others)
    ]
    return Differentiation(position, labels, min(takes, default=None), users_line(), users_module())


def _inputs(given: dict[str, Any]) -> Sequence[Any]:
    inputs = given["inputs"]
    return (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)


def _leads_to(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether gradients by a tensor are made of those by what is computed from it."""
    if tensor is source:
        return True
    return any(
        node is source.grad_fn or getattr(node, "variable", None) is source
        for node in operations_behind([tensor.grad_fn])
    )


def operations_behind(operations: Iterable[Node | None]) -> Iterator[Node]:
    """Operations of autograd with all that they lead to, each once, in the order in which graphs have them."""
    waiting = [operation for operation in operations if operation is not None]
    seen = set(waiting)
    while waiting:
        operation = waiting.pop()
        yield operation
        for following, _ in operation.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
