"""A GPU whose clocks are not changed: everything else of clock control runs, so that its cost can be measured."""

from __future__ import annotations

import logging

from lightning_pfo.device.gpu import DRY_RUN, Gpu, check_clock_supported

logger = logging.getLogger(__name__)


class DryRunGpu:
    """Another GPU with all methods of `Gpu`, but locking only checks the clock.

    Readings are those of the other GPU; so the clock read back is its own, and most requests count as not reached.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        logger.warning("Dry run: the clocks of %s are not changed.", gpu.name)

    @property
    def name(self) -> str:
        """Model name, and that this is a dry run."""
        return self._gpu.name + DRY_RUN

    @property
    def driver_version(self) -> str:
        """The other GPU's."""
        return self._gpu.driver_version

    @property
    def is_emulated(self) -> bool:
        """Whether the other GPU is only modelled."""
        return self._gpu.is_emulated

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """Graphics clocks that could be locked, highest first."""
        return self._gpu.supported_clocks_mhz()

    def claim_clocks(self) -> None:
        """Nothing to do: another job may set them."""

    def lock_graphics_clock(self, clock_mhz: int) -> None:
        """Check the request.

        Raises:
            DeviceError: If the clock is not supported.
        """
        check_clock_supported(clock_mhz, self.supported_clocks_mhz(), self.name)

    def restore(self) -> None:
        """Nothing to do."""

    def total_energy_mj(self) -> float:
        """See `Gpu`."""
        return self._gpu.total_energy_mj()

    def power_mw(self) -> int:
        """See `Gpu`."""
        return self._gpu.power_mw()

    def graphics_clock_mhz(self) -> int:
        """See `Gpu`."""
        return self._gpu.graphics_clock_mhz()

    def clock_limits(self) -> frozenset[str]:
        """See `Gpu`."""
        return self._gpu.clock_limits()

    def temperature_c(self) -> float | None:
        """See `Gpu`."""
        return self._gpu.temperature_c()

    @property
    def energy_is_continuous(self) -> bool:
        """See `Gpu`."""
        return self._gpu.energy_is_continuous

    def close(self) -> None:
        """Release the other GPU."""
        self._gpu.close()
