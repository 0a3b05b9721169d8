"""Running a step once more: where it finds what a batch has left for rows, or does something else than in its trace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.engine.endings import StepEndedError
from lightning_pfo.strategy.model.reach.rewritten import RewrittenWeights
from lightning_pfo.strategy.model.reach.untouched import untouched
from lightning_pfo.strategy.model.tracing.ends import DeviationError, WrittenError
from lightning_pfo.strategy.model.tracing.tracked import AbsentValueError
from lightning_pfo.strategy.step.first_batch.sizes import sizes_told
from lightning_pfo.strategy.step.outcome import StepOnBatch
from lightning_pfo.strategy.step.programs import Programs

_log = logging.getLogger(__name__)
T = TypeVar("T")


_CHANGED_IN_PLACE = "modified by an inplace operation"
"""So torch says it, in a backward."""
_BETWEEN = (
    "The backward of a microbatch needs what has been changed in place since its forward. On a pipeline other "
    "microbatches run forward between the two: if the step changes a buffer that its loss is computed with, compute "
    "with a copy of it (loss / self.scale.clone()); if a layer writes into its weights (weight.copy_(...)), let it do "
    "so through their data (weight.data.copy_(...)), or do it in on_train_batch_start. Torch says:"
)


class WeighedOtherwiseError(Exception):
    """A batch was run by weights that do not suit its loss; others are known now."""


_OF_OTHERS = (StepEndedError, WrittenError, DeviationError, AbsentValueError, WeighedOtherwiseError)
"""Errors that have other causes than what layers write into weights."""


def run_again(
    of: StepOnBatch,
    run: Callable[[], T],
    owner: nn.Module,
    programs: Programs,
    rewritten: RewrittenWeights,
    *,
    joins: bool,
) -> T:
    """Run a step, and once more if need be.

    Args:
        of: The step.
        run: Runs it.
        owner: The user's module.
        programs: Traces it.
        rewritten: Weights that layers write into.
        joins: Whether what microbatches come to is joined before the loss.
    """
    with _explained(programs), sizes_told(of, owner, programs, joins=joins):
        return _by_rows(of, lambda: _rewriting(of, run, owner, rewritten), owner, programs)


@contextmanager
def _explained(programs: Programs) -> Iterator[None]:
    """Where a step runs: if it fails because of what a hook has done, or other microbatches, that is said."""
    try:
        yield
    except Exception as error:
        explained = programs.explained(error)
        if explained is error and _CHANGED_IN_PLACE in str(error):
            explained = ConfigurationError(f"{_BETWEEN} {error}")
        if explained is error:
            raise
        raise explained from error


def _by_rows(of: StepOnBatch, run: Callable[[], T], owner: nn.Module, programs: Programs) -> T:
    """Run a step; once more if it fails where microbatches find what a batch has left for the rows of the next."""
    try:
        return _following(of, run, programs)
    except (StepEndedError, WrittenError):
        raise
    except Exception as error:
        if of.programs is not None or not (of.rows.divide() or of.rows.guess(of.kind, owner, of.parts.size)):
            raise
        programs.forget()
        try:
            return _following(of, run, programs)
        except Exception:
            of.rows.give_up()
            programs.forget()
            raise error from None


def _following(of: StepOnBatch, run: Callable[[], T], programs: Programs) -> T:
    """Run a step; once more, and with a trace of each microbatch, if it does something else than in a trace.

    Once more, too, if it has told only then what its microbatches count by.
    """
    try:
        return run()
    except (DeviationError, AbsentValueError):  # the end of a step on the whole batch may need more than in a trace
        if of.programs is not None or not programs.follow(of.kind):
            raise
        return run()
    except WeighedOtherwiseError:
        return run()


def _rewriting(of: StepOnBatch, run: Callable[[], T], owner: nn.Module, rewritten: RewrittenWeights) -> T:
    """Run a step; once more, if it is the first that trains, where microbatches write different things into weights."""

    def undone_if_it_fails() -> T:
        try:
            return run()
        except BaseException:
            rewritten.restore()
            raise
        finally:
            rewritten.forget()

    if of.kind != "train" or len(of.parts) == 1 or not rewritten.are_open:
        return undone_if_it_fails()
    failure: Exception | None = None
    try:
        with untouched(owner, only_if_it_fails=True):
            try:
                done = undone_if_it_fails()
            except Exception as error:
                if not isinstance(error, _OF_OTHERS) and rewritten.give_up():
                    raise
                failure = error
    except Exception as error:
        _log.debug("Each microbatch goes on from what the one before has written into weights. %s", error)
        done = undone_if_it_fails()
    if failure is not None:
        raise failure
    rewritten.settle()
    return done
