"""What a GPU can do: clocks, the range worth scanning, permission to set clocks, resolution of its energy counter."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise

from lightning_pfo.core.errors import ClockPermissionError, DeviceError, NotSupportedError
from lightning_pfo.device.backends.dry_run import DryRunGpu
from lightning_pfo.device.clocks.transition import ClockStatistics, measure_latency
from lightning_pfo.device.gpu import Gpu
from lightning_pfo.device.time import time_of

_SCAN_DOWN_TO = 0.5  # of the top clock; energy valleys of measured profiles lie at 0.55 to 0.75
_MAX_SCANNED_CLOCKS = 32
_WATCH_EVERY_S = 0.001
_LATENCY_PAIRS = 4
_NOT_TESTED = "Whether clocks may be set was not tested, as that sets some and restores them: probe=true tests it."


@dataclass(frozen=True)
class GpuReport:
    """One GPU.

    Attributes:
        index: Index on this node, as `open_gpu` counts.
        name: Model name.
        uuid: The driver's identifier; empty for an emulated GPU.
        is_emulated: Whether it is only modelled.
        top_clock_mhz: Highest supported graphics clock.
        min_clock_mhz: Lowest supported graphics clock.
        num_clocks: How many are supported.
        clock_step_mhz: Their distance.
        scan_max_mhz: Highest clock worth scanning.
        scan_min_mhz: Lowest clock worth scanning: below half the top clock every instruction is past its valley.
        scan_step_mhz: Distance that scans this range at up to 32 clocks.
        may_set_clocks: Whether this process may; None if that was not or could not be tested.
        permission: Why not, or why it is not known; empty if it may.
        energy_source: `counter`, or `power` where there is no counter and power is integrated instead.
        clock_latency_s: Time from a request until the new clock was read, median; None if that was not or could not be
            measured.
        clock_latency_p90_s: Within this time nine in ten were read.
        counter_tick_s: How often the counter advances; 0: more often than can be seen; None without a counter, or if it
            did not advance while watched.
    """

    index: int
    name: str
    uuid: str
    is_emulated: bool
    top_clock_mhz: int
    min_clock_mhz: int
    num_clocks: int
    clock_step_mhz: float
    scan_max_mhz: int
    scan_min_mhz: int
    scan_step_mhz: int
    may_set_clocks: bool | None
    permission: str
    clock_latency_s: float | None
    clock_latency_p90_s: float | None
    energy_source: str
    counter_tick_s: float | None


def report_gpu(gpu: Gpu, index: int, *, probe: bool = False, watch_s: float = 1.0) -> GpuReport:
    """Find out what a GPU can do.

    Args:
        gpu: The GPU.
        index: Its index on this node.
        probe: Test the permission to set clocks, and how long a change takes; see `probe_permission`, `probe_latency`.
        watch_s: How long to watch the energy counter.
    """
    clocks_mhz = gpu.supported_clocks_mhz()
    may_set, why = probe_permission(gpu) if probe else (None, _NOT_TESTED)
    latency = probe_latency(gpu) if may_set else None
    source, tick_s = watch_counter(gpu, watch_s)
    step_mhz = (clocks_mhz[0] - clocks_mhz[-1]) / max(1, len(clocks_mhz) - 1)
    scanned = [clock for clock in clocks_mhz if clock >= _SCAN_DOWN_TO * clocks_mhz[0]]
    stride = -(-len(scanned) // _MAX_SCANNED_CLOCKS)
    return GpuReport(
        index=index,
        name=gpu.name,
        uuid=getattr(gpu, "uuid", ""),
        is_emulated=gpu.is_emulated,
        top_clock_mhz=clocks_mhz[0],
        min_clock_mhz=clocks_mhz[-1],
        num_clocks=len(clocks_mhz),
        clock_step_mhz=round(step_mhz, 3),
        scan_max_mhz=scanned[0],
        scan_min_mhz=scanned[-1],
        scan_step_mhz=max(1, int(stride * step_mhz)),
        may_set_clocks=may_set,
        permission=why,
        clock_latency_s=round(latency.latency_s, 5) if latency is not None else None,
        clock_latency_p90_s=round(latency.latency_p90_s, 5) if latency is not None else None,
        energy_source=source,
        counter_tick_s=tick_s,
    )


def probe_permission(gpu: Gpu) -> tuple[bool | None, str]:
    """Test whether this process may set clocks: lock the top clock and restore at once, under a lease.

    Killed in between, the watchdog restores. A GPU is left alone while others compute on it, or where somebody seems to
    have locked its clock. NVML does not tell of every such lock (say `nvidia-smi --lock-gpu-clocks` at the top clock);
    one that cannot be seen would be lost.

    Returns:
        Whether it may (None: not known), and why not.
    """
    if isinstance(gpu, DryRunGpu):
        return None, "not tested (dry_run=true)"
    try:
        gpu.claim_clocks()  # refused while another job holds the clocks
        try:
            gpu.lock_graphics_clock(gpu.supported_clocks_mhz()[0])
        finally:
            gpu.restore()
    except (ClockPermissionError, NotSupportedError) as error:
        return False, str(error)
    except DeviceError as error:
        return None, str(error)
    return True, ""


def probe_latency(gpu: Gpu) -> ClockStatistics | None:
    """Measure how long a change of clock takes: some changes between the top clock and three quarters of it; restores.

    Returns:
        What was seen; None if no change to the lower clock was: a driver may ignore what it takes, and an idle GPU
        show a lower clock than it is locked at.
    """
    clocks_mhz = gpu.supported_clocks_mhz()
    lower_mhz = next((clock for clock in clocks_mhz if clock <= 0.75 * clocks_mhz[0]), clocks_mhz[-1])
    try:
        statistics = measure_latency(gpu, [lower_mhz, clocks_mhz[0]] * _LATENCY_PAIRS)
    except DeviceError:
        return None
    is_ignored = statistics.not_reached.get(lower_mhz) == _LATENCY_PAIRS  # at the top clock a GPU may be anyway
    return statistics if statistics.num_observed and not is_ignored else None


def watch_counter(gpu: Gpu, watch_s: float) -> tuple[str, float | None]:
    """See how often the energy counter advances; returns `energy_source` and `counter_tick_s` of `GpuReport`."""
    advances_s: list[float] = []
    time_source = time_of(gpu)
    try:
        last_mj = gpu.total_energy_mj()
        end_s = time_source.now_s() + watch_s
        while time_source.now_s() < end_s:
            time_source.sleep(_WATCH_EVERY_S)
            energy_mj = gpu.total_energy_mj()
            if energy_mj != last_mj:
                advances_s.append(time_source.now_s())
                last_mj = energy_mj
    except NotSupportedError:
        return "power", None
    if len(advances_s) < 3:
        return "counter", None
    tick_s = statistics.median(b - a for a, b in pairwise(advances_s))
    return "counter", round(tick_s, 4) if tick_s > 4 * _WATCH_EVERY_S else 0.0
