"""Further processes of a run as forks of the first one, which go on where it is: no imports, and shared memory."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import torch

from lightning_pfo.strategy.model.reach.caches import freeze

_THREADS = Path("/proc/self/task")


class Clone:
    """A forked process, with what launchers use of `subprocess.Popen`.

    Args:
        pid: Its number.

    Attributes:
        pid: Its number.
        returncode: As of `Popen`; None until it was seen to have ended.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Look whether it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signum)


def keep_memory_shared() -> None:
    """Let no collection of garbage write to what there is by now: clones would each need a copy of their own.

    What is part of a circle now is never collected, so this is for processes whose clones live as long as they do.
    """
    gc.collect()
    freeze()


def clone_process() -> Clone | None:
    """Fork; returns None in the new process.

    It has what the present one has: random state, handlers of signals and of exit, files. So has a script that was
    run again up to here, but its files are its own: nothing may be in their buffers, or be deleted by who ends first.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    return None if pid == 0 else Clone(pid)


def why_not_clone() -> str | None:
    """Say why forks of this process could hang or fail: they would lack its threads, or its use of CUDA; None if not.

    Threads that end before a fork and come back after it, as those of BLAS do, are no reason. Those of OpenMP, with
    which torch computes, are: they live from the first computation that is large enough.
    """
    if not _THREADS.is_dir():
        return "this system does not tell how many threads a process has"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "this process uses CUDA"
    attempt = os.fork()
    if attempt == 0:
        os._exit(0)
    os.waitpid(attempt, 0)
    num_threads = len(list(_THREADS.iterdir()))
    return None if num_threads == 1 else f"this process has {num_threads} threads"
