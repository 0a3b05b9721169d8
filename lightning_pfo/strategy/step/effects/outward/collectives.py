"""Collective calls of `torch.distributed` that a step makes by itself, as of published losses that average a centre.

The rank of the last stage alone runs a step to its end, so that others would be waited for in vain. What such code
means is the replicas: over them it runs there, and a single one is a world of one process. Elsewhere it does nothing,
since what comes of the step does not count; nor where one replica alone runs it, to compare what it comes to. So it is
in the backward of functions that gather (`GatherLayer` of published contrastive losses).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial, wraps
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.autograd import in_backward
from lightning_pfo.strategy.compat.optimizers import cell_of
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.variables import users_line

_IN_PLACE = ("all_reduce", "reduce", "broadcast", "broadcast_object_list", "barrier")
_GATHERING = ("all_gather", "all_gather_object", "all_gather_into_tensor")
_OTHERS = ("gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single")
_WITH_GRADIENTS = ("torch.distributed.nn", "torch.distributed.nn.functional")
_TO_OR_FROM_ONE = ("reduce", "broadcast", "broadcast_object_list")
_SEEN_TO = frozenset(
    (
        *("torch", "torchmetrics", "lightning_pfo"),
        *("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"),
    )
)
"""Packages whose own calls mean the processes that they name, or are seen to where they make them."""


def collectives_in_steps(
    replicas: dist.ProcessGroup | None,
    within_step: Callable[[], bool],
    ends_here: Callable[[], bool],
    is_alone: Callable[[], bool],
    number_in_step: Callable[[int], int],
    patches: Patches,
) -> None:
    """Let what the user's code calls in a step concern the replicas.

    Args:
        replicas: Processes with the same stages; None: there is one replica.
        within_step: Whether stages run a step.
        ends_here: Whether it is run to its end here.
        is_alone: Whether no other replica runs it now.
        number_in_step: Makes of the number of a replica what ranks of it are told in a step.
        patches: Undoes it.
    """

    def runs() -> bool:
        return replicas is not None and not is_alone() and (ends_here() or in_backward())

    instead_of: dict[int, Callable[..., Any]] = {}

    def patched(name: str, instead: Callable[..., Any], owner: Any = dist) -> None:
        public = getattr(owner, name)
        cell = cell_of(public)  # changed in there it is so for who has kept the function, too
        ordinary = public if cell is None else cell.cell_contents

        @wraps(ordinary)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not within_step() and not in_backward():
                return ordinary(*args, **kwargs)
            group = kwargs.get("group", next((a for a in args if isinstance(a, dist.ProcessGroup)), None))
            # a variable with the frame of this function would keep what it was given
            asking = _module_of(inspect.currentframe().f_back, public)  # type: ignore[union-attr]
            if group not in (None, dist.group.WORLD) or _is_seen_to(asking):
                return ordinary(*args, **kwargs)
            args = tuple(a for a in args if not isinstance(a, dist.ProcessGroup))
            return instead(ordinary, *args, **{key: value for key, value in kwargs.items() if key != "group"})

        if cell is not None:
            patches.set_cell(cell, call)
            return
        patches.set(owner, name, call)
        instead_of[id(ordinary)] = call

    def in_place(name: str, ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if runs():
            if name in _TO_OR_FROM_ONE:  # a rank of the world, as the replicas are counted
                kwargs |= {key: dist.get_global_rank(replicas, kwargs[key]) for key in ("src", "dst") if key in kwargs}  # type: ignore[arg-type]
                if len(args) > 1 and isinstance(args[1], int):
                    args = (args[0], dist.get_global_rank(replicas, args[1]), *args[2:])  # type: ignore[arg-type]
            return ordinary(*args, group=replicas, **kwargs)
        return _Done() if kwargs.get("async_op") else None

    def gathering(ordinary: Callable[..., Any], into: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if runs():
            return ordinary(into, value, *args, group=replicas, **kwargs)
        if isinstance(into, list):
            for index, each in enumerate(into):
                if isinstance(each, torch.Tensor):
                    each.copy_(value)
                else:
                    into[index] = value
        else:
            into.copy_(value.flatten().repeat(into.numel() // max(value.numel(), 1)).view_as(into))
        return _Done() if kwargs.get("async_op") else None

    def differentiable(name: str, ordinary: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
        if runs():
            return ordinary(value, *args, group=replicas, **kwargs)
        number = 1 if replicas is None else dist.get_world_size(replicas)
        return (value,) * number if name == "all_gather" else value

    def refused(name: str, *_: Any, **__: Any) -> Any:
        raise ConfigurationError(
            f"torch.distributed.{name} in a step: the rank of the last stage alone runs a step to its end, and others "
            f"would not come. {users_line()} Use all_reduce and all_gather of torch.distributed, or self.all_gather of "
            f"a module, which go over the replicas there; or do it after the step (in on_train_batch_end, or your "
            f"loop)."
        )

    def rank(ordinary: Callable[..., Any]) -> Any:
        number = 0 if replicas is None else ordinary(replicas)
        return number if in_backward() else number_in_step(number)

    for name in _IN_PLACE:
        patched(name, partial(in_place, name))
    for name in _GATHERING:
        patched(name, gathering)
    for name in _OTHERS:
        patched(name, partial(refused, name))
    for owner in [sys.modules[name] for name in _WITH_GRADIENTS if name in sys.modules]:
        for name in ("all_gather", "all_reduce"):
            patched(name, partial(differentiable, name), owner)
    patched("get_rank", rank)
    patched("get_world_size", lambda ordinary: 1 if replicas is None else ordinary(replicas))
    if (accelerate := sys.modules.get("accelerate.state")) is not None:  # whose `reduce` losses of transformers call
        number = 1 if replicas is None else dist.get_world_size(replicas)
        patches.set(accelerate.PartialState, "num_processes", _other_in_steps("num_processes", number, within_step))
    for module in _others_modules():  # which may have a name for one, of `from torch.distributed import ...`
        for name, value in list(vars(module).items()):
            if id(value) in instead_of:
                patches.set(module, name, instead_of[id(value)])


def _module_of(frame: FrameType | None, public: Callable[..., Any]) -> str:
    """The module of what called a function, which may have called another one."""
    while frame is not None and frame.f_code is public.__code__:
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


def _other_in_steps(name: str, value: Any, within_step: Callable[[], bool]) -> property:
    """An attribute that objects of a class have, with another value in steps."""

    def get(self: Any) -> Any:
        if not within_step() and name not in vars(self):
            raise AttributeError(name)
        return value if within_step() else vars(self)[name]

    def put(self: Any, given: Any) -> None:
        vars(self)[name] = given

    return property(get, put)


def _is_seen_to(module: str) -> bool:
    return module.partition(".")[0] in _SEEN_TO


def _others_modules() -> list[ModuleType]:
    modules = [module for module in sys.modules.values() if isinstance(module, ModuleType)]
    return [module for module in modules if not _is_seen_to(module.__name__)]


class _Done:
    """The handle of a call that nobody need wait for."""

    def wait(self, timeout: Any = None) -> bool:
        """It is done."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True
