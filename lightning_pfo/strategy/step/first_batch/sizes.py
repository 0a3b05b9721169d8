"""Steps that count on the size of the batch: one that fails on microbatches, or does less, and not on all samples.

Traces tell, on each rank by itself: of a microbatch, and of the batch in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.wording import counted
from lightning_pfo.strategy.engine.endings import StepEndedError
from lightning_pfo.strategy.model.batch_norm import told_of_single
from lightning_pfo.strategy.model.tracing.events import Trace
from lightning_pfo.strategy.model.variables import told_of_error
from lightning_pfo.strategy.step.outcome import StepOnBatch
from lightning_pfo.strategy.step.programs import Programs
from lightning_pfo.strategy.step.whole.joining import joins_of


@contextmanager
def sizes_told(of: StepOnBatch, owner: nn.Module, programs: Programs, *, joins: bool) -> Iterator[None]:
    """Where a step runs: if it fails because microbatches are smaller than their batch, that is said.

    Args:
        of: The step.
        owner: The user's module.
        programs: Traces its steps.
        joins: Whether it ends on the whole batch.

    Raises:
        ConfigurationError: If it fails so.
    """
    try:
        yield
    except StepEndedError:
        raise
    except Exception as error:
        said = ""
        if len(of.parts) > 1:
            with suppress(ConfigurationError):  # a trace is refused, for another reason than sizes
                said = _said(of, error, owner, programs, joins=joins)
        if not said:
            raise
        raise ConfigurationError(said) from error


_ALL = "schedule='gpipe' with num_microbatches=1, where it is given all of the batch"


def refuse_skipping(of: StepOnBatch, programs: Programs) -> None:
    """Check a training step that has skipped a batch: it would skip the whole batch too.

    Raises:
        ConfigurationError: On every rank, if it would not.
    """
    if len(of.parts) == 1:
        return
    part, whole = _traces(of, 0, programs)
    if part.loss is None and whole.loss is not None and part.failure is None:
        raise ConfigurationError(
            f"A step runs on each of the {len(of.parts)} microbatches of a batch. This one returns None, which skips "
            f"the batch, on {_sizes(of, 0)}, and would not on all of them: it looks at the size of what it is given. "
            f"Leave incomplete batches out by DataLoader(drop_last=True), or use {_ALL}."
        )


def refuse_optimizing_less(of: StepOnBatch, programs: Programs) -> None:
    """Check a step that optimizes by itself: it does so as often on a microbatch as on the whole batch.

    Raises:
        ConfigurationError: On every rank, if it does not.
    """
    part, whole = _traces(of, 0, programs)
    numbers = [sum(each.loss is not None for each in trace.optimizing) for trace in (part, whole)]
    if numbers[0] != numbers[1] and part.failure is None and whole.failure is None:
        raise ConfigurationError(
            f"A step runs on each of the {len(of.parts)} microbatches of a batch. This one calls backward "
            f"{counted(numbers[0], 'time')} on {_sizes(of, 0)}, and {counted(numbers[1], 'time')} on all of them, so "
            f"it would optimize otherwise: it counts on the size of what it is given (x.split(4), a return for few "
            f"samples). Let each piece be a batch of its own, or use {_ALL}."
        )


def _sizes(of: StepOnBatch, index: int) -> str:
    return f"a microbatch of {of.parts.sizes[index]} of {counted(of.parts.size, 'sample')}"


def _said(of: StepOnBatch, error: Exception, owner: nn.Module, programs: Programs, *, joins: bool) -> str:
    """What is said of a step that fails because microbatches are smaller than their batch; nothing of another."""
    for index in {size: index for index, size in enumerate(of.parts.sizes)}.values():
        traces = partial(_traces, of, index, programs)
        part, whole = traces()
        failure = _failure_in(part)
        if not failure or not (isinstance(error, ConfigurationError) or failure.startswith(f"{type(error).__name__}:")):
            continue
        if told := told_of_single(failure):
            return told
        sizes = _sizes(of, index)
        why = (
            f"This one counts on the size of the batch: on {sizes} it fails with {failure} Let it take sizes from what "
            f"it is given (len(x)). What samples share, and has as many rows by chance (weights of {of.parts.size} "
            f"classes), is divided too if it is in the batch: keep it elsewhere, or divide batches by split_batch=. Or "
            f"use"
        )
        if _failure_in(whole):
            pointer, (part, whole) = _begun_anew(owner, traces)
            why = (
                f"All find what the batch before has left, and what they add to a number is added up. So {pointer} "
                f"now, where it was to begin anew (% size; with 0 the step runs): {sizes} does not come to that. "
                f"It fails with {failure} Use"
            )
        if _failure_in(whole) or not programs.runs(whole):
            return ""
        or_join = ", or with loss_over='batch', where its end is"
        return (
            f"A step runs on each of the {len(of.parts)} microbatches of a batch. {why} {_ALL}"
            f"{or_join if not joins and _may_join(part, whole, programs, of.parts.sizes) else ''}."
        )
    return ""


def _traces(of: StepOnBatch, index: int, programs: Programs) -> tuple[Trace, Trace]:
    """A step on a microbatch, and on the batch."""
    runs = partial(of.of_microbatch, index), partial(of.step, of.batch, *of.rest)
    part, whole = (programs.trace(run, of.seed, train=of.kind == "train") for run in runs)
    return part, whole


@torch.no_grad()
def _begun_anew(owner: nn.Module, traces: Callable[[], tuple[Trace, Trace]]) -> tuple[str, tuple[Trace, Trace]]:
    """An integer in a buffer with which a step fails, while it runs with 0 there, and the traces of that."""
    for name, buffer in owner.named_buffers():
        if buffer.dtype not in (torch.int32, torch.int64) or buffer.numel() != 1 or buffer.is_meta or not buffer.any():
            continue
        before = buffer.clone()
        buffer.zero_()
        try:
            found = traces()
        finally:
            buffer.copy_(before)
        if not any(map(_failure_in, found)):
            return f"self.{name} is {int(before)}", found
    return "", traces()


def _failure_in(trace: Trace) -> str:
    """With what a traced step, or a layer that it calls, has failed."""
    return told_of_error(trace.failure) if trace.failure is not None else next(iter(trace.guessed_after), "")


def _may_join(part: Trace, whole: Trace, programs: Programs, sizes: Sequence[int]) -> bool:
    """Whether a step runs on microbatches up to where its end can run on the whole batch."""
    if len(part.marks) < len(whole.marks) or part.guessed_after:
        return False
    try:
        stages, of_whole = programs.before_end(part, whole)
        joins_of([stages[-1]] * len(sizes), of_whole[-1], sizes)
    except ConfigurationError:
        return False
    return of_whole[-1].start < len(part.events)
