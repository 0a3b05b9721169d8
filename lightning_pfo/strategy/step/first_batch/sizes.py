"""Steps that count on the size of the batch: one that fails on microbatches, and would not on all of their samples.

Traces tell, on each rank by itself: of a microbatch, and of the batch in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.wording import counted
from lightning_pfo.strategy.engine.endings import StepEndedError
from lightning_pfo.strategy.model.tracing.events import Trace
from lightning_pfo.strategy.model.variables import told_of_error
from lightning_pfo.strategy.step.outcome import StepOnBatch
from lightning_pfo.strategy.step.programs import Programs
from lightning_pfo.strategy.step.whole.joining import joins_of


@contextmanager
def sizes_told(of: StepOnBatch, programs: Programs, *, joins: bool) -> Iterator[None]:
    """Where a step runs: if it fails because microbatches are smaller than their batch, that is said.

    Args:
        of: The step.
        programs: Traces it.
        joins: Whether it ends on the whole batch.

    Raises:
        ConfigurationError: If it fails so.
    """
    try:
        yield
    except StepEndedError:
        raise
    except Exception as error:
        said = _because_of_sizes(of, error, programs, joins=joins)
        if said is None:
            raise
        raise said from error


def _because_of_sizes(
    of: StepOnBatch, error: Exception, programs: Programs, *, joins: bool
) -> ConfigurationError | None:
    if len(of.parts) == 1:
        return None
    trace = partial(programs.trace, seed=of.seed, train=of.kind == "train")
    for index in {size: index for index, size in enumerate(of.parts.sizes)}.values():
        part = trace(partial(of.of_microbatch, index))
        failure = _failure_in(part)
        is_why = isinstance(error, ConfigurationError) or failure.startswith(f"{type(error).__name__}: ")
        if not failure or not is_why:
            continue
        whole = trace(lambda: of.step(of.batch, *of.rest))
        if _failure_in(whole) or not programs.runs(whole):
            return None
        may_join = not joins and _may_join(part, whole, programs, of.parts.sizes)
        return ConfigurationError(
            f"A step runs on each of the {len(of.parts)} microbatches of a batch. This one counts on the size of the "
            f"batch, which has {counted(of.parts.size, 'sample')}: on a microbatch of {of.parts.sizes[index]} it fails "
            f"with {failure} Let it take sizes from what it is given (len(x)); or use schedule='gpipe' with "
            f"num_microbatches=1, where it is given all of the batch"
            f"{', or with loss_over=' + repr('batch') + ', where its end is' if may_join else ''}."
        )
    return None


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
