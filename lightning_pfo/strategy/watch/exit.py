"""A clean end of processes that worked together over gloo."""

from __future__ import annotations

import atexit
import functools
import time

import torch.distributed as dist

_SETTLING_S = 0.1


@functools.cache
def let_collectives_settle_at_exit() -> None:
    """Give gloo's threads time, before the interpreter ends, to drop the tensors of the last collectives.

    A waiting caller goes on before gloo's thread has let go of the tensors. Dropping a tensor that Python knows takes
    the interpreter's lock; a thread that asks for it while the interpreter is ending is unwound through a destructor,
    and the process aborts ("terminate called without an active exception") with all of its work done. Destroying the
    process group does not wait for these threads as long as anything, say the user's Trainer, refers to it.
    """
    atexit.register(_settle)


def _settle() -> None:
    if dist.is_initialized():
        time.sleep(_SETTLING_S)  # releases the interpreter's lock
