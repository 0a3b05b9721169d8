"""What a run follows that is no function of torch: `autograd.Function`s, scripted functions, `torch.vmap`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_pfo.strategy.compat.autograd import transform_with
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.tracing.ends import differentiates_later
from lightning_pfo.strategy.model.tracing.forms.hidden import HidingError
from lightning_pfo.strategy.model.tracing.tracked import Run, Tracked, current_run
from lightning_pfo.strategy.model.tracing.trees import tree_leaves


@contextmanager
def functions_followed(run: Run) -> Iterator[None]:
    """Let a run follow what is no function of torch: `autograd.Function`s, scripted functions, `torch.vmap`."""
    original = torch.autograd.Function.__dict__["apply"]
    script = torch.jit.ScriptFunction
    original_script = script.__call__

    def call_script(function: Any, *args: Any, **kwargs: Any) -> Any:
        current = current_run()
        if current is None or not any(isinstance(v, Tracked) for v in tree_leaves((args, kwargs))):
            return original_script(function, *args, **kwargs)
        return current.operation(AppliedFunction(function, original_script), args, kwargs)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        current = current_run()
        call = AppliedFunction(cls, original)
        if (
            current is None
            or _keeps_inputs(cls)
            or not any(isinstance(v, Tracked) for v in tree_leaves((args, kwargs)))
        ):
            return call(*args, **kwargs)
        return current.operation(call, args, kwargs)

    def transform(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        function = AppliedFunction(name, original)

        def call(*args: Any, **kwargs: Any) -> Any:
            current = current_run()
            given = args, kwargs, _captured(args[0])
            goes_on = name == "vjp"  # in a function that it returns
            _transforms.append(name)
            try:
                if goes_on or current is None or not any(isinstance(v, Tracked) for v in tree_leaves(given)):
                    return original(*args, **kwargs)
                return current.operation(function, given, {})
            except InTransformError:
                if current is None or len(_transforms) > 1:  # who called the outermost one follows it
                    raise
                if goes_on:
                    raise HidingError(differentiates_later()) from None
                return current.operation(function, given, {})
            finally:
                _transforms.pop()

        return call

    patches = Patches()
    transform_with(transform, patches)
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    script.__call__ = call_script  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        patches.close()
        script.__call__ = original_script  # type: ignore[method-assign]
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


_transforms: list[str] = []


def _captured(function: Any) -> list[Any]:
    """What a function has of the code around it."""
    cells = getattr(function, "__closure__", None) or ()
    found = []
    for cell in cells:
        with suppress(ValueError):  # it is empty
            found.append(cell.cell_contents)
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tracked)]


class InTransformError(Exception):
    """A unit is called inside of `torch.vmap` and the like, which nobody has followed yet."""


def in_transform() -> bool:
    """Whether `torch.vmap` or the like is under way."""
    return bool(_transforms)


def leave_transform() -> None:
    """Let `torch.vmap` and the like be followed as a whole, if a unit is called inside of it.

    Raises:
        InTransformError: If it is not followed yet; who called it follows it then.
    """
    if _transforms:
        raise InTransformError(_transforms[-1])


def _keeps_inputs(cls: Any) -> bool:
    """Whether it only keeps what a checkpoint recomputes from, as one without reentrance has done up to torch 2.9."""
    checkpoint = torch.utils.checkpoint
    return cls.__module__ == checkpoint.__name__ and cls is not checkpoint.CheckpointFunction


@dataclass(frozen=True)
class AppliedFunction:
    """An `autograd.Function`, a scripted function of the user, or `torch.vmap` and the like, as a function of torch.

    Attributes:
        cls: The function; of torch's own the name.
        original: torch's own `apply`, as it stands in the class; of scripted functions their `__call__`.
    """

    cls: Any
    original: Any = field(compare=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply it."""
        if isinstance(self.cls, type):
            return self.original.__get__(None, self.cls)(*args, **kwargs)
        if isinstance(self.cls, str):
            given, named, _ = args
            return self.original(*given, **named)
        return self.original(self.cls, *args, **kwargs)


def is_transform(function: Any) -> bool:
    """Whether a function is `torch.vmap` or the like."""
    return isinstance(function, AppliedFunction) and isinstance(function.cls, str)
