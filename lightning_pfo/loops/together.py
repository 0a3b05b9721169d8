"""What the ranks of a pipeline do together: each says what comes next, so that none waits for others that stay away."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist

from lightning_pfo.core.errors import ConfigurationError, PfoError
from lightning_pfo.strategy.compat.optimizers import cell_of
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.compat.processes import abort_process_group
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.engine.forked import refuse_forked
from lightning_pfo.strategy.parallel.groups import RanksApartError, meet
from lightning_pfo.strategy.step.batches.check import check_same_batch, sample_of
from lightning_pfo.strategy.step.effects.within import within_step
from lightning_pfo.strategy.watch.present import watch_ranks, who_has_ended
from lightning_pfo.strategy.watch.stuck import Waits

_CHECKED_CALLS = 3  # compare all of the batches of all ranks in the first calls of a kind ...
_CHECK_EVERY = 50  # ... and then once in so many, of others a sample
_ANOTHER = "making another pipeline"
_MOST_TRIES = 3
_before: list[tuple[Any, dist.ProcessGroup | None]] = []
"""All processes, and of these the ranks of the pipeline that was made last, which may be gone."""


def meet_for_another() -> None:
    """Let the ranks of the pipeline that was made last come to where another one is made.

    One rank alone may come here, as where it had no memory and tries with less
    (`accelerate.utils.find_executable_batch_size`). Others are told at what they come to next, in words that let them
    try again, too.

    Raises:
        RanksApartError: If they do not come, or have ended.
    """
    for world, hosts in _before:
        if world is not dist.group.WORLD:  # that has been destroyed since
            continue
        for tries_left in reversed(range(_MOST_TRIES)):
            try:
                _meet(_ANOTHER, hosts)
                return
            except RanksApartError as error:
                if not tries_left or _ANOTHER not in str(error) or error.__cause__ is not None:
                    raise


def watch_others() -> None:
    """Hear of processes that end, so that messages name them; a collective call of all processes."""
    num_processes = dist.get_world_size()
    is_one_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes)) == num_processes
    watch_ranks(os.environ.get("MASTER_ADDR", socket.gethostname()), Waits(abort_process_group), one_node=is_one_node)


class Together:
    """The calls of a model that all ranks of its pipeline make.

    Args:
        engine: The pipeline engine of this rank.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine
        self._hosts = engine.host_group()
        _before[:] = [(dist.group.WORLD, self._hosts)]
        self._num_calls: dict[str, int] = {}
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether the pipeline was released."""
        return self._is_over

    def meet(self, what: str, same: int = 0) -> None:
        """Say what comes next; a collective call of the pipeline's ranks.

        Args:
            what: What it is.
            same: A number that batches have in common.

        Raises:
            RanksApartError: If others come to something else, or have ended.
            ConfigurationError: If this process was forked from a rank.
        """
        refuse_forked(what)
        try:
            _meet(what, self._hosts, same)
        except RanksApartError as error:
            if _ANOTHER not in str(error):
                raise
            raise RanksApartError(
                f"Another rank is {_ANOTHER}, while this one comes to: {what}. If it tries again with less after "
                f"'CUDA out of memory.', so does this one within find_executable_batch_size; else make pipelines on "
                f"all ranks alike."
            ) from error

    def meet_at_barriers(self, patches: Patches) -> None:
        """Let ranks meet before barriers of all processes: others may call the model alone meanwhile.

        Args:
            patches: When it is closed, barriers are torch's again.
        """
        cell = cell_of(dist.barrier)
        if cell is None:
            return
        barrier: Callable[..., Any] = cell.cell_contents

        @wraps(barrier)
        def call(group: dist.ProcessGroup | None = None, *args: Any, **kwargs: Any) -> Any:
            if group in (None, dist.group.WORLD) and not within_step() and not self._is_over:
                self.meet("torch.distributed.barrier")
            return barrier(group, *args, **kwargs)

        patches.set_cell(cell, call)

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
        self.meet(f"{kind} number {number}", sample_of(batch))
        self._num_calls[kind] = number + 1
        if number < _CHECKED_CALLS or number % _CHECK_EVERY == 0:
            check_same_batch(batch, self._engine.group, self._engine.device)

    def end(self) -> None:
        """Let no more batches run."""
        self._is_over = True


def _meet(what: str, hosts: dist.ProcessGroup | None, same: int = 0) -> None:
    try:
        meet(what, hosts, same=same)
    except PfoError:
        raise
    except RuntimeError as error:
        raise RanksApartError(
            f"The ranks of a pipeline do everything together, but others have ended while this one comes to: "
            f"{what}. {who_has_ended() or 'Call on every rank what all take part in.'}"
        ) from error


def refuse_compiled(is_compiling: bool) -> None:
    """Say what to compile, where a model on a pipeline is compiled as a whole.

    Raises:
        ConfigurationError: If it is.
    """
    if is_compiling:
        raise ConfigurationError(
            "A model on a pipeline is not compiled from outside. Compile layers of it, before it is prepared: "
            "layer.forward = torch.compile(layer.forward)."
        )
