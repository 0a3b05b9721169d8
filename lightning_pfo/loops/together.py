"""What the ranks of a pipeline do together: each says what comes next, so that none waits for others that stay away."""

from __future__ import annotations

from typing import Any

from lightning_pfo.core.errors import ConfigurationError, PfoError
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.engine.forked import refuse_forked
from lightning_pfo.strategy.parallel.groups import RanksApartError, meet
from lightning_pfo.strategy.step.batches.check import check_same_batch

_CHECKED_CALLS = 3  # compare the batches of all ranks in the first calls of a kind ...
_CHECK_EVERY = 50  # ... and then once in so many


class Together:
    """The calls of a model that all ranks of its pipeline make.

    Args:
        engine: The pipeline engine of this rank.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine
        self._hosts = engine.host_group()
        self._num_calls: dict[str, int] = {}
        self._is_over = False

    def meet(self, what: str) -> None:
        """Say what comes next; a collective call of the pipeline's ranks.

        Raises:
            RanksApartError: If others come to something else, or have ended.
            ConfigurationError: If this process was forked from a rank.
        """
        refuse_forked(what)
        try:
            meet(what, self._hosts)
        except PfoError:
            raise
        except RuntimeError as error:
            raise RanksApartError(
                f"The ranks of a pipeline do everything together, but others have ended while this one comes to: "
                f"{what}. Call on every rank what all take part in."
            ) from error

    def begin(self, kind: str, batch: Any) -> None:
        """Begin a call with a batch; a collective call of the pipeline's ranks.

        Raises:
            RanksApartError: If others come to something else, or have ended.
            BatchError: If others have another batch.
            ConfigurationError: If the pipeline was released.
        """
        if self._is_over:
            raise ConfigurationError(
                "A pipeline that was released (model.release(), accelerator.free_memory()) runs no batches. Make a new "
                "one, of a new model that has loaded the whole state of this one."
            )
        number = self._num_calls.get(kind, 0)
        self.meet(f"{kind} number {number}")
        self._num_calls[kind] = number + 1
        if number < _CHECKED_CALLS or number % _CHECK_EVERY == 0:
            check_same_batch(batch, self._engine.group, self._engine.device)

    def end(self) -> None:
        """Let no more batches run."""
        self._is_over = True


def refuse_compiled(is_compiling: bool) -> None:
    """Say what to compile, where a model on a pipeline is compiled as a whole.

    Raises:
        ConfigurationError: If it is.
    """
    if is_compiling:
        raise ConfigurationError(
            "A model on a pipeline is not compiled from outside. Compile it, or layers of it, before it is prepared."
        )
