"""Processes that were forked from a rank: they have its objects, but nothing to talk to other ranks with.

The connections of a process group are served by threads, which a fork does not have, and what it wrote into them would
be taken for its parent's. DataLoader workers are such processes, and what hooks start by multiprocessing.
"""

from __future__ import annotations

import os
from weakref import WeakSet

import torch.distributed as dist

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.variables import users_line

_inherited: WeakSet[dist.ProcessGroup] = WeakSet()
"""Worlds that were connected before this process was forked; one that it connects itself is its own."""


def is_forked() -> bool:
    """Whether this process was forked from one of the ranks of its world."""
    return bool(_inherited) and dist.group.WORLD in _inherited


def refuse_forked(what: str) -> None:
    """Refuse what ranks do together in a process that is none of them.

    Args:
        what: What is done, for people.

    Raises:
        ConfigurationError: If this process was forked from a rank.
    """
    if is_forked():
        raise ConfigurationError(
            f"A process that was forked from a rank of a pipeline (DataLoader workers, multiprocessing) cannot talk to "
            f"other ranks; process {os.getpid()}, forked from {os.getppid()}, comes to {what} at {users_line()} Do "
            f"that in the rank itself (num_workers=0, a hook), or give the process a copy that was made before it was "
            f"forked: copy.deepcopy(layer) before fit, or the whole module that strategy.gather_module(), called on "
            f"every rank, gives the first one (in a plain loop model.gather_module())."
        )


def _note_world() -> None:
    if dist.is_initialized():
        assert dist.group.WORLD is not None
        _inherited.add(dist.group.WORLD)


os.register_at_fork(after_in_child=_note_world)
