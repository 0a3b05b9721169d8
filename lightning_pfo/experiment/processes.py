"""What the processes of an experiment must know of each other before they have met: who speaks, also of Ctrl-C."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType


def is_first_process() -> bool:
    """Whether this process speaks for all of them, as far as the environment tells before they have met."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"))


def watch_starter() -> Callable[[float], bool]:
    """Note which process started this one, and which one its clones are of.

    Returns:
        A function that waits at most so many seconds until that process has ended, and says whether it has; it may have
        ended long before.
    """
    pid, parent = os.getpid(), os.getppid()

    def ends(within_s: float) -> bool:
        starter, end_s = parent if os.getpid() == pid else pid, time.monotonic() + within_s
        while os.getppid() == starter:
            if time.monotonic() >= end_s:
                return False
            time.sleep(0.05)
        return True

    return ends


def explain_interrupts() -> None:
    """Say one line where nobody catches Ctrl-C, such as while torch is imported; then Python ends by the signal."""
    if sys.excepthook is sys.__excepthook__:  # else somebody shows errors their own way
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt) or os.environ.get("HYDRA_FULL_ERROR") == "1":
        sys.__excepthook__(kind, error, traceback)
    elif is_first_process():
        print("Interrupted.", file=sys.stderr)  # noqa: T201
