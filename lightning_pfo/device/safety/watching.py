"""The trainer's end of its watchdog: start the process, wait until it is ready, see whether it lives."""

from __future__ import annotations

import contextlib
import os
import select
import site
import subprocess
import sys
from pathlib import Path

import lightning_pfo
from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device.safety import guard
from lightning_pfo.device.safety.folder import DIRECTORY_VARIABLE
from lightning_pfo.device.safety.lease import Lease, lease_text, watched

READY = b"."
CHANGED, RESTORED = b"+", b"-"
_READY_TIMEOUT_S = 60.0  # a busy machine may need many seconds to start Python


class Watchdog(subprocess.Popen[bytes]):
    """The process that watches over this process's lease of a GPU; see `watchdog`."""

    def __init__(self, lease: Lease, folder: Path) -> None:
        """Start it, without waiting for it.

        Args:
            lease: What it is to undo.
            folder: Where that is going to be.

        Raises:
            DeviceError: If it cannot be started.
        """
        self._is_ready = False
        command = [sys.executable or "python3", "-m", "lightning_pfo.device.safety.watchdog"]
        signals = guard.signals_received()
        try:
            with watched(lease.gpu_uuid, folder) as descriptor:
                super().__init__(
                    [*command, lease_text(lease), str(signals.fileno())],
                    stdin=subprocess.PIPE,  # `CHANGED` and `RESTORED`
                    stdout=subprocess.PIPE,  # `READY`
                    env=_environment() | {DIRECTORY_VARIABLE: str(folder)},
                    cwd="/",  # a job's folder may be unmounted, and may hold modules named like Python's own
                    pass_fds=(descriptor, signals.fileno()),
                    start_new_session=True,  # so that Ctrl-C and batch systems do not end both at once
                )
        except OSError as error:
            raise DeviceError(
                "Clocks are changed only under a watchdog process that can restore them; it could not be started: "
                f"{error}."
            ) from error
        assert self.stdin is not None
        os.set_blocking(self.stdin.fileno(), False)

    def check(self, gpu_name: str) -> None:
        """Wait until the watchdog is ready, once, and see that it lives.

        Raises:
            DeviceError: If it does not, or is not ready in time.
        """
        if not self._is_ready and self.poll() is None:
            assert self.stdout is not None
            answers, _, _ = select.select([self.stdout], [], [], _READY_TIMEOUT_S)
            if not answers:
                raise DeviceError(
                    f"Clocks are changed only under a watchdog process that can restore them; that of {gpu_name} was "
                    f"not ready within {_READY_TIMEOUT_S:g} s. Start the job again when the machine is less busy."
                )
            self._is_ready = os.read(self.stdout.fileno(), 1) == READY
        if not self._is_ready or self.poll() is not None:
            raise DeviceError(
                f"Clocks are changed only under a watchdog process that can restore them; that of "
                f"{gpu_name} has ended (code {self.wait()}). Start the job again."
            )

    def tell(self, what: bytes) -> None:
        """Tell it that clocks are `CHANGED` from now on, or `RESTORED`: so it knows where the lease is lost.

        Whether it lives is not looked at: `check` does.
        """
        assert self.stdin is not None
        with contextlib.suppress(OSError):
            os.write(self.stdin.fileno(), what)

    def end(self) -> None:
        """End the watchdog."""
        self.kill()
        self.wait()


def _environment() -> dict[str, str]:
    """Ours; the package is named in PYTHONPATH only where Python would not find it by itself."""
    home = Path(lightning_pfo.__file__).resolve().parents[1]
    places = [*site.getsitepackages(), site.getusersitepackages()] if hasattr(site, "getsitepackages") else []
    if home in (Path(place).resolve() for place in places):
        return dict(os.environ)
    search_path = [str(home), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    # absolute, as the watchdog works in another folder
    return os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in search_path if entry)}
