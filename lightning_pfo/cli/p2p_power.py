"""Measure the P2P blocking power: what a GPU draws while it waits for its neighbour, at several clocks.

Clocks are set and restored, unless the process may not or others use the GPU: then only its own clock is measured.
A profile made by `EnergyProfilerCallback` holds this power already, measured in the real pipeline. Example:

  lightning-pfo p2p-power gpu=nvml num_clocks=5 seconds=5
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field, replace

from rich.table import Table

from lightning_pfo.cli.console import plain_console, show_table
from lightning_pfo.core.ranges import check_between
from lightning_pfo.device import load_gpu_config, open_gpu
from lightning_pfo.experiment.gpu_loads.p2p_power import measure_blocked_power


@dataclass
class Settings:
    """What `lightning-pfo p2p-power` can be told."""

    gpu: str = field(default="auto", metadata={"help": "auto, nvml, emulated_a40, ...: a file of conf/gpu"})
    num_clocks: int = field(default=3, metadata={"help": "clocks to measure, from the top to half of it"})
    seconds: float = field(default=3.0, metadata={"help": "how long to wait at each clock"})
    share: bool = field(default=False, metadata={"help": "set the GPU's clocks although others use it"})
    json: bool = field(default=False, metadata={"help": "print JSON, for programs"})


def run(settings: Settings) -> None:
    """Measure, restore the clocks, print.

    Raises:
        ConfigurationError: If a number is out of range, or torch sees only one GPU.
        DeviceError: If the GPU cannot be measured. Without permission to set clocks, its own clock is measured.
    """
    check_between("num_clocks", settings.num_clocks, 1, 1000)
    check_between("seconds", settings.seconds, 0.1, 3600)
    gpu = open_gpu(replace(load_gpu_config(settings.gpu), share=settings.share), 0)
    try:
        measured = measure_blocked_power(gpu, settings.num_clocks, settings.seconds)
        name = gpu.name
    finally:
        gpu.close()
    if settings.json:
        sys.stdout.write(json.dumps({"gpu": name, "blocked": [asdict(power) for power in measured]}, indent=1) + "\n")
        return
    title = f"P2P blocking power of {name}"
    table = Table(title=title, min_width=len(title))  # on one line
    table.add_column("clock (MHz)", justify="right")
    table.add_column("power (W)", justify="right")
    for power in measured:
        table.add_row(str(power.clock_mhz), f"{power.power_w:.2f}")
    show_table(table)
    by_clock = ", ".join(f"{power.clock_mhz}: {power.power_w:.2f}" for power in measured)
    plain_console().print(f"For the planner: 'p2p_blocking_power_w={{{by_clock}}}'")
