"""What a step says to others: `self.log`, `self.print`, its loggers, and metrics that are told once for a batch.

`self.trainer.save_checkpoint(...)` is such a call too, since all ranks save together.

On the last stage it is noted, said again on every rank when the batch is done (loggers write on the first), and each
once for a batch: what microbatches say alike, with values merged like outputs. Elsewhere, and in runs that only look
what a step does, nothing is said. What a call returns is there when it is made: until then a `Noted` stands for it,
which the step may call, enter, and give to other calls.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_pfo.strategy.compat.tensors import tree_map_only
from lightning_pfo.strategy.model.reach.metrics import ShowingLogged, shown_logged
from lightning_pfo.strategy.model.reach.of_trainer import trainer_of
from lightning_pfo.strategy.model.reach.places import named
from lightning_pfo.strategy.model.tracing.tracked import following, plain
from lightning_pfo.strategy.step.batches.merging import UnmergeableError, merge_outputs
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.batches.rules import Rules
from lightning_pfo.strategy.step.effects.outward.noted import (
    EXIT,
    RESULT,
    RETURNS,
    THERE,
    Call,
    Note,
    Noted,
    Path,
    noting,
    path_of,
)
from lightning_pfo.strategy.step.effects.outward.told import states_alone

OF_BATCH = ("batch", "")
"""Begins the path of what a step has put into its batch; see `fresh`."""

_logs: list[Callable[..., Any]] = []
"""What `self.log` calls in the steps that are under way, the innermost last; nothing where it is Lightning's own."""


def log_in_step(name: str, value: Any, arguments: Mapping[str, Any]) -> bool:
    """Log by way of the step that is under way; tells whether one is. So do layers that have kept `self.log`."""
    if not _logs:
        return False
    _logs[-1](name, value, **arguments)
    return True


class Outlets:
    """What a step of a module says something through.

    Args:
        owner: The user's module.
    """

    def __init__(self, owner: nn.Module) -> None:
        self.attributes = owner.__dict__
        self.trainer: Any = trainer_of(owner)
        self.loggers = None if self.trainer is None else self.trainer.loggers
        # a predict step may log nothing, and Lightning says so at the user's line
        self.may_log = self.trainer is None or not self.trainer.predicting
        self.may_print = hasattr(type(owner), "print")
        self.may_save = hasattr(type(self.trainer), "save_checkpoint")
        self.shown = shown_logged(self.trainer)


class _Replaced(NamedTuple):
    """An attribute of the module or the Trainer that is another one while a step runs."""

    attributes: dict[str, Any]
    name: str
    by: Any


_NOTHING = object()


class redirected:  # noqa: N801 - as `contextlib`'s; entered for each microbatch
    """Let `self.log` call something else, and have calls of `self.print`, loggers and saving noted instead of made.

    Args:
        outlets: Those of the user's module.
        log: What `self.log` calls.
        note: Takes the other calls.
    """

    def __init__(self, outlets: Outlets, log: Callable[..., Any], note: Note) -> None:
        self._outlets = outlets
        self._note = note
        self._replaced: list[_Replaced] = []
        self._showing = ShowingLogged(log, outlets.shown) if outlets.shown else None
        self._log = log = self._showing or log
        if outlets.may_log:
            self._replaced.append(_Replaced(outlets.attributes, "log", log))
        if outlets.may_print:
            self._replaced.append(_Replaced(outlets.attributes, "print", Noted((("attribute", "print"),), note)))
        if outlets.may_save:
            saves = Noted((("attribute", "trainer"), ("attribute", "save_checkpoint")), note)
            self._replaced.append(_Replaced(vars(outlets.trainer), "save_checkpoint", saves))

    def __enter__(self) -> None:
        loggers = self._outlets.loggers
        self._before = [replaced.attributes.get(replaced.name, _NOTHING) for replaced in self._replaced]
        for replaced in self._replaced:
            replaced.attributes[replaced.name] = replaced.by
        noting.append(self._note)
        _logs.append(self._log)
        if loggers:
            noted = [_NotedLogger(logger, index, self._note) for index, logger in enumerate(loggers)]
            self._outlets.trainer.loggers = noted

    def __exit__(self, *_: object) -> None:
        loggers = self._outlets.loggers
        noting.pop()
        _logs.pop()
        if self._showing:
            self._showing.close()
        if loggers:
            self._outlets.trainer.loggers = loggers
        for replaced, before in zip(self._replaced, self._before, strict=True):
            if before is _NOTHING:
                replaced.attributes.pop(replaced.name, None)
            else:
                replaced.attributes[replaced.name] = before


def with_values(call: Call) -> Call:
    """A call with ordinary tensors, which hold no graph."""
    path, args, kwargs = call
    with following(None):
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, plain((args, kwargs)))
    return path, args, kwargs


def merged_calls(
    calls: Sequence[Sequence[Call]], sizes: Sequence[int], weights: Sequence[float], rules: Rules | None = None
) -> list[Call]:
    """The calls of a batch, from those of its microbatches: one for those that are alike, else all in order."""
    if not calls or not any(calls):
        return []
    if len({tuple(path for path, _, _ in each) for each in calls}) > 1:
        every = set(range(max(map(len, calls))))
        return [
            _numbered(_of_microbatch(call, number, every), (number, index))
            for number, each in enumerate(calls)
            for index, call in enumerate(each)
        ]
    merged: list[Call] = []
    apart: set[int] = set()
    for index, same in enumerate(zip(*calls, strict=True)):
        alike = [_of_microbatch(call, number, apart) for number, call in enumerate(same)]
        given, place = [arguments_of(call) for call in alike], place_of(index, alike[0])
        if is_text(alike[0]):
            merged.extend(texts(alike, rules, place))
            continue
        try:
            if len({path for path, _, _ in alike}) > 1:
                raise UnmergeableError(place)
            if alike[0][0][-1] == EXIT:  # errors are equal to themselves only
                given = given[:1]
            said = alike[0][0][0] != OF_BATCH
            arguments = merge_outputs(given, sizes, weights, said=said, rules=rules, path=place)
        except UnmergeableError:  # such as texts that differ
            apart.add(index)
            merged.extend(_numbered(call, (number, index)) for number, call in enumerate(alike))
        else:
            path, args, kwargs = alike[0]
            if len(calls) > 1:
                _tell_of_texts(path, given[0], rules, place)
            call = (path, tuple(arguments[i] for i in range(len(args))), {key: arguments[key] for key in kwargs})
            merged.append(_numbered(call, index))
    return merged


def _numbered(call: Call, number: Any) -> Call:
    """A call that others know by a number, if they may use what it returns."""
    path, args, kwargs = call
    return ((*path, (RETURNS, number)), args, kwargs) if path[0][0] in THERE else call


def _of_microbatch(call: Call, microbatch: int, apart: Container[int]) -> Call:
    """A call that uses results of its own microbatch, of calls that are made apart for each."""

    def own(path: Path) -> Path:
        kind, number = path[0]
        return ((kind, (microbatch, number)), *path[1:]) if kind == RESULT and number in apart else path

    path, args, kwargs = call
    if not apart:
        return call
    args, kwargs = tree_map_only(Noted, lambda noted: Noted(own(path_of(noted))), (args, kwargs))
    return own(path), args, kwargs


def _tell_of_texts(path: Path, given: Mapping[Any, Any], rules: Rules | None, place: str) -> None:
    """Name a text that all microbatches have said alike, and one device says otherwise: how many samples there are."""
    for key, value in given.items():
        if isinstance(value, str) and rules is not None and rules.of(f"{place}[{key!r}]", value) == "apart":
            called = ".".join(str(name) for kind, name in path if kind == "attribute")
            warn_once(
                f"A step says {value!r} by {called}. All microbatches say so, and all of them together would say "
                f"another text: a number of samples in it is that of a microbatch. Say it after the step "
                f"(in on_train_batch_end, or your loop), from what the step returns or keeps in attributes."
            )


def arguments_of(call: Call) -> dict[Any, Any]:
    """The arguments of a call, by position or name."""
    _, args, kwargs = call
    return dict(enumerate(args)) | kwargs


def place_of(index: int, call: Call) -> str:
    """Where the arguments of a call are, which is one of several; in other batches others may come there."""
    path, args, _ = call
    called = ".".join(str(name) for kind, name in path if kind not in ("stream", RETURNS))
    of = f"({args[0]!r})" if len(args) > 1 and isinstance(args[0], str) else ""  # the name of what is said
    return f"the arguments of call {index}, of {called}{of}"


def is_of_metric(call: Call) -> bool:
    """Whether it tells a metric something."""
    return call[0][0][0] == "metric"


def is_text(call: Call) -> bool:
    """Whether text is written into a file."""
    path, _, _ = call
    return path[0][0] == "stream" and path[-1] == ("attribute", "write")


def texts(calls: Sequence[Call], rules: Rules | None, place: str) -> list[Call]:
    """What microbatches write into a file: once if it is the same, else all of it, one after the other.

    Args:
        calls: Their calls.
        rules: What is known of values at the same place.
        place: Where the arguments are.
    """
    are_same = len({args[0] for _, args, _ in calls}) == 1
    if len(calls) > 1 and not (are_same and (rules is None or rules.of(place + "[0]", calls[0][1][0]) != "apart")):
        warn_once(
            f"A step writes into the file {named(calls[0][0][0][1])} what is another text for each microbatch, or for "
            f"all of them together. What differs is all written, by the first rank, one after the other; on one device "
            f"there is one text for a batch. Keep it in an attribute (numbers, lists and tensors are put together as "
            f"one batch has them) and write after the step (in on_train_batch_end, or your loop)."
        )
    return [calls[0]] if are_same else list(calls)


def is_kept_everywhere(stream: Any) -> bool:
    """Whether it is in memory, so that each rank has its own."""
    return isinstance(stream, (io.StringIO, io.BytesIO))


def make_calls(owner: nn.Module, calls: Sequence[Call], outlets: Mapping[Any, Any], *, is_first: bool) -> None:
    """Make calls that were noted, in order.

    Args:
        owner: The user's module.
        calls: The calls.
        outlets: Files and the like that this rank writes into, by their places.
        is_first: Whether this rank is the first of the pipeline, so that it should have all of them.
    """
    results: dict[Any, Any] = {}
    find = partial(_found, owner, outlets, results)
    for path, args, kwargs in calls:
        if path[0] == OF_BATCH:  # whoever has the batch puts it there
            continue
        if path[0][0] == "stream" and path[0][1] not in outlets:
            if is_first:
                warn_once(
                    f"A step writes into {named(path[0][1])}, which the first rank of the pipeline does not have: what "
                    f"it writes is lost. Open it on every rank; the first one writes."
                )
            continue
        try:
            target, args, kwargs = tree_map_only(Noted, find, (Noted(path), args, kwargs))
        except _NotHereError:
            continue
        is_of_user = path[0][0] == "metric" and path[0][1].is_of_user
        with states_alone(path[0][1].metric) if is_of_user else nullcontext():
            result = target(*args, **kwargs)
        if path[-1][0] == RETURNS and (result is not None or _is_zero(owner)):
            results[path[-1][1]] = result


def _is_zero(owner: nn.Module) -> bool:
    """Whether loggers write on this rank; on others they return None."""
    trainer = trainer_of(owner)
    return trainer is None or bool(trainer.is_global_zero)


class _NotHereError(Exception):
    """Something is on the rank alone that writes."""


def _found(owner: nn.Module, outlets: Mapping[Any, Any], results: Mapping[Any, Any], noted: Noted) -> Any:
    """What is meant by a path on this rank.

    Raises:
        _NotHereError: If it is on another rank only.
    """
    target: Any = owner
    path = path_of(noted)
    for kind, name in path:
        if kind == "logger":
            target = trainer_of(owner).loggers[name]
            if path[1] == ("attribute", "experiment") and not _is_zero(owner):  # it has none of what the real one has
                raise _NotHereError
        elif kind == "stream":
            target = outlets[name]
        elif kind == "metric":
            target = name.metric
        elif kind == RESULT:
            if name not in results:
                raise _NotHereError
            target = results[name]
        elif kind != RETURNS:
            target = getattr(target, name) if kind == "attribute" else target[name]
    return target


class _NotedLogger:
    """Stands for a logger: its methods and its experiment are noted, its properties are its own."""

    def __init__(self, logger: Any, index: int, note: Note) -> None:
        self._logger = logger
        self._path: Path = (("logger", index),)
        self._note = note

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        if name == "experiment":
            return Noted((*self._path, ("attribute", name)), self._note)
        value = getattr(self._logger, name)
        return Noted((*self._path, ("attribute", name)), self._note) if callable(value) else value
