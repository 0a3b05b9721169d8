"""What is known of a counter before training: its lag and look, learnt from a square wave of load, kept in a file.

::

    load        ____|~~~~~|__|~~~~|_____|~|____      pulses and pauses of many lengths, all known
    counter     ...:......:......:......:......      sees them late, and averaged over some time

What the ticks of a training leave open (where all kinds of instructions draw about the same, or there are few ticks)
the calibration tells. It belongs to a GPU model and a driver, and is taken for what it is: a likely look and lag,
beside all others; a counter that is another one after all is found by its ticks, as without.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.core.files import write_text_atomically
from lightning_pfo.core.paths import user_cache_dir
from lightning_pfo.device.energy.fits import LEAST_LAG_S, MOST_LAG_S, Fits, Ticks, fits_by_look
from lightning_pfo.device.energy.known_looks import Calibration, KnownLook
from lightning_pfo.device.energy.looks import Look, Usage, halves
from lightning_pfo.device.energy.trace import EnergyTrace
from lightning_pfo.device.gpu import DRY_RUN, Gpu

_log = logging.getLogger(__name__)

FORMAT, VERSION = "lightning_pfo counter calibration", 1
FEWEST_TICKS = 40
_SMALL = 1e-3  # looks less likely than that are left out


def calibrate(gpu: Gpu, trace: EnergyTrace, busy: Sequence[tuple[float, float]]) -> Calibration:
    """Learn from a square wave how a counter looks at power.

    Args:
        gpu: The GPU that it belongs to.
        trace: Readings of the counter, from before the first pulse until after the last one.
        busy: Begin and end of each pulse in s, ascending.

    Raises:
        DeviceError: If there are too few ticks to tell.
    """
    times_s, energies_j = np.asarray(trace.times_s), np.asarray(trace.energies_j)
    is_ours = times_s > busy[0][0] + MOST_LAG_S
    times_s, energies_j = times_s[is_ours], energies_j[is_ours]
    if len(times_s) < FEWEST_TICKS:
        raise DeviceError(
            f"A calibration takes {FEWEST_TICKS} ticks of the energy counter or more; {gpu.name} showed "
            f"{len(times_s)} during the square wave. It cannot be calibrated in so short a time."
        )
    usage = [Usage(busy)]
    by_look: dict[Look, list[Fits]] = {}
    for uneven in ([], [halves(busy)]):
        ticks = Ticks(times_s, np.diff(energies_j), trace.resolution_s, usage, uneven)
        found = fits_by_look(ticks)
        for (look, _), fits in zip(found, ticks.comparable([fits for _, fits in found]), strict=True):
            by_look.setdefault(look, []).append(fits)
    highest = max(float(fits.log_likelihoods.max()) for likely in by_look.values() for fits in likely)
    looks = []
    for look, likely in by_look.items():
        weights = np.concatenate([np.exp(fits.log_likelihoods - highest) for fits in likely])
        if weights.sum() < _SMALL**2:
            continue
        lags_s = np.concatenate([fits.lags_s for fits in likely])
        lag_s = float(np.average(lags_s, weights=weights))
        spread_s = math.sqrt(float(np.average((lags_s - lag_s) ** 2, weights=weights)))
        looks.append(KnownLook(float(weights.sum()), lag_s, spread_s, look.part, look.window_s, look.smoothing_s))
    whole = sum(look.weight for look in looks)
    looks = [look for look in looks if look.weight > _SMALL * whole]
    whole = sum(look.weight for look in looks)
    looks = sorted((replace(look, weight=look.weight / whole) for look in looks), key=lambda look: -look.weight)
    return Calibration(*_model_and_driver(gpu), len(times_s) - 1, tuple(looks))


def _model_and_driver(gpu: Gpu) -> tuple[str, str]:
    """What a calibration belongs to: a dry run reads the counter of the GPU itself."""
    return gpu.name.removesuffix(DRY_RUN), gpu.driver_version


def calibration_path(gpu: str, driver: str) -> Path:
    """The file of a GPU model and driver, in this user's cache."""
    name = re.sub(r"[^A-Za-z0-9.]+", "_", f"{gpu} driver {driver}").strip("_")
    return user_cache_dir() / "counters" / f"{name}.json"


def save_calibration(calibration: Calibration) -> Path:
    """Keep a calibration for all later measurements of this user; returns its file."""
    path = calibration_path(calibration.gpu, calibration.driver)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, json.dumps({"format": FORMAT, "version": VERSION, **asdict(calibration)}, indent=1))
    return path


def known_calibration(gpu: Gpu) -> Calibration | None:
    """What was kept of a GPU's model and driver; None if nothing, or with a warning if the file is damaged."""
    model, driver = _model_and_driver(gpu)
    path = calibration_path(model, driver)
    try:
        return _read(path, path.stat().st_mtime_ns, model, driver) if driver else None
    except OSError:
        return None


@functools.lru_cache(maxsize=32)
def _read(path: Path, written_ns: int, gpu: str, driver: str) -> Calibration | None:
    """Read a file as it was at a moment: it is asked for at every measurement."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is of {content['format']!r}, version {content['version']!r}")
        looks = tuple(KnownLook(**{key: float(value) for key, value in look.items()}) for look in content["looks"])
        return _checked(Calibration(gpu, driver, int(content["num_ticks"]), looks))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _log.warning(
            "The calibration %s cannot be used (%r). Make it anew: lightning-pfo gpu calibrate=true.", path, error
        )
        return None


def _checked(calibration: Calibration) -> Calibration:
    for look in calibration.looks:
        is_known = 0 < look.part <= 1 and 0 <= look.window_s <= 1 and 0 <= look.smoothing_s <= 1
        is_late = LEAST_LAG_S <= look.lag_s <= MOST_LAG_S and 0 <= look.lag_stderr_s <= 1
        if not (is_known and is_late and 0 < look.weight <= 1):
            raise ValueError(f"{look} is out of range")
    if not math.isclose(sum(look.weight for look in calibration.looks), 1, abs_tol=1e-6):
        raise ValueError("its weights do not sum to 1")
    return calibration
