"""List GPUs: clocks, the range worth scanning, permission to set clocks and how long it takes, the energy counter.

No clock is touched unless probe=true asks for it, and then on GPUs only that nobody else uses.
calibrate=true puts pulses of load on one GPU for 30 s, learns from them how its energy counter looks at power, and
keeps that for all measurements of this user on that model and driver.
write=NAME makes a configuration for the GPU model where gpu=NAME finds it from then on: in conf/gpu of the package, or
of this user where the package cannot be written to. write=PATH.yaml writes it elsewhere. Examples:

  lightning-pfo gpu
  lightning-pfo gpu probe=true
  lightning-pfo gpu calibrate=true
  lightning-pfo gpu gpu=emulated_a40 json=true
  lightning-pfo gpu --write my_gpu
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.table import Table

from lightning_pfo.cli.console import plain_console, show_table
from lightning_pfo.core.errors import ConfigurationError, DeviceError
from lightning_pfo.core.files import check_can_write, write_text_atomically
from lightning_pfo.core.paths import conf_dir, user_conf_dir
from lightning_pfo.core.ranges import check_between
from lightning_pfo.device.conf_files import known_options
from lightning_pfo.device.config import GpuConfig, load_gpu_config
from lightning_pfo.device.energy.calibration import save_calibration
from lightning_pfo.device.open import num_visible, open_gpu
from lightning_pfo.device.report import GpuReport, report_gpu


@dataclass
class Settings:
    """What `lightning-pfo gpu` can be told."""

    gpu: str = field(default="auto", metadata={"help": "auto, nvml, emulated_a40, ...: a file of conf/gpu"})
    json: bool = field(default=False, metadata={"help": "print JSON, for programs"})
    write: str = field(
        default="",
        metadata={"help": "write a configuration for this GPU: a name, or a path that ends in .yaml", "is_path": True},
    )
    index: int = field(default=0, metadata={"help": "the GPU that `write` describes, and `calibrate` loads"})
    probe: bool = field(
        default=False,
        metadata={"help": "test the permission to set clocks, and the latency, by setting and restoring some"},
    )
    share: bool = field(default=False, metadata={"help": "with probe=true: also while others use the GPU"})
    calibrate: bool = field(
        default=False, metadata={"help": "learn how the energy counter looks at power, from 30 s of load"}
    )
    watch_s: float = field(default=1.0, metadata={"help": "how long to watch the energy counter, seconds"})


def run(settings: Settings) -> None:
    """Report every GPU, and write the configuration if asked to.

    Raises:
        ConfigurationError: If a setting is impossible.
        DeviceError: After all others were reported, if a GPU fails.
    """
    check_between("watch_s", settings.watch_s, 0.001, 3600)
    target = _target(settings.write) if settings.write else None
    config = replace(load_gpu_config(settings.gpu), share=settings.share)
    num_gpus = 1 if config.kind == "emulated" else max(1, num_visible(config))  # without any, opening says why
    if not 0 <= settings.index < num_gpus:
        raise ConfigurationError(f"index counts the GPUs from 0 to {num_gpus - 1}; got {settings.index}. Use index=0.")
    reports: dict[int, GpuReport] = {}
    failures: list[str] = []
    for index in range(num_gpus):
        try:
            reports[index] = _report(config, index, settings)
        except DeviceError as error:
            failures.append(f"GPU {index}: {error}" if num_gpus > 1 else str(error))
    if settings.index not in reports:
        target = None
    if target is not None:
        write_text_atomically(target, config_text(reports[settings.index], config))
    if settings.json:
        sys.stdout.write(json.dumps([asdict(report) for report in reports.values()], indent=1) + "\n")
    else:
        _print(list(reports.values()), target)
    if settings.calibrate and settings.index in reports:
        _calibrate(config, settings.index)
    if failures:
        raise DeviceError(" ".join(failures))


def _target(write: str) -> Path:
    """The file to write, which can be written.

    Raises:
        ConfigurationError: If it cannot, or `gpu=NAME` would not find it.
    """
    path = Path(write)
    if path.suffix == ".yaml":
        check_can_write("write", path)
        return path
    if not re.fullmatch(r"[A-Za-z]\w*", write) or write == "true":
        known = Path(write).with_suffix(".yaml") if path.suffix or "/" in write else "my_gpu"
        raise ConfigurationError(
            f"write is a name of letters, digits and _, or a path that ends in .yaml; got {write!r}. Use write={known}."
        )
    if write in known_options("gpu"):
        raise ConfigurationError(f"There is a gpu={write} already; got write={write}. Use write={write}_2.")
    name, ours = f"{write}.yaml", conf_dir() / "gpu"
    try:
        check_can_write("write", ours / name)
    except ConfigurationError:
        path = user_conf_dir() / "gpu" / name
        check_can_write("write", path)
        return path
    return ours / name


def _report(config: GpuConfig, index: int, settings: Settings) -> GpuReport:
    gpu = open_gpu(config, index)
    try:
        return report_gpu(gpu, index, probe=settings.probe, watch_s=settings.watch_s)
    finally:
        try:
            gpu.close()
        except DeviceError as error:
            raise DeviceError(
                f"{error} Its clocks may still be as the probe has set them: lightning-pfo restore-clocks tries again."
            ) from error


def _calibrate(config: GpuConfig, index: int) -> None:
    from lightning_pfo.experiment.gpu_loads.load import load_of
    from lightning_pfo.experiment.gpu_loads.square_wave import calibrate_counter

    gpu = open_gpu(config, index)
    try:
        calibration = calibrate_counter(gpu, load_of(gpu, index))
    finally:
        gpu.close()
    place = f"kept in {save_calibration(calibration)}" if calibration.driver else "not kept: there is no driver"
    stderr = plain_console(stderr=True)
    stderr.print(f"The counter of {gpu.name} shows {calibration.describe()} ({place}).", soft_wrap=True)


def _print(reports: list[GpuReport], written: Path | None) -> None:
    console = plain_console()
    for report in reports:
        show_table(_table(report))
    for reason in sorted({report.permission for report in reports} - {""}):
        console.print(reason)
    if written is not None:
        console.print(f"written to {written}; {_how_to_use(written)} gpu={written.stem}", soft_wrap=True)


def _how_to_use(written: Path) -> str:
    folder = written.absolute().parent
    if folder in [one / "gpu" for one in (conf_dir(), user_conf_dir())]:
        return "use it with"
    if folder.name == "gpu":
        return f"use it with --config-dir {folder.parent}"
    return f"moved to {user_conf_dir() / 'gpu'}, it is used with"


def config_text(report: GpuReport, config: GpuConfig) -> str:
    """The YAML of a configuration for this GPU: a real one through NVML, an emulated one with all its parameters."""
    settings = {
        "kind": "emulated" if report.is_emulated else config.kind if config.kind == "zeus" else "nvml",
        "model": config.model if report.is_emulated else report.name,
        "clock_step_mhz": report.clock_step_mhz,
        "scan_max_mhz": report.scan_max_mhz,
        "scan_min_mhz": report.scan_min_mhz,
        "scan_step_mhz": report.scan_step_mhz,
    }
    if report.is_emulated:
        settings = asdict(config) | settings
    lines = [
        f"# {report.name}: {report.num_clocks} clocks from {report.min_clock_mhz} to {report.top_clock_mhz} MHz.",
        "# Written by `lightning-pfo gpu write=...`; scan_* is the range worth scanning, and may be edited.",
        *(f"{key}: {json.dumps(value)}" for key, value in settings.items()),
    ]
    return "\n".join(lines) + "\n"


def _table(report: GpuReport) -> Table:
    table = Table("", f"GPU {report.index}: {report.name}")
    table.add_row("clocks", f"{report.min_clock_mhz} to {report.top_clock_mhz} MHz, step {report.clock_step_mhz:g}")
    table.add_row("worth scanning", f"{report.scan_min_mhz} to {report.scan_max_mhz} MHz, step {report.scan_step_mhz}")
    table.add_row("may set clocks", {True: "yes", False: "no", None: "unknown"}[report.may_set_clocks])
    table.add_row("clock latency", _latency(report))
    table.add_row("energy", _energy(report))
    return table


def _latency(report: GpuReport) -> str:
    if report.clock_latency_s is None or report.clock_latency_p90_s is None:
        return "not seen" if report.may_set_clocks else "not measured"
    return f"{1e3 * report.clock_latency_s:.1f} ms (nine in ten: {1e3 * report.clock_latency_p90_s:.1f} ms)"


def _energy(report: GpuReport) -> str:
    if report.energy_source == "power":
        return "no counter: power is integrated"
    if report.counter_tick_s is None:
        return "counter, did not advance"
    return f"counter, every {1000 * report.counter_tick_s:.0f} ms" if report.counter_tick_s else "counter, continuous"
