"""Hooks on the backward of units: they get ordinary tensors, where a stage computes the unit.

torch sets them up around `forward`, where a step has tensors that are followed, or are of other stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import BackwardHook

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.modules import BackwardHooks, backward_hooks_of, modules_of, take_backward_hooks_of
from lightning_pfo.strategy.compat.patches import Patches


def take_backward_hooks(root: nn.Module, units: Iterable[Any], patches: Patches) -> None:
    """Let a unit's hooks on its backward be called where a stage computes it, until `patches` is closed.

    Args:
        root: The user's module.
        units: The units; their `backward_hooks` get what is registered now.
        patches: Gives them back.

    Raises:
        ConfigurationError: If there is a hook on a module that may lie on several stages.
    """
    whole = [unit for unit in units if not unit.followed_into]
    inside = {module for unit in whole for module in modules_of(unit.module)}
    for name, module in root.named_modules():
        if module is not root and module not in inside and any(backward_hooks_of(module)):
            raise ConfigurationError(
                f"Hooks on the backward of a module are called by the stage that runs it, and parts of {name!r} run on "
                f"several. Register them on its first or last layer, or on tensors (x.register_hook) in the step."
            )
    for unit in whole:
        if not any(backward_hooks_of(unit.module)):
            continue
        if not unit.backward_hooks:
            patches.callback(unit.backward_hooks.clear)
        hooks = take_backward_hooks_of(unit.module, patches)
        if any(all(map(is_, hooks, known)) for known in unit.backward_hooks):
            continue  # a trial has put them back
        unit.backward_hooks.append(hooks)
        for first, later in zip(unit.backward_hooks[0], hooks, strict=True):
            if later is not first:  # what is registered later stays, too
                patches.callback(first.update, later)


def call_with(
    hooks: Sequence[BackwardHooks],
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a module's `forward` with hooks on its backward, as torch does.

    Args:
        hooks: The hooks; those whose handle has removed them are not there any more.
        module: The module, which they are told.
        forward: Its `forward`.
        args: Its arguments.
        kwargs: Its named ones.
    """
    before = [hook for each in hooks for hook in each.before.values()]
    after = [hook for each in hooks for hook in each.after.values()]
    if not (before or after):
        return forward(*args, **kwargs)
    hook = BackwardHook(module, after, before)
    given = hook.setup_input_hook(args)  # type: ignore[no-untyped-call]
    result = forward(*given, **kwargs)
    if not isinstance(result, (torch.Tensor, tuple)):
        return result  # torch hooks into these only
    found = hook.setup_output_hook(result)  # type: ignore[no-untyped-call]
    # what has no gradient is returned as it was given, not as what torch has made of it
    same = {id(made): arg for made, arg in zip(given, args, strict=True) if isinstance(arg, torch.Tensor)}
    if type(found) is tuple and any(id(leaf) in same for leaf in result):
        found = tuple(
            same[id(leaf)] if id(leaf) in same and not leaf.requires_grad else hooked
            for leaf, hooked in zip(result, found, strict=True)
        )
    return found
