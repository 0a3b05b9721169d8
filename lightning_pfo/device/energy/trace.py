"""Readings of an energy counter: when it advanced, as exactly as its period tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_pfo.device.energy.known_looks import Calibration

Array = npt.NDArray[np.float64]

_FEWEST_SNAPPED = 4
_COUNTABLE = 0.22  # of a period: of moments known so well it can be told how many periods lie between them


@dataclass(frozen=True)
class EnergyTrace:
    """Readings of an energy counter: the moments at which it advanced, and what it showed from then on.

    Attributes:
        times_s: Moments, ascending.
        energies_j: Counter values, as many.
        resolution_s: How exactly the moments are known.
        calibration: What is known of the counter beforehand, if anything is.
    """

    times_s: Sequence[float]
    energies_j: Sequence[float]
    resolution_s: float
    calibration: Calibration | None = None


def snap_to_period(
    times_s: Sequence[float], energies_j: Sequence[float], resolutions_s: Sequence[float]
) -> EnergyTrace:
    """Where the counter advances periodically, know its moments better than each was seen.

    Fits `first + count x period` to the moments. If all of them fit within their resolutions, the fitted ones replace
    them, and their resolution is that of the fit; otherwise those that are known badly are left out.

    Args:
        times_s: When it was seen to advance.
        energies_j: What it showed then.
        resolutions_s: How exactly each moment is known.
    """
    seen_s, known_s, shown_j = (np.asarray(column, dtype=float) for column in (times_s, resolutions_s, energies_j))
    if len(seen_s) < 2:
        return EnergyTrace(times_s, energies_j, max(resolutions_s, default=0.0))
    step_s = float(np.median(np.diff(seen_s)))
    is_usable = known_s < _COUNTABLE * step_s
    snapped = _snapped(seen_s[is_usable], known_s[is_usable], step_s)
    if snapped is not None:
        moments_s, resolution_s = snapped
        return EnergyTrace(moments_s.tolist(), shown_j[is_usable].tolist(), resolution_s)
    is_sharp = known_s <= 2 * float(np.median(known_s))
    resolution_s = float(np.sqrt(np.mean(known_s[is_sharp] ** 2)))
    return EnergyTrace(seen_s[is_sharp].tolist(), shown_j[is_sharp].tolist(), resolution_s)


def _snapped(seen_s: Array, known_s: Array, step_s: float) -> tuple[Array, float] | None:
    """Moments at equal distances, and how exactly they are known; None where they are not at equal distances."""
    if len(seen_s) < _FEWEST_SNAPPED:
        return None
    counts = np.concatenate([[0.0], np.cumsum(np.rint(np.diff(seen_s) / step_s))])  # ticks may have been missed
    if np.any(np.diff(counts) < 1):
        return None
    period_s, first_s = np.polyfit(counts, seen_s - seen_s[0], 1, w=1 / known_s)
    fitted_s = seen_s[0] + first_s + counts * period_s
    if np.any(np.abs(fitted_s - seen_s) > 2 * known_s):
        return None
    return fitted_s, float(1 / np.sqrt(np.sum(known_s**-2.0)))
