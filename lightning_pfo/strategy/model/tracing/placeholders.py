"""Placeholders: parameters and buffers of other ranks, which lie on the meta device and have no values.

While a step runs they say that they lie where this rank computes, as they would without a pipeline: steps ask
parameters where to make tensors (`next(self.parameters()).device`), and of what form. While a pipeline runs other code
they are tensors on meta, and what needs their values says why they are not there, also when it has gone. Functions
of torch are followed only if they are given one of them, so all others take as long as ever.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from traceback import walk_stack
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.modules import tensors_of
from lightning_pfo.strategy.compat.tensors import DisableTorchFunctionSubclass, memory_of
from lightning_pfo.strategy.model.tracing.ends import BY_FIRST_BATCH, DeviationError, deviates
from lightning_pfo.strategy.model.tracing.functions import draws, form_argument, is_metadata, tells_place
from lightning_pfo.strategy.model.tracing.gradient_readers import KNOWN, note_reader, place_of
from lightning_pfo.strategy.model.tracing.tracked import (
    WHOLE,
    Tracked,
    current_run,
    is_beyond,
    natively,
    zeros_in_form,
)
from lightning_pfo.strategy.model.tracing.trees import tree_leaves, tree_map_only
from lightning_pfo.strategy.model.variables import users_line
from lightning_pfo.strategy.parallel.dtensor import alike, is_written_from_nowhere, lacks_values, writes

_log = logging.getLogger(__name__)

_ORDINARY = nn.Parameter.__torch_function__
"""With it torch does not ask a class what its functions shall do."""

_resting: Any = _ORDINARY
"""What placeholders do while no step runs."""
_device: torch.device | None = None
"""Where placeholders say that they lie, while a step runs."""
_home: torch.device | None = None
"""Where they say so between steps."""


_PROTOCOL_OF_FILES = 2
"""That of `torch.save`; copies, and what is sent to processes, have others."""
_ELSEWHERE = (
    "{place} needs values of layers that other ranks hold, which are not here: in hooks each rank has the layers of "
    "its own stages. Enter `with trainer.strategy.whole_parameters(module):` there on every rank, which has all of "
    "them; or do it in the step. For an average of weights there is Lightning's WeightAveraging."
)
_BETWEEN_STEPS = (
    "{place} needs values of layers that other ranks hold, which are not here: in a loop of your own each rank has the "
    "layers of its own stages. Enter `with model.whole_parameters():` there on every rank, which has all of them, or "
    "those of a part of it, `with model.whole_parameters(module):`. An average of weights is updated within it, too."
)
_OF_PRUNING = (
    " torch.nn.utils.prune works there on weights that have a mask: give them one by prune.identity(layer, 'weight') "
    "in __init__ or configure_model, and prune there with importance_scores=layer.weight_orig."
)
_NEW = (
    "{place} makes a new parameter of one that other ranks hold (a parametrization, say). A model keeps the parameters "
    "that it has when it is divided, as training begins: do so before, in __init__, configure_model or setup."
)
_IN_STEP = (
    f"A step reads values of a parameter or buffer that other ranks hold, {BY_FIRST_BATCH}. At "
    "{place} Use it in the same way in training from the first batch on (in a loop of your own in that of "
    "example_batch=), if only times 0 in the loss. Of a dataset without an index (IterableDataset) "
    "that cannot be copied (pickled), no batch is looked at before training."
)
_text = WHOLE
_has_warned = False


def _warn_of_file(protocol: Any) -> None:
    global _has_warned
    if protocol == _PROTOCOL_OF_FILES and not _has_warned:
        _has_warned = True
        _log.warning("A file is written that has no values for layers of other ranks. %s", WHOLE)


_GRADIENT: Any = torch.Tensor.grad
_MAKES_PARAMETERS = nn.Parameter.__new__.__code__
_DEVICE = torch.Tensor.device.__get__


def _ordinary(placeholder: torch.Tensor) -> Any:
    return natively(torch.Tensor.detach, (placeholder,), {})


class _PlaceholderParameter(nn.Parameter):
    has_no_values = True

    @property
    def grad(self) -> torch.Tensor | None:
        with DisableTorchFunctionSubclass():  # following it would take ten times as long
            gradient: torch.Tensor | None = _GRADIENT.__get__(self)
        # a variable with the frame of this function would keep those that have called it, and what they hold
        asking: Any = inspect.currentframe().f_back  # type: ignore[union-attr]
        if asking.f_code not in KNOWN:  # optimizers ask for all of them in each step
            note_reader(self, asking)
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _GRADIENT.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRADIENT.__delete__(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _warn_of_file(protocol)
        return nn.Parameter(_ordinary(self), self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class _PlaceholderTensor(torch.Tensor):
    has_no_values = True
    __torch_function__ = _ORDINARY

    def __reduce_ex__(self, protocol: Any) -> Any:
        _warn_of_file(protocol)
        return _ordinary(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copied = _marked(self.detach().clone())
        return copied


_KINDS: dict[type, type] = {nn.Parameter: _PlaceholderParameter, torch.Tensor: _PlaceholderTensor}
_PLACEHOLDERS = {kind: ordinary for ordinary, kind in _KINDS.items()}


def mark_placeholders(root: nn.Module) -> None:
    """Let the tensors of a module that lie on the meta device be placeholders; they stay the same objects."""
    for module in root.modules():
        for tensors in tensors_of(module):
            for tensor in tensors.values():
                _marked(tensor)


def _marked(value: Any) -> Any:
    if type(value) in _KINDS and value.is_meta:
        value.__class__ = _KINDS[type(value)]
    return value


def is_placeholder(value: Any) -> bool:
    """Whether something is a tensor without values, wherever it says that it lies."""
    return isinstance(value, torch.Tensor) and (type(value) in _PLACEHOLDERS or value.is_meta)


def kind_of(value: torch.Tensor) -> type:
    """The type of a tensor, or of what a placeholder stands for."""
    return _PLACEHOLDERS.get(type(value), type(value))


class placeholders_on:  # noqa: N801 - as `contextlib`'s; entered for each instruction
    """Let placeholders say that they lie on a device while the context is open."""

    def __init__(self, device: torch.device) -> None:
        self._on = device

    def __enter__(self) -> None:
        global _device
        self._before, _device = _device, self._on
        if self._before is None:
            _follow(_answering)

    def __exit__(self, *_: object) -> None:
        global _device
        _device = self._before
        if self._before is None:
            _follow(_resting)


def explain_missing_values(device: torch.device | None, *, in_loop: bool = False) -> None:
    """Let what needs the values of placeholders say why they are not there.

    Args:
        device: Where the layers of the pipeline lie here; placeholders say so too, as hooks make tensors where the
            first parameter lies. None: there is no pipeline any more.
        in_loop: Whether the user's loop trains it, which has no hooks.
    """
    global _resting, _text, _home
    _resting, _home = staticmethod(_explain), device
    _text = WHOLE if device is None else _BETWEEN_STEPS if in_loop else _ELSEWHERE
    if _device is None:
        _follow(_resting)


def _explain(
    function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    kwargs = kwargs or {}
    if _home is not None and function == _DEVICE:  # not `is_meta`, by which they are told apart
        return _home
    if is_metadata(function):
        return natively(function, args, kwargs)
    if is_written_from_nowhere(function, args, kwargs, is_placeholder):
        raise ConfigurationError(_explained())
    if (
        _home is not None
        and function == torch.Tensor.detach
        and type(args[0]) is _PlaceholderParameter
        and _is_for_parameter()
    ):
        raise ConfigurationError(_NEW.format(place=place_of(inspect.currentframe())))
    if _home is not None and draws(function):
        _draw(function, args, kwargs)
    try:
        return _marked(natively(function, args, kwargs))
    except (RuntimeError, TypeError, NotImplementedError) as error:
        if not lacks_values(error):
            raise
        if args and writes(function, kwargs) and all(map(is_placeholder, alike(args[0]))):
            return args[0]  # that is done by the rank that holds it
        if args and _home is not None and _goes_home(function, args[1:], kwargs):
            return args[0]
        raise ConfigurationError(_explained()) from error


def _is_for_parameter() -> bool:
    """Whether `nn.Parameter(...)` asks what it is given to detach itself; torch's own words say nothing of ranks."""
    asking: Any = inspect.currentframe().f_back.f_back  # type: ignore[union-attr]
    return asking is not None and asking.f_code is _MAKES_PARAMETERS


def _draw(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Draw the random numbers that a rank draws that has the values, so that generators go on alike everywhere."""

    def substitute(value: Any) -> Any:
        return torch.zeros(value.shape, dtype=value.dtype, device=_home) if is_placeholder(value) else value

    with torch.no_grad():
        function(*map(substitute, args), **{name: substitute(value) for name, value in kwargs.items()})


def _goes_home(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function only asks for a tensor to lie where this rank computes."""
    if function not in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda):
        return False
    assert _home is not None
    wanted = function(torch.empty(0, device=_home), *args, **kwargs)
    return bool(wanted.device == _home)


def _explained() -> str:
    prunes = _text is not WHOLE and any(frame.f_code.co_filename == prune.__file__ for frame, _ in walk_stack(None))
    return _text.format(place=place_of(inspect.currentframe())) + (_OF_PRUNING if prunes else "")


def check_values(value: Any) -> None:
    """Refuse a value that comes of placeholders, where only later somebody would need what it is.

    Raises:
        ConfigurationError: If it has none, with the user's line.
    """
    if any(map(is_placeholder, tree_leaves(value))):
        raise ConfigurationError(_explained())


def check_known(leaf: Any) -> None:
    """Refuse what a step leaves behind, if it has come of placeholders.

    Raises:
        DeviationError: If it has, which the trace would have told.
    """
    if is_placeholder(leaf):
        raise deviates()


def _follow(answer: Any) -> None:
    for kind in _PLACEHOLDERS:
        kind.__torch_function__ = answer  # type: ignore[attr-defined]


def _answer(
    function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """What a function of torch does that is given a placeholder while a step runs."""
    kwargs = kwargs or {}
    assert _device is not None
    if tells_place(function):
        return function(torch.empty(0, device=_device))
    index = form_argument(function)
    if index is not None and len(args) > index and type(args[index]) in _PLACEHOLDERS:
        return function(*args[:index], zeros_in_form(args[index], _device), *args[index + 1 :], **kwargs)
    run = current_run()
    if run is not None and any(isinstance(value, Tracked) for value in tree_leaves((args, kwargs))):
        return run.operation(function, args, kwargs)
    beyond = run is None and is_beyond()
    if beyond and is_written_from_nowhere(function, args, kwargs, is_placeholder):
        raise deviates()
    try:
        result = natively(function, args, kwargs)
    except (RuntimeError, TypeError) as error:
        if not lacks_values(error):
            raise
        raise DeviationError(_IN_STEP.format(place=users_line())) from error  # a trace may tell where it has values
    if not _is_new(result, (args, kwargs)):
        return _marked(result)  # views of placeholders are some as well
    if beyond:
        raise deviates()  # in the trace their values were not asked for, so that another rank has them
    # with others together they may have given something that says it lies elsewhere
    return tree_map_only(torch.Tensor, lambda tensor: _marked(tensor.detach().to("meta")), result)


def _is_new(result: Any, given: Any) -> bool:
    """Whether a function has computed something, which is no view of what it was given."""
    found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if not found:  # as where a form is asked for
        return False
    with DisableTorchFunctionSubclass():
        memory = {memory_of(leaf) for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)}
        return any(memory_of(leaf) not in memory for leaf in found)


def has_placeholder(leaves: Iterable[Any]) -> bool:
    """Whether there is a placeholder among the leaves of arguments."""
    return not _PLACEHOLDERS.keys().isdisjoint(map(type, leaves))


_answering = staticmethod(_answer)
