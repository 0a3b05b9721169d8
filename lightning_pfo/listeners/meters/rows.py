"""What a meter has measured at one clock, as lines of a profile."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_pfo.core.events import InstructionSource
from lightning_pfo.core.flags import CLOCK_ABOVE, CLOCK_NOT_REACHED, ENERGY_UNCERTAIN, WAITING_UNCERTAIN
from lightning_pfo.listeners.meters.instructions import InstructionMeter, Kind, Measured
from lightning_pfo.listeners.profile_row import ProfileRow

_CLOCK_TOLERANCE = 0.01


def measured_rows(
    source: InstructionSource,
    meter: InstructionMeter,
    clock_mhz: int,
    gpu_name: str,
    transfers_s: Mapping[Kind, float],
    *,
    target_error: float,
) -> list[ProfileRow]:
    """The lines of this rank, one for each kind of instruction.

    Args:
        source: The pipeline rank.
        meter: What has measured.
        clock_mhz: The clock that was asked for.
        gpu_name: Name of this rank's GPU.
        transfers_s: Time of the transfers that begin with a kind, where known.
        target_error: Energies that are more uncertain are flagged: two relative standard errors.

    Raises:
        DeviceError: If the GPU failed, or its energy counter did not advance.
    """
    rows = []
    dp_rank, tp_rank = source.place
    blocked, waiting_error = meter.blocked_power(), meter.waiting_error()
    for (stage, kind), measured in meter.measured().items():
        if stage not in source.stages:  # what a meter keeps apart
            continue
        rows.append(
            ProfileRow(
                stage=stage,
                instruction=kind.profile_name,
                frequency=clock_mhz,
                time=measured.time_s,
                energy=measured.energy_j,
                time_stderr=measured.time_stderr_s,
                energy_stderr=measured.energy_stderr_j,
                samples=measured.samples,
                p2p_blocking_power_w=blocked.power_w,
                p2p_blocking_power_stderr=blocked.stderr_w,
                transfer_time=transfers_s.get((stage, kind)),
                flags=_flags(measured, clock_mhz, target_error, waiting_error),
                clock_seen_mhz=round(measured.seen.clock_mhz, 1),
                temperature_c=round(measured.seen.temperature_c, 2),
                power_seen_w=round(measured.seen.power_w, 1),
                gpu=gpu_name,
                dp_rank=dp_rank,
                tp_rank=tp_rank,
            )
        )
    return rows


def _flags(measured: Measured, clock_mhz: int, target_error: float, waiting_error: float = 0.0) -> str:
    """What a reader should know; see `core.flags`."""
    seen_mhz = measured.seen.clock_mhz
    flags = set(measured.seen.limits)
    if measured.energy_error > target_error:
        flags.add(ENERGY_UNCERTAIN)
    if waiting_error > target_error:
        flags.add(WAITING_UNCERTAIN)
    if abs(seen_mhz - clock_mhz) > _CLOCK_TOLERANCE * clock_mhz:
        flags.add(CLOCK_NOT_REACHED)
    if seen_mhz > (1 + _CLOCK_TOLERANCE) * clock_mhz:
        flags.add(CLOCK_ABOVE)
    return " ".join(sorted(flags))
