"""Who else computes on a GPU: a change of its clocks would slow them down.

The driver names processes. Ours are this one, what it descends from and what it has started, and those of `our_job`,
the other ranks of the same run. In a container the driver may give the numbers that the host knows, by which we cannot
find ourselves: where this process computes, and none of the numbers is ours, one of them is taken for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from lightning_pfo.device.safety.process_id import pid_namespace

our_job: set[int] = set()
"""Numbers of those processes of our run that compute on GPUs of this machine; ranks tell each other."""

_OF_THE_MACHINE = "pid:[4026531836]"  # PROC_PID_INIT_INO of Linux: the namespace in which the host counts


def foreign(pids: Iterable[int]) -> tuple[int, ...]:
    """Which of the processes that compute on a GPU are not ours."""
    listed = sorted(set(pids))
    ours = {os.getpid(), *our_job}
    above = {ancestor for pid in ours for ancestor in _ancestors(pid)}
    others = [pid for pid in listed if pid not in above and ours.isdisjoint([pid, *_ancestors(pid)])]
    is_unnamed = os.getpid() in our_job and others == listed and pid_namespace() not in ("", _OF_THE_MACHINE)
    return tuple(others[1:] if is_unnamed else others)


def _ancestors(pid: int) -> list[int]:
    """The parents of a process, without the first of all; none where /proc does not tell."""
    found: list[int] = []
    while True:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            return found
        if pid <= 1 or pid in found:
            return found
        found.append(pid)
