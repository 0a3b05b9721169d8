"""Which process is meant, and whether it still runs; process numbers alone are used again."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """A process of this machine, told from all others that ever had or will have its number.

    Attributes:
        pid: Its number.
        start_ticks: When it started, in the kernel's ticks since booting; None where the system does not tell.
        boot_id: Which booting of the machine; empty where the system does not tell.
        namespace: Where the number counts: containers have their own. Empty where the system does not tell.
        host: Name of the machine, for people, and to tell another machine from an earlier booting of this one. A
            container has a name of its own.
    """

    pid: int
    start_ticks: int | None
    boot_id: str
    namespace: str = ""
    host: str = field(default="", compare=False)

    @property
    def is_elsewhere(self) -> bool:
        """Whether it runs, or ran, on another machine, with which this one shares files."""
        return self.boot_id != boot_id() and bool(self.host) and self.host != socket.gethostname()

    def is_alive(self) -> bool:
        """Whether it still runs; a process that has ended but was not waited for does not.

        Only for processes of our own namespace.
        """
        if self.boot_id != boot_id() or not _exists(self.pid):
            return False
        state, start_ticks = _state_and_start(self.pid)
        if start_ticks is None or self.start_ticks is None:
            return _exists(self.pid)  # or it has been waited for in between
        return start_ticks == self.start_ticks and state not in ("Z", "X")


def this_process() -> ProcessId:
    """The process that calls."""
    return process_of(os.getpid(), _state_and_start(os.getpid())[1])


def process_of(pid: int, start_ticks: int | None) -> ProcessId:
    """A process of this machine and namespace."""
    return ProcessId(pid, start_ticks, boot_id(), pid_namespace(), socket.gethostname())


def pid_namespace() -> str:
    """Identifies the namespace of our process numbers; empty where the system does not tell."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def boot_id() -> str:
    """Identifies the present booting of the machine; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it belongs to somebody else
    return True


def _state_and_start(pid: int) -> tuple[str, int | None]:
    """State letter and start time of a process (proc(5)); unknown where /proc is missing or hides others."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", None
    return after_name[0], int(after_name[19])
