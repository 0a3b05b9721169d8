"""What is known of a counter beforehand: looks and lags that it may have, and how likely they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lightning_pfo.device.energy.fits import Fits, Ticks, fits_by_look
from lightning_pfo.device.energy.looks import Look

_TRUSTED = 0.9  # how likely it is that a calibration holds
_LEAST_SPREAD_S = 5e-4  # of a lag: moments of instructions are known less well than those of a calibration
_GRID = np.linspace(-2, 2, 9)  # standard deviations of a lag


@dataclass(frozen=True)
class KnownLook:
    """A look that a counter may have.

    Attributes:
        weight: How likely it is.
        lag_s: By how much the counter is late then, s.
        lag_stderr_s: The standard error of that.
        part: See `Look`.
        window_s: See `Look`.
        smoothing_s: See `Look`.
    """

    weight: float
    lag_s: float
    lag_stderr_s: float
    part: float
    window_s: float
    smoothing_s: float

    @property
    def look(self) -> Look:
        """The look."""
        return Look(self.part, self.window_s, self.smoothing_s)


@dataclass(frozen=True)
class Calibration:
    """What a square wave told of a counter.

    Attributes:
        gpu: Model of the GPU.
        driver: Version of its driver.
        num_ticks: How many ticks told it.
        looks: The likely looks, likeliest first; their weights sum to 1.
    """

    gpu: str
    driver: str
    num_ticks: int
    looks: tuple[KnownLook, ...]

    def fits(self, ticks: Ticks) -> list[Fits]:
        """Fits of the known looks and lags; likelihoods as those of `fits_by_look`."""
        found = []
        chances = np.exp(-(_GRID**2) / 2)
        for known in self.looks:
            lags_s = known.lag_s + max(known.lag_stderr_s, _LEAST_SPREAD_S) * _GRID
            log_weights = np.log(known.weight * chances / chances.sum())
            found.append(ticks.fits(known.look, lags_s).plus(log_weights))
        return found

    def describe(self) -> str:
        """The likeliest look, in words."""
        known = self.looks[0]
        averages = [
            f"the last {100 * known.part:.0f} % of each tick" if known.part < 1 else "",
            f"the mean of {1000 * known.window_s:.0f} ms" if known.window_s else "",
            f"a filter of {1000 * known.smoothing_s:.0f} ms" if known.smoothing_s else "",
        ]
        what = next(filter(None, averages), "all power")
        return f"{what}, {1000 * known.lag_s:.1f} ms late"


def all_fits(ticks: Ticks, calibration: Calibration | None) -> list[Fits]:
    """Fits of all looks that a counter may have, each as likely as is known of it."""
    fits = [fits for _, fits in fits_by_look(ticks)]
    if calibration is not None:
        fits = [one.plus(math.log(1 - _TRUSTED)) for one in fits]
        fits += [one.plus(math.log(_TRUSTED)) for one in calibration.fits(ticks)]
    return ticks.comparable(fits)
