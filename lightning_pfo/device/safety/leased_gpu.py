"""Clock locks that outlive a process are set under a lease: what all backends of real GPUs share."""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.core.wording import counted, listed
from lightning_pfo.device.gpu import check_clock_supported
from lightning_pfo.device.safety import claim
from lightning_pfo.device.safety.others import foreign

logger = logging.getLogger(__name__)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, once however many objects say it."""
    logger.warning("%s", message)


class LeasedGpu(ABC):
    """Base of real GPUs: claims, locks and restores clocks; a subclass says how the driver is told.

    Attributes:
        backend: Key of `claim.BACKENDS`: who undoes a lock that this process leaves.
        shares: Whether clocks are set although others use the GPU.
    """

    is_emulated = False
    backend: str
    shares = False

    def __init__(self, name: str, uuid: str, clocks_mhz: tuple[int, ...]) -> None:
        """Touch nothing, unless a crashed job left the clocks locked: then they are restored.

        Args:
            name: Model name.
            uuid: The driver's identifier.
            clocks_mhz: Supported graphics clocks, highest first.
        """
        self._name = name
        self._uuid = uuid
        self._clocks_mhz = clocks_mhz
        self._claim: claim.ClockClaim | None = None
        claim.repair_at_start(uuid)

    @property
    def name(self) -> str:
        """Model name as the driver gives it."""
        return self._name

    @property
    def uuid(self) -> str:
        """The driver's identifier of the GPU."""
        return self._uuid

    @property
    def energy_is_continuous(self) -> bool:
        """Never: real counters tick."""
        return False

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """Graphics clocks that can be locked, highest first."""
        return self._clocks_mhz

    def claim_clocks(self) -> None:
        """Claim the clocks for this process: lease and watchdog; see `claim`. The GPU is not touched.

        Raises:
            DeviceError: If a living process holds them (the message names it), the clocks of this GPU are never to be
                set, or others use it and `shares` does not allow it.
        """
        if self._claim is not None:
            return
        reason = self._why_never()
        if reason:
            raise DeviceError(f"The clocks of {self._name} ({self._uuid}) are left alone: {reason}.")
        claim.await_earlier_program(self._uuid)
        claim.check_free(self._uuid, self._name)
        if not self.shares:
            self._check_unused()
        self._claim = claim.acquire(self._uuid, self._name, self.backend, self._found())

    def check_lock(self) -> None:
        """Check that a lock of ours would be undone if this process died; cheap.

        Raises:
            DeviceError: If it would not.
        """
        if self._claim is not None:
            self._claim.check()

    def _check_unused(self) -> None:
        reason = self._whose_processes() or self._whose_lock()
        if reason:
            raise DeviceError(
                f"Clocks are set on GPUs that nobody else uses; {self._name} ({self._uuid}) is left alone: {reason}. "
                "Use another GPU, or say that it may be shared: gpu.share=true (share=true of a command)."
            )

    def _whose_processes(self) -> str:
        """Who else computes on it, or that nobody knows; empty: nobody."""
        try:
            pids = self._compute_pids()
        except DeviceError as error:  # not knowing is no reason to slow others down
            return f"others may compute on it: {str(error).removesuffix('.')}"
        if pids is None:
            warn_once(
                f"The driver does not tell which processes compute on {self._name} ({self._uuid}), so its clocks are "
                "set whoever uses it. Where others do, use gpu.dry_run=true; where nobody does, gpu.share=true says so."
            )
        others = foreign(pids or ())
        if not others:
            return ""
        return f"{counted(len(others), 'process', 'processes')} of others compute on it ({listed(others)})"

    def lock_graphics_clock(self, clock_mhz: int) -> None:
        """Lock the graphics clock; drivers themselves would silently round an unsupported one.

        Raises:
            DeviceError: If the clock is not supported, another job holds the clocks, or the GPU fails.
            ClockPermissionError: If this process may not change clocks.
        """
        check_clock_supported(clock_mhz, self._clocks_mhz, self._name)
        self.claim_clocks()
        assert self._claim is not None
        is_first = not self._claim.is_changed
        self._claim.note_change()
        try:
            self._lock(clock_mhz)
        except DeviceError as error:
            if is_first and self._was_refused(error):
                self._give_up_claim()  # nothing was changed, so nothing is to be reset
            raise

    def restore(self) -> None:
        """Unlock the graphics clock if we locked it; memory clocks and power limits are never touched."""
        if self._claim is None or not self._claim.is_ours:
            return
        if self._claim.is_changed and not self._claim.is_taken:
            self._unlock()
        self._give_up_claim()

    def _give_up_claim(self) -> None:
        held, self._claim = self._claim, None
        if held is not None:
            held.release()

    def _why_never(self) -> str:
        """Why the clocks of this GPU are never to be set; empty: they may be."""
        return ""

    @abstractmethod
    def _compute_pids(self) -> Iterable[int] | None:
        """Numbers of the processes that compute on it; None where the driver never tells.

        Raises:
            DeviceError: If it fails to tell.
        """

    def _whose_lock(self) -> str:
        """What shows that somebody else has locked the clocks; empty: nothing."""
        return ""

    @abstractmethod
    def _found(self) -> Mapping[str, int | None]:
        """What the driver tells of the settings that a lease is about."""

    @abstractmethod
    def _lock(self, clock_mhz: int) -> None:
        """Tell the driver to lock the graphics clock."""

    @abstractmethod
    def _unlock(self) -> None:
        """Tell the driver to undo that."""

    @abstractmethod
    def _was_refused(self, error: DeviceError) -> bool:
        """Whether the driver has certainly not done what was asked when it raised this."""
