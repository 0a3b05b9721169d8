"""The settings of a GPU: which kind, and how an emulated one behaves. The schema of the Hydra group `conf/gpu`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.ranges import check_above, check_between
from lightning_pfo.device.conf_files import checked, known_options, load_option

KINDS = ("auto", "nvml", "zeus", "emulated")
TIMES = ("virtual", "real")


@dataclass
class GpuConfig:
    """Which GPU to use. Most fields describe the emulated GPU (physics: `emulated.physics`); others say "real GPUs"."""

    kind: str = "auto"
    """`nvml` (a real NVIDIA GPU), `zeus` (a real GPU through the zeus package: AMD, or NVIDIA with zeusd), `emulated`,
    or `auto`: NVML where there is a GPU, else emulated."""

    model: str = "NVIDIA A100-SXM4-80GB"
    """Name of the model that is emulated."""

    time: str = "virtual"
    """`virtual`: instructions take their modelled time however busy the machine is, and none of the host's; `real`: the
    emulated GPU sleeps through them."""

    top_clock_mhz: int = 1410
    """Highest graphics clock, MHz."""

    min_clock_mhz: int = 210
    """Lowest graphics clock, MHz; at most the top clock."""

    clock_step_mhz: float = 15.0
    """Distance of supported clocks, counted down from the top, MHz (>= 1); fractional clocks are rounded down."""

    scan_max_mhz: int = 0
    """Highest clock that a scan measures, MHz; 0: the top clock. (Also for real GPUs.)"""

    scan_min_mhz: int = 0
    """Lowest clock that a scan measures, MHz; 0: as far as needed. (Also for real GPUs.)"""

    scan_step_mhz: int = 0
    """A scan measures clocks at least this far apart, MHz; 0: every supported one. (Also for real GPUs.)"""

    lead_clocks: bool = False
    """Ask for an instruction's clock earlier by the measured latency, while the one before it still runs, where the
    wait in between is shorter than the latency. (Also for real GPUs.)"""

    dry_run: bool = False
    """Do everything but change clocks: requests are checked and read back, the GPU keeps its own clocks. (Only
    for real GPUs.)"""

    share: bool = False
    """Set clocks although processes of others compute on the GPU, or somebody seems to have locked its clock; both are
    said otherwise, and the GPU keeps its own clocks. (Only for real GPUs.)"""

    power_limit_w: float = 500.0
    """Power cap, W: where computing would exceed it the clock is held lower. Above static_power_w."""

    static_power_w: float = 50.0
    """Power while computing that does not depend on the graphics clock (leakage, memory, board), W (>= 0)."""

    dynamic_power_w: float = 450.0
    """Power of computing at the top clock beyond the static power, without the cap, W (> 0)."""

    voltage_knee_mhz: float = 1100.0
    """Up to this clock the voltage stays at its least, MHz; above, it rises linearly."""

    voltage_rise: float = 0.23
    """Voltage at the top clock relative to the least one, minus 1 (>= 0)."""

    idle_power_w: float = 60.0
    """Power of a GPU that has nothing to do, W (>= 0)."""

    blocked_activity: float = 0.056
    """Share of the dynamic power drawn, on top of idle_power_w, while waiting for P2P (0 to 1)."""

    memory_share: float = 0.15
    """Share of the longest forward's time, at the top clock, that does not scale with the clock (0 to below 1)."""

    forward_s: float = 0.03
    """How long the longest stage's forward takes at the top clock, s (> 0), before `time_scale`."""

    work_scale: float | None = None
    """Seconds per counted floating-point operation at the top clock (> 0), in place of forward_s; null: use it."""

    time_scale: float = 1.0
    """Factor on all modelled durations (instructions, latency, ticks); 0.1 makes a run ten times shorter (> 0)."""

    clock_latency_s: float = 0.005
    """Time from a clock request until the clock changes, s (>= 0)."""

    clock_rise_latency_s: float | None = None
    """The same where the clock rises, s (>= 0); null: no different."""

    ambient_c: float = 30.0
    """Temperature of a GPU that draws nothing, degrees Celsius."""

    heating_c_per_w: float = 0.1
    """How much warmer each watt makes it in the end, degrees Celsius (>= 0)."""

    heating_s: float = 20.0
    """Time in which it gets by 63 % nearer to that, s (> 0)."""

    leakage_per_c: float = 0.0
    """By which share the static power rises with each degree above the temperature of an idle GPU (>= 0). Real GPUs:
    0.005 to 0.01."""

    counter_tick_s: float = 0.0
    """The energy counter advances only this often, s; 0: continuously. Real counters: 0.02 to 0.1."""

    counter_lag_s: float = 0.0
    """A counter that ticks shows each value so much later, s (>= 0). Real counters: 0 to 0.1."""

    counter_window_s: float = 0.0
    """A counter that ticks counts the mean power of so long a time, s (>= 0); 0: power as it is."""

    power_ramp_s: float = 0.0
    """Power follows the load with this time constant, s (>= 0); 0: at once."""

    noise: float = 0.0
    """Relative standard deviation of the time of an instruction (0 to 0.3)."""

    seed: int = 0
    """Seed of the noise; each GPU index draws its own sequence."""

    throttle_clock_mhz: int = 0
    """Thermal throttling: the clock never exceeds this, whatever is locked, MHz, at least the lowest; 0: none."""

    straggler_index: int = -1
    """Index of the GPU that is a straggler; -1: none."""

    straggler_factor: float = 1.0
    """How many times longer the straggler's instructions take (>= 1)."""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigurationError: Naming the field, its range and the value received.
        """
        if self.kind not in KINDS:
            raise ConfigurationError(f"gpu.kind is one of {', '.join(KINDS)}; got {self.kind!r}.")
        if self.time not in TIMES:
            raise ConfigurationError(f"gpu.time is one of {', '.join(TIMES)}; got {self.time!r}.")
        self._between("top_clock_mhz", 1)
        self._between("min_clock_mhz", 1, self.top_clock_mhz)
        self._between("clock_step_mhz", 1)
        self._between("scan_max_mhz", 0)
        self._between("scan_min_mhz", 0, self.scan_max_mhz or math.inf)
        self._between("scan_step_mhz", 0)
        self._between("static_power_w", 0)
        self._above("dynamic_power_w", 0)
        self._above("power_limit_w", self.static_power_w)
        self._between("voltage_knee_mhz", 0, self.top_clock_mhz)
        self._between("voltage_rise", 0)
        self._between("idle_power_w", 0)
        self._between("blocked_activity", 0, 1)
        self._between("memory_share", 0, 0.99)
        self._above("forward_s", 0)
        if self.work_scale is not None:
            self._above("work_scale", 0)
        self._above("time_scale", 0)
        self._between("clock_latency_s", 0)
        if self.clock_rise_latency_s is not None:
            self._between("clock_rise_latency_s", 0)
        self._between("ambient_c", -50, 100)
        self._between("heating_c_per_w", 0)
        self._above("heating_s", 0)
        self._between("leakage_per_c", 0)
        self._between("counter_tick_s", 0)
        self._between("counter_lag_s", 0)
        self._between("counter_window_s", 0)
        self._between("power_ramp_s", 0)
        self._between("noise", 0, 0.3)
        if self.throttle_clock_mhz != 0:
            self._between("throttle_clock_mhz", self.min_clock_mhz)
        self._between("straggler_index", -1)
        self._between("straggler_factor", 1)

    def _between(self, field: str, low: float, high: float = math.inf) -> None:
        check_between(f"gpu.{field}", getattr(self, field), low, high)

    def _above(self, field: str, low: float) -> None:
        check_above(f"gpu.{field}", getattr(self, field), low)


def known_gpu_configs() -> list[str]:
    """Names of the files in conf/gpu: what `gpu=` accepts."""
    return known_options("gpu")


def load_gpu_config(name: str) -> GpuConfig:
    """Read conf/gpu/NAME.yaml.

    Args:
        name: Such as `auto`, `nvml` or `emulated_a40`.

    Raises:
        ConfigurationError: If there is no such file (the message lists those there are), or a key or value is wrong.
    """
    return load_option("gpu", name, GpuConfig)


def gpu_config_from(settings: Mapping[str, Any]) -> GpuConfig:
    """Check settings (a mapping, e.g. the composed `cfg.gpu` of Hydra) against the schema.

    Raises:
        ConfigurationError: If a key is unknown (the message names the nearest), or a value has the wrong type or range.
    """
    return checked("gpu", settings, GpuConfig)
