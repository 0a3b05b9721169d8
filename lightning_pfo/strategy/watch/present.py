"""The watch over the ranks of the present world, which forked children have no part in."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch.distributed as dist

from lightning_pfo.core.errors import PfoError
from lightning_pfo.strategy.watch.connection import Address
from lightning_pfo.strategy.watch.errors import RankDiedError, tells_of_others
from lightning_pfo.strategy.watch.rank_watch import RankWatch
from lightning_pfo.strategy.watch.stuck import Waits

GRACE_S = 30.0


def watch_ranks(host: str, waits: Waits, *, one_node: bool, grace_s: float = GRACE_S) -> RankWatch | None:
    """Watch the processes of the present world, once for all runs in it; a collective call.

    Args:
        host: Name or address of the first rank's node.
        waits: See `RankWatch`.
        one_node: Whether all processes are on one node.
        grace_s: See `RankWatch`.

    Returns:
        The watch, or None if this is the only process.
    """
    global _present
    world = dist.group.WORLD
    if dist.get_world_size() == 1:
        return None
    if _present is None or _present[0] is not world:
        watch = RankWatch(dist.get_rank(), dist.get_world_size(), waits, grace_s)
        _watches.add(watch)
        message = [watch.listen(host, local_only=one_node) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(message)
        if dist.get_rank() != 0:
            watch.connect(cast(Address, message[0]))
        _present = (world, watch)
    return _present[1]


def check_ranks() -> None:
    """Refuse to go on in a world in which a rank has died.

    Raises:
        RankDiedError: If one has.
    """
    death = None if _present is None else _present[1].death()
    if death is not None:
        raise RankDiedError(death)


def who_has_ended() -> str | None:
    """What is said of the first rank of this world that has ended, after a moment for the news; None if none has."""
    if _present is None or _present[0] is not dist.group.WORLD:
        return None
    return _present[1].first_end()


@contextmanager
def naming_who_has_ended() -> Iterator[None]:
    """Within the context, or a function that has it as its decorator, errors of transfers say who is gone.

    Raises:
        RankDiedError: If a transfer fails and a rank has ended.
    """
    try:
        yield
    except PfoError:
        raise
    except RuntimeError as error:
        ended = who_has_ended() if tells_of_others(error) else None
        if ended is None:
            raise
        raise RankDiedError(ended) from error


_present: tuple[Any, RankWatch] | None = None
_watches: weakref.WeakSet[RankWatch] = weakref.WeakSet()


def _close_in_child() -> None:
    for watch in list(_watches):
        watch.close_in_child()
    _watches.clear()  # what this process does not know, it does not tell at its end


os.register_at_fork(after_in_child=_close_in_child)


def _say_end() -> None:
    for watch in list(_watches):
        watch.end(getattr(sys, "last_value", None))


atexit.register(_say_end)
