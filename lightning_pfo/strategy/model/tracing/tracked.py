"""Tensors that are followed while a user's step runs, and the run that follows them.

What a module of the model returns is `Tracked`, and so is whatever is computed from it between the modules. Every
function of torch that is given a tracked tensor asks the current run what to do: to note it (`trace`), to compute it,
or to leave it out because another stage computes it (`stage_run`). Inside modules tensors are ordinary ones.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.compat.tensors import DisableTorchFunctionSubclass, without_memory
from lightning_pfo.strategy.model.tracing.forms.parts import is_made_at_once
from lightning_pfo.strategy.model.tracing.functions import MAKERS, is_metadata
from lightning_pfo.strategy.model.tracing.trees import change_attributes, tree_flatten, tree_map_only, tree_unflatten

__all__ = ["Run", "Tracked", "current_run", "following", "plain", "untracked"]


class Run(Protocol):
    """What follows tracked tensors."""

    def operation(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function of torch is called with a tracked tensor."""

    def told(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> Any:
        """Python is told of the form of a tensor."""

    def decide(self, labels: Iterable[int]) -> None:
        """Python looks at such sizes."""

    def call(self, unit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit is called."""

    def enter(self, unit: Any) -> None:
        """A layer begins whose own units are followed."""

    def note(self, values: Any) -> None:
        """Values are wanted at the end of the step, as what is logged."""

    def optimize(self, loss: Any, changed: Iterable[nn.Parameter] = ()) -> None:
        """The step differentiates a loss by itself, or else (None) does something with gradients, or weights."""

    def looks_again(self, weights: Sequence[torch.Tensor]) -> bool:
        """The step uses weights by themselves that it has changed; tells whether it can, as they are followed."""


class Beyond(Protocol):
    """A run that has let go of its step."""

    def lacks(self, unit: Any) -> bool:
        """Whether a unit is on another rank."""

    def call(self, unit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit is called that it lacks, which it knows what to say of."""


_current: Run | None = None
"""The run that is under way; one at a time, in the thread that runs the user's step."""
_beyond: Beyond | None = None
"""The run that has let go of the step, which is beyond what it needs to follow."""


def current_run() -> Run | None:
    """The run that is under way, if one is."""
    return _current


class following:  # noqa: N801 - as `contextlib`'s; a generator would take four times as long, and there are many
    """Let a run follow tracked tensors while the context is open; None: they are ordinary tensors meanwhile."""

    def __init__(self, run: Run | None) -> None:
        self._run = run

    def __enter__(self) -> None:
        global _current
        self._before, _current = (_current, _beyond), self._run

    def __exit__(self, *_: object) -> None:
        global _current, _beyond
        _current, _beyond = self._before


def is_beyond() -> bool:
    """Whether the run has let go of the step: what follows is computed here, on true values."""
    return _current is None and _beyond is not None


def follow_no_more(run: Beyond) -> None:
    """Let tracked tensors be ordinary ones for the rest of a run."""
    global _current, _beyond
    _current, _beyond = None, run


class AbsentValueError(ConfigurationError):
    """A value was asked for that another stage computes, and that nobody has sent."""


class Tracked(torch.Tensor):
    """A tensor that is followed.

    Attributes:
        held: What it stands for; None: itself.
        is_absent: Whether nobody has its value here.
        label: The number of the value in a trace.
        varies: In a trace, the dimensions whose size depends on values of tensors.
    """

    # of the class, as most have no others
    held: torch.Tensor | None = None
    is_absent: bool = False
    label: int = -1
    varies: frozenset[int] = frozenset()

    @staticmethod
    def standing_for(value: torch.Tensor) -> Tracked:
        """A tracked tensor in the form of `value`, which it holds."""
        stand_in = without_memory(Tracked, value)
        stand_in.held = value
        return stand_in

    @staticmethod
    def absent(form: torch.Tensor) -> Tracked:
        """A tracked tensor in the form of another, without a value."""
        stand_in = without_memory(Tracked, form)
        stand_in.is_absent = True
        return stand_in

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        varies = _current is not None and bool(args) and isinstance(args[0], Tracked) and bool(args[0].varies)
        if func in MAKERS and not varies:
            return make(func, args, kwargs)
        if _current is None and _beyond is not None and any(getattr(kind, "has_no_values", False) for kind in types):
            return NotImplemented  # placeholders know what to say
        if _current is None or is_metadata(func):
            answer = natively(func, args, kwargs)
            return answer if _current is None else _current.told(func, args, kwargs, answer)
        return _current.operation(func, args, kwargs)

    def __format__(self, format_spec: str) -> str:
        """As an ordinary tensor of one number, where torch would not take a subclass for one."""
        return format(self.item(), format_spec) if self.dim() == 0 else object.__format__(self, format_spec)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # code that does not ask `__torch_function__`, such as TorchScript and extensions
        try:
            return func(*plain(args), **plain(kwargs or {}))
        except AbsentValueError as error:
            raise AbsentValueError(
                f"{error} Or it goes to code that cannot be followed between layers (torch.func.jacrev, extensions): "
                f"call that in the forward of a module of its own, which is followed as a whole."
            ) from None


def tracked(tensor: torch.Tensor) -> Tracked:
    """Follow a tensor from now on: the object itself, if it is an ordinary one."""
    if isinstance(tensor, Tracked):
        return tensor
    if type(tensor) is not torch.Tensor or (tensor.is_leaf and tensor.requires_grad):
        return Tracked.standing_for(tensor)
    tensor.__class__ = Tracked
    return tensor  # type: ignore[return-value]


def untracked(tensor: torch.Tensor) -> None:
    """Follow a tensor no longer that was an ordinary one before."""
    if isinstance(tensor, Tracked):
        for name in _OWN.intersection(tensor.__dict__):
            del tensor.__dict__[name]
        tensor.__class__ = torch.Tensor  # type: ignore[assignment]


_OWN = frozenset(("held", "is_absent", "label", "varies"))


def no_longer_tracked(tensor: Tracked) -> torch.Tensor:
    """The ordinary tensor for a tracked one that leaves the step."""
    value = value_of(tensor)
    untracked(value)
    return value


class ordinary:  # noqa: N801
    """Let tracked tensors be ordinary ones while the context is open, but those that stand for others."""

    def __init__(self, tensors: list[Tracked]) -> None:
        self._flipped = [tensor for tensor in tensors if tensor.held is None and not tensor.is_absent]

    def __enter__(self) -> None:
        for tensor in self._flipped:
            tensor.__class__ = torch.Tensor  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        for tensor in self._flipped:
            tensor.__class__ = Tracked


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    """The ordinary tensor that a tracked one stands for.

    Raises:
        AbsentValueError: If another stage has it.
    """
    if not isinstance(tensor, Tracked):
        return tensor
    if tensor.is_absent:
        raise AbsentValueError(
            f"A value of shape {tuple(tensor.shape)} that an earlier stage computes is needed here, but was not "
            f"sent: the step uses it in a way that the trace of the first batch has not shown. Where control flow "
            f"depends on it, compute what decides from the batch; or move the stage boundary with "
            f"partition='custom:...'."
        )
    return tensor if tensor.held is None else tensor.held


_LEAVES = frozenset({Tracked, torch.Tensor, nn.Parameter, bool, int, float, str, type(None), torch.dtype, torch.device})
"""Types of nearly all that functions of torch are given; pytrees take ten times as long to say so."""
_ORDINARY = _LEAVES - {Tracked}


def plain(values: Any) -> Any:
    """The values that tracked tensors in a nested structure stand for."""
    kind = type(values)
    if kind is Tracked:
        return value_of(values)
    if kind in _LEAVES:
        return values
    if kind is tuple or kind is list:
        return kind(map(plain, values))
    if kind is dict:
        return {key: plain(value) for key, value in values.items()}
    return tree_map_only(Tracked, value_of, values)


def plain_in_place(values: Any, _within: frozenset[int] = frozenset()) -> Any:
    """As `plain`, but lists, dicts and objects stay who they are: what is called may write into them."""
    kind = type(values)
    if kind is Tracked:
        return value_of(values)
    if kind in _LEAVES or (kind is dict and not values):  # as named arguments mostly are
        return values
    if kind is tuple:
        if _ORDINARY.issuperset(map(type, values)):
            return values
        return tuple([plain_in_place(value, _within) for value in values])
    if kind is list or kind is dict or isinstance(values, (list, dict, deque)):
        for key, value in list(values.items() if isinstance(values, dict) else enumerate(values)):
            if (now := plain_in_place(value, _within)) is not value:
                values[key] = now
        if kind is list or kind is dict:
            return values
    if is_made_at_once(values):
        return tree_map_only(Tracked, value_of, values)
    if id(values) not in _within:  # objects may lead to themselves
        change_attributes(values, functools.partial(plain_in_place, _within=_within | {id(values)}))
    return values


def flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """All leaves of the arguments of a call, and what `unflattened` takes with them."""
    if not kwargs and _LEAVES.issuperset(map(type, args)):
        return list(args), None
    return tree_flatten((args, kwargs))


def unflattened(leaves: list[Any], structure: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that were flattened."""
    if structure is None:
        return tuple(leaves), {}
    args, kwargs = tree_unflatten(leaves, structure)
    return args, kwargs


def natively(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch with the values of tracked tensors; only forms may be asked of absent ones."""
    if not is_metadata(func):
        args, kwargs = plain(args), plain(kwargs)
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def zeros_in_form(form: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Zeros in the shape of another tensor, which take no memory."""
    return torch.zeros((), dtype=form.dtype, device=device).expand(form.shape)


def make(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that makes an ordinary tensor in the form of another, which may be absent."""
    leaves, structure = tree_flatten((args, kwargs))
    forms = [zeros_in_form(leaf, leaf.device) if isinstance(leaf, Tracked) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(forms, structure)
    return func(*args, **kwargs)


def follow_units(units: Iterable[Any], patches: Patches) -> None:
    """Patch the `forward` of each unit until `patches` is closed; hooks of the unit see tracked tensors."""
    for unit in units:
        unit.forward = unit.module.forward
        patches.set(unit.module, "forward", _Followed(unit, unit.module.forward, patches))
    _avoid_reentrance(patches)


def followed_in(root: nn.Module) -> list[tuple[dict[str, Any], Any]]:
    """The attributes of the modules whose `forward` is patched so, and that."""
    attributes = map(vars, root.modules())
    return [(each, each["forward"]) for each in attributes if isinstance(each.get("forward"), _Followed)]


def _avoid_reentrance(patches: Patches) -> None:
    """Let checkpoints around units do without an `autograd.Function`, in whose forward nobody would follow these."""
    checkpoint = torch.utils.checkpoint

    def apply(cls: Any, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if current_run() is None:
            return torch.autograd.Function.__dict__["apply"].__get__(None, cls)(function, preserve_rng_state, *args)
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)

    patches.set(checkpoint.CheckpointFunction, "apply", classmethod(apply))


WHOLE = (
    "A module that a pipeline has split holds the layers of this process's own stages only; others are placeholders "
    "without values, also when the pipeline has gone. Call trainer.strategy.gather_module() on every rank (in a plain "
    "loop model.gather_module()), and use the whole module that it gives the first one."
)
"""What is said where a split module is saved as it is."""


def not_here(name: str) -> ConfigurationError:
    """What is said of a unit that is called where nobody waits for it."""
    return ConfigurationError(
        f"{name!r} can only be called inside a step (training_step, validation_step, test_step or predict_step; in a "
        f"loop of one's own, the model's call): elsewhere this process holds the layers of its own stage only. Move "
        f"the call there."
    )


class _Followed:
    """The `forward` of a unit. A function would be pickled by its name, which is that of its class's own."""

    def __init__(self, unit: Any, forward: Callable[..., Any], patches: Patches) -> None:
        functools.update_wrapper(self, forward)
        self._unit, self._forward, self._patches = unit, forward, patches

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit, run = self._unit, current_run()
        if run is not None and not unit.followed_into:
            return run.call(unit, args, kwargs)
        if run is not None:
            run.enter(unit)
            return self._forward(*args, **kwargs)
        if _beyond is not None and _beyond.lacks(unit):
            _beyond.call(unit, args, kwargs)
        if unit.followed_into:
            return self._forward(*args, **kwargs)
        args, kwargs = plain_in_place(args), plain_in_place(kwargs)
        if unit.outside is not None:
            return unit.outside(unit, args, kwargs)
        if unit.is_elsewhere:
            raise not_here(unit.name)
        return unit.compute(*args, **kwargs)

    def __copy__(self) -> _Followed:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Followed:
        """The copy of a unit (a teacher, an average of weights) is one too, where the unit is."""
        if current_run() is not None:
            raise ConfigurationError(
                f"A step makes a copy of {self._unit.name!r}, which each stage would have for itself. Copy it "
                f"before the step (in on_train_start or on_train_batch_start); a step can call the copy, and so "
                f"can hooks."
            )
        copied = copy.deepcopy(self._unit.module, memo)
        forward = copy.deepcopy(self._forward, memo)
        self._patches.note_copy(copied, "forward")
        return _Followed(self._unit.copied(copied, forward), forward, self._patches)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(f"This module is not saved as it is. {WHOLE}")
