"""What the project asks of a GPU.

Units are in the names: clocks in MHz, energy in mJ, power in mW (as NVML counts them). A lock holds until `restore`;
whoever locks restores, whatever happens (`safety.guard`).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol, runtime_checkable

from lightning_pfo.core.errors import DeviceError

DRY_RUN = " (dry run)"
"""What is added to the name of a GPU whose clocks are not changed."""


@runtime_checkable
class Gpu(Protocol):
    """One GPU: its clocks and its energy counter. All methods may be called from any thread.

    A GPU whose time is not the host's has an attribute `time_source` besides; see `device.time`.
    """

    @property
    def name(self) -> str:
        """Model name, e.g. `NVIDIA A100-SXM4-80GB`; an emulated GPU says so in its name."""

    @property
    def driver_version(self) -> str:
        """Version of its driver; empty where there is none, or it does not tell."""

    @property
    def is_emulated(self) -> bool:
        """Whether this GPU is only modelled."""

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """Graphics clocks that can be locked, highest first."""

    def claim_clocks(self) -> None:
        """Make sure that no other job sets this GPU's clocks, until `restore`; changes nothing. May be repeated.

        Raises:
            DeviceError: If another job does; the message names its process.
        """

    def lock_graphics_clock(self, clock_mhz: int) -> None:
        """Lock the graphics clock, after claiming it; it may land some milliseconds later.

        Raises:
            DeviceError: If the clock is not supported, or the GPU fails.
            ClockPermissionError: If this process may not change clocks.
        """

    def restore(self) -> None:
        """Undo our lock and give up our claim; does nothing if we never locked."""

    def total_energy_mj(self) -> float:
        """Energy used since some fixed moment; only differences mean something. It may advance in ticks."""

    def power_mw(self) -> int:
        """Power drawn now."""

    def graphics_clock_mhz(self) -> int:
        """The clock at which the GPU runs now; below the locked one while a power or thermal limit holds it."""

    def clock_limits(self) -> frozenset[str]:
        """What holds the clock below the locked one now: of `power_cap`, `thermal`, `hw_slowdown`; empty: nothing."""

    def temperature_c(self) -> float | None:
        """Temperature of the chip, degrees Celsius; None where it is not told."""

    @property
    def energy_is_continuous(self) -> bool:
        """Whether two readings of the counter measure what lies between them exactly; real counters tick."""

    def close(self) -> None:
        """Restore the clocks and release the GPU. May be called twice."""


def check_clock_supported(clock_mhz: int, supported_mhz: tuple[int, ...], name: str) -> None:
    """Check that a GPU can be locked at a clock.

    Args:
        clock_mhz: The clock asked for.
        supported_mhz: Supported clocks, highest first.
        name: Name of the GPU, for the message.

    Raises:
        DeviceError: If it cannot; the message names the nearest supported clocks.
    """
    if clock_mhz in supported_mhz:
        return
    ascending = supported_mhz[::-1]
    position = bisect_left(ascending, clock_mhz)
    nearest = " or ".join(f"{clock} MHz" for clock in ascending[max(0, position - 1) : position + 1])
    raise DeviceError(
        f"{name} locks only supported graphics clocks ({ascending[0]} to {ascending[-1]} MHz); got {clock_mhz} MHz. "
        f"The nearest supported: {nearest}."
    )
