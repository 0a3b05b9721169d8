"""What a module returns, in form: found without its values and without computing."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence

from lightning_pfo.strategy.compat.autograd import LACKS_GRADIENTS
from lightning_pfo.strategy.compat.modules import tensors_of
from lightning_pfo.strategy.compat.patches import all_of
from lightning_pfo.strategy.compat.tensors import change_mark, form_without_values, version_of
from lightning_pfo.strategy.model.tracing.differentiating import operations_behind
from lightning_pfo.strategy.model.tracing.forms.hidden import hides_tensor, hiding, opened
from lightning_pfo.strategy.model.tracing.forms.holders import AssignedBuffers
from lightning_pfo.strategy.model.tracing.forms.left import Kept, Place, place_of_buffer, with_all_left
from lightning_pfo.strategy.model.tracing.forms.over_time import FewTimeSteps, Saved
from lightning_pfo.strategy.model.tracing.forms.selecting import Selected, Selecting
from lightning_pfo.strategy.model.tracing.forms.values import (
    LooksBounded,
    fill_rising,
    form_of,
    mode_without_values,
    remembered_buffer,
    rising,
    strides_of,
    without_reports,
    zeros,
)
from lightning_pfo.strategy.model.tracing.forms.varying import (
    all_varying,
    differing,
    larger_arguments,
    warnings_unheard,
)
from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder
from lightning_pfo.strategy.model.tracing.trees import tree_flatten, tree_leaves, tree_unflatten
from lightning_pfo.strategy.model.variables import told_of_error
from lightning_pfo.strategy.parallel.holder import Holder

_log = logging.getLogger(__name__)

_Attempt = Callable[[], "Outline"]
_TAKES_NO_HOOKS = "support saved tensor hooks"
"""In what torch says where `torch.func` differentiates while hooks count what is kept."""


@dataclass(frozen=True)
class Same:
    """A result that is one of the arguments.

    Attributes:
        argument: Which, of all leaves of the arguments.
    """

    argument: int


@dataclass(frozen=True)
class Outline:
    """What a call returns, in form.

    Attributes:
        leaves: Of what it returns, flattened: forms of tensors (without values), `Same`, or anything else.
        structure: What puts the leaves together.
        changed: The arguments that are tensors and are changed in place.
        given_gradients: Those of them that need gradients from then on.
        saved_bytes: What autograd keeps for its backward, beside parameters.
        changes_state: Whether it changes buffers of its own.
        changes_weights: The names of those of its parameters that it changes.
        varying: For each leaf the dimensions whose size depends on values; empty if none has any.
        from_values: Whether it was found with values, on which it may depend.
        rewrites: Whether it changes containers that it is given; then what it returns stands here together with what
            its arguments and named arguments are afterwards.
        returns: Which of these it returns, if it changes and returns one; else -1.
        left: The attributes of its parts in which it leaves tensors; these stand here behind what it returns.
        hiding: The class of something with tensors in it that cannot be taken apart; none: "".
        way: How it was found; 0: in the first way of `outline_call`.
        detached: The arguments that need gradients and get none of what it returns, such as one that it detaches.
        guessed_after: With what it fails, and the line, where the form is taken for that of its first argument.
    """

    leaves: list[Any]
    structure: Any
    changed: list[int]
    given_gradients: tuple[int, ...] = ()
    saved_bytes: int = 0
    changes_state: bool = False
    changes_weights: tuple[str, ...] = ()
    varying: tuple[frozenset[int], ...] = ()
    from_values: bool = False
    rewrites: bool = False
    returns: int = -1
    left: tuple[Place, ...] = ()
    hiding: str = ""
    way: int = 0
    detached: tuple[int, ...] = ()
    guessed_after: str = ""


def outline_call(
    module: nn.Module,
    forward: Any,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    device: torch.device,
    *,
    selects_all: bool = False,
    again: bool = False,
    counts: bool = True,
) -> Outline:
    """Find what a call returns in form; parameters may be anywhere, or nowhere.

    First with tensors that have no values. If what the module computes depends on values, as where experts are chosen,
    it is run on zeros, and if it fails on these, as where it divides by what it reads, on other numbers. If all fails,
    as for layers that are divided over processes, the result is taken to have the form of the first tensor among the
    arguments, as it has for most layers.

    Args:
        module: The module.
        forward: Its `forward`.
        arguments: Its arguments and named arguments; ordinary tensors.
        device: Where the module runs.
        selects_all: Whether all is selected where values decide about shapes; see `selecting`.
        again: Whether it has run in the first way, and does so again, or fails.
        counts: Whether it is counted what autograd keeps, which it is not of what `torch.func` differentiates.
    """
    if device.type == "cpu":
        device = torch.device("cpu")  # "cpu:0" would be another device than that of the parameters
    mode = mode_without_values()
    call = functools.partial(_call, module, forward, arguments, device, counts)
    attempts: list[_Attempt] = [
        lambda: call(
            all_of([mode, FewTimeSteps()]),
            functools.partial(form_of, mode),
            make=functools.partial(form_without_values, mode),
        ),
        *([lambda: _with_all_selected(call)] if selects_all else []),
        lambda: replace(call(LooksBounded(), _as_it_is), from_values=True),
        lambda: replace(call(LooksBounded(), rising, fill_rising), from_values=True),
        lambda: replace(_form_of_first(module, arguments), guessed_after=told_of_error(failures[-1])),
    ]
    failures: list[Exception] = []
    try:
        for way, attempt in enumerate(attempts[:1] if again else attempts):
            try:
                with without_reports():
                    found = attempt()
                    # with other values it may take other arguments
                    return replace(found, way=way, detached=() if way else found.detached)
            except Exception as error:
                _log.debug("%s does not run without values: %s", type(module).__name__, error)
                failures.append(error)
                if counts and _TAKES_NO_HOOKS in str(error):
                    return outline_call(
                        module, forward, arguments, device, selects_all=selects_all, again=again, counts=False
                    )
                if not torch.is_grad_enabled() and LACKS_GRADIENTS in str(error):
                    break  # it differentiates, which nothing can here
        raise failures[0]
    finally:
        failures.clear()  # they know this call, which would hold what it has found until garbage is collected


def varying_of_call(
    module: nn.Module,
    forward: Any,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    outline: Outline,
    device: torch.device,
    selects_all: bool,
) -> Sequence[frozenset[int]]:
    """The dimensions of what a call returns whose size depends on values, if sizes of its arguments do.

    Args:
        module: The module.
        forward: Its `forward`.
        arguments: Its arguments and named arguments; what varies knows it.
        outline: What it returns.
        device: Where the module runs.
        selects_all: See `outline_call`.
    """
    if isinstance(module, nn.RNNBase) and isinstance(arguments[0][0] if arguments[0] else None, PackedSequence):
        # it would not run on sizes that contradict each other; their steps vary, the states they end with do not
        return [frozenset({0}) if index == 0 else frozenset() for index in range(len(outline.leaves))]
    leaves, structure = tree_flatten(arguments)
    try:
        larger = tree_unflatten(larger_arguments(leaves), structure)
        with warnings_unheard():
            of_larger = outline_call(module, forward, larger, device, selects_all=selects_all)
        own = outline.varying or (frozenset(),) * len(outline.leaves)
        changing = differing(outline.leaves, of_larger.leaves)
        return [one | other for one, other in zip(own, changing, strict=True)]
    except Exception:  # what does not run so may depend on anything
        return all_varying(outline.leaves)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _with_all_selected(call: Callable[..., Outline]) -> Outline:
    """What a module returns that runs on zeros; sizes vary that are others if less is selected."""
    every, fewer = Selecting(Selected.ALL, by_stages=True), Selecting(Selected.FEWER, by_stages=True)
    outline = call(all_of([every, LooksBounded()]), _as_it_is)
    if not every.by_stages_found:
        return replace(outline, from_values=True)
    varying = differing(outline.leaves, call(all_of([fewer, LooksBounded()]), _as_it_is).leaves)
    return replace(outline, from_values=True, varying=tuple(varying) if any(varying) else ())


def _call(
    module: nn.Module,
    forward: Any,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    device: torch.device,
    counts: bool,
    mode: AbstractContextManager[Any],
    convert: Callable[[torch.Tensor], torch.Tensor],
    convert_held: Callable[[torch.Tensor], torch.Tensor] = _as_it_is,
    make: Callable[..., torch.Tensor] = zeros,
) -> Outline:
    leaves, structure = tree_flatten(arguments)
    inputs = [convert(_on(leaf, device)) if _is_tensor(leaf) else _copied(leaf) for leaf in leaves]
    hid_before = list(filter(hides_tensor, inputs))
    versions = [version_of(leaf) if _is_tensor(leaf) else 0 for leaf in inputs]
    positions = {id(leaf): index for index, leaf in enumerate(inputs) if _is_tensor(leaf)}
    assigned = AssignedBuffers(module)
    bare = Holder(module, assigned.around(forward))
    bare.given = nn.ModuleList(leaf for leaf in leaves if isinstance(leaf, nn.Module))
    tensors = _held_tensors(bare, device, make, convert_held)
    with Kept(module) as kept, mode:
        state = {name: change_mark(tensor) for name, tensor in tensors.items()}
        args, kwargs = tree_unflatten(inputs, structure)
        ways_in = {i: get_gradient_edge(leaf).node for i, leaf in enumerate(inputs) if _needs_gradients(leaf)}
        saved = Saved(tensors.values())
        with saved if counts else nullcontext():
            result = opened(functional_call(bare, tensors, args, kwargs, tie_weights=False))
    rewritten = {name for name, mark in state.items() if change_mark(tensors[name]) != mark}
    given, given_structure = tree_flatten((args, kwargs))
    rewrites = given_structure != structure or any(a is not b for a, b in zip(given, inputs, strict=True))
    returns = next((i for i, v in enumerate([*args, *kwargs.values()]) if rewrites and v is result), -1)
    hidden = hiding(tree_leaves((result, given)), without=hid_before)
    left = [*kept.take_left(), *((place_of_buffer(part, name), [tensor]) for part, name, tensor in assigned.found)]
    outline = Outline([], None, [], rewrites=rewrites, returns=returns, left=tuple(place for place, _ in left))
    found, structure = tree_flatten(with_all_left(result, (args, kwargs), outline, [values for _, values in left]))
    changed = [
        index
        for index, (leaf, version) in enumerate(zip(inputs, versions, strict=True))
        if _is_tensor(leaf) and version_of(leaf) != version
    ]
    made = [leaf.grad_fn for leaf in found if _needs_gradients(leaf) and id(leaf) not in positions]
    reached = set(operations_behind(made)) if ways_in else set()
    return replace(
        outline,
        leaves=[Same(positions[id(leaf)]) if id(leaf) in positions else leaf for leaf in found],
        structure=structure,
        changed=changed,
        given_gradients=tuple(i for i in changed if inputs[i].requires_grad and not leaves[i].requires_grad),
        saved_bytes=saved.num_bytes,
        hiding=hidden,
        detached=tuple(i for i, way_in in ways_in.items() if way_in not in reached),
        changes_state=bool(rewritten),
        changes_weights=tuple(n.removeprefix("layer.") for n, _ in bare.named_parameters() if n in rewritten),
    )


_GIVEN = "given."


def _held_tensors(
    bare: Holder,
    device: torch.device,
    make: Callable[..., torch.Tensor] = zeros,
    convert: Callable[[torch.Tensor], torch.Tensor] = _as_it_is,
) -> dict[str, torch.Tensor]:
    """What stands for parameters and buffers: of these the small ones have their values, if the others have any.

    Those of modules among the arguments, as an embedding whose weight a head uses, are known by what they stand for.
    """
    found: dict[str, torch.Tensor] = {}
    # each module once: torch would not put back the tensors of a module that is held in two places
    for path, part in bare.named_modules():
        for name, tensor in (item for named in tensors_of(part) for item in named.items()):
            if tensor is None:
                continue
            value = remembered_buffer(part, name, device) if make is zeros else None
            if value is None:
                needs_grad, strides = tensor.requires_grad, strides_of(tensor)
                value = convert(
                    make(tensor.shape, strides, dtype=tensor.dtype, device=device, requires_grad=needs_grad)
                )
            if path.startswith(_GIVEN):
                value.stands_for = tensor  # type: ignore[attr-defined]
            found[f"{path}.{name}"] = value
    return found


def of_zero_weights(module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module computes if its parameters are zero, wherever they are; of tensors inside of `torch.vmap`."""
    bare = Holder(module, forward)
    device = next((leaf.device for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)), torch.device("cpu"))
    return functional_call(bare, _held_tensors(bare, device), args, kwargs, tie_weights=False)


def _form_of_first(module: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Outline:
    first = next(leaf for leaf in tree_leaves(arguments) if _is_tensor(leaf) and leaf.is_floating_point())
    needs_grad = first.requires_grad or any(parameter.requires_grad for parameter in module.parameters())
    form = first.detach().requires_grad_(needs_grad and torch.is_grad_enabled())
    found, structure = tree_flatten(form)
    return Outline(found, structure, [])


def _needs_gradients(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not is_placeholder(tensor):
        return tensor
    form = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).zero_()
    return form.requires_grad_(tensor.requires_grad)


def _copied(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return value
    try:
        return copy.deepcopy(value)  # a cache for keys and values would remember forms without values
    except Exception:
        return value
