"""Time and energy of an instruction at every clock, from measurements at few, and how uncertain they are.

Physics says most of it. Time is a part that follows the clock and one that does not. Power is a static part and a
dynamic one, which goes with the clock and the square of the voltage; the voltage is constant up to a knee and rises
above it. Under a power cap the GPU runs at a lower clock than it was asked for::

    t(f) = a + b / x                       x = min(f, clock that the cap allows) / top clock
    P(f) = c + d x (1 + e u)^2             u = max(0, x - knee)

What physics leaves over is a smooth function without a form: a Gaussian process (Rasmussen and Williams, Gaussian
Processes for Machine Learning, 2006, section 2.7, with an explicit basis). So uncertainty grows with the distance from
what was measured, and adding a measurement can be tried out before it is made. The knee, how noisy measurements are,
and where the cap holds the clock if nobody has seen it, are what makes the measurements most likely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_pfo.planner.profile.profile import InstructionProfile

Array = npt.NDArray[np.float64]

_VAGUE = 10.0  # standard deviation of a coefficient of the physics, where values are about 1
_TIME_LEFT, _POWER_LEFT = 0.004, 0.008  # what physics leaves over, as a share of the value at the top clock
_LENGTH = 0.15  # of the top clock: how far it reaches
_NOISES = (0.0005, 0.002, 0.005, 0.01, 0.02)
_USUAL_NOISE = 0.005  # at least, where nobody tells the errors of measurements
_MOST_TIMES = 5.0  # what is told, which does not know of what changes from one iteration to the next
_KNEES = (0.0, 0.5, 0.58, 0.66, 0.72, 0.76, 0.8, 0.84, 0.88, 0.92)
_CAPS = tuple(1 - 0.01 * n for n in range(26))
_LIKELIER = 3.0  # log odds that a knee, or a cap that nobody has seen, must have over none
_ENOUGH_FOR_CAPS = 5
_LEAST = 0.05  # of the value at the top clock: far from what was measured, a polynomial goes anywhere


@dataclass(frozen=True)
class Curve:
    """One kind of instruction of one stage, at each of some clocks.

    Attributes:
        clocks_mhz: The clocks, the highest first.
        times_s: Expected times.
        energies_j: Expected energies.
        covariance: Of the relative errors of energies at each two clocks.
        noise: Standard error of one more measurement, relative.
    """

    clocks_mhz: tuple[int, ...]
    times_s: Array
    energies_j: Array
    covariance: Array
    noise: float

    @property
    def errors(self) -> Array:
        """Relative standard error of each energy."""
        return np.sqrt(np.maximum(np.diag(self.covariance), 0.0))

    def with_measured(self, clock_mhz: int) -> Curve:
        """The same if it were measured at this clock too: what is expected stays, uncertainty shrinks."""
        column = self.covariance[:, self.clocks_mhz.index(clock_mhz)]
        variance = column[self.clocks_mhz.index(clock_mhz)] + self.noise**2
        return replace(self, covariance=self.covariance - np.outer(column, column) / variance)


def fit_curve(
    measured: InstructionProfile, clocks_mhz: Sequence[int], held_mhz: float | None = None, noise: float | None = None
) -> Curve:
    """Fit the curve of one instruction.

    Args:
        measured: Its measurements, at three clocks or more.
        clocks_mhz: Where it is wanted, the highest first.
        held_mhz: The clock at which a power cap held the GPU at its top clock; the top clock where none did; None
            where that is not known: it is estimated.
        noise: Relative standard error of single measurements; None: estimated, not below what the profile says.
    """
    top = float(measured.clocks_mhz[0])
    clocks, wanted = np.array(measured.clocks_mhz) / top, np.array(clocks_mhz) / top
    times, powers = np.array(measured.times_s), np.array(measured.energies_j) / np.array(measured.times_s)
    time_told = _relative(measured.time_stderrs_s, measured.times_s)
    power_told = np.hypot(time_told, _relative(measured.energy_stderrs_j, measured.energies_j))
    noises = [noise] if noise is not None else _possible_noises(_known_error(measured))
    if held_mhz is not None:
        caps: Sequence[float] = [held_mhz / top]
    else:
        caps = _CAPS if len(clocks) >= _ENOUGH_FOR_CAPS else _CAPS[:1]

    def time_of(cap: float) -> _Process:
        x = np.minimum(clocks, cap)
        return _likeliest([_Process(_of_time(x), x, times / times[0], _TIME_LEFT, one, time_told) for one in noises])

    def power_of(cap: float, knees: Sequence[float]) -> _Process:
        x = np.minimum(clocks, cap)
        return _likeliest(
            [
                _Process(_of_power(x, knee), x, powers / powers[0], _POWER_LEFT, one, power_told, knee)
                for one in noises
                for knee in knees
            ]
        )

    def likelihood(cap: float) -> float:
        return time_of(cap).evidence + power_of(cap, _KNEES[:1]).evidence - (_LIKELIER if cap < 1 else 0.0)

    chosen_cap = max(caps, key=likelihood) if len(caps) > 1 else caps[0]
    time, power = time_of(chosen_cap), power_of(chosen_cap, _KNEES)
    x = np.minimum(wanted, chosen_cap)
    mean_times, time_errors = time.at(_of_time(x), x)
    mean_powers, power_errors = power.at(_of_power(x, power.knee), x)
    relative = time_errors / np.outer(mean_times, mean_times) + power_errors / np.outer(mean_powers, mean_powers)
    mean_times, mean_powers = np.maximum(mean_times, _LEAST), np.maximum(mean_powers, _LEAST)
    times_s = times[0] * mean_times
    return Curve(
        tuple(clocks_mhz), times_s, powers[0] * mean_powers * times_s, relative, math.hypot(time.noise, power.noise)
    )


def _likeliest(processes: Sequence[_Process]) -> _Process:
    return max(processes, key=lambda process: process.evidence - (_LIKELIER if process.knee else 0.0))


def _possible_noises(known: float | None) -> list[float]:
    """What single measurements may scatter by: not less than they say, nor many times as much."""
    least, most = (_USUAL_NOISE, _NOISES[-1]) if known is None else (known, max(_MOST_TIMES * known, _NOISES[1]))
    return [one for one in _NOISES if least <= one <= most] or [_NOISES[-1]]


def _known_error(measured: InstructionProfile) -> float | None:
    """The usual relative standard error that the profile tells; None where it tells none."""
    told = [
        error / value
        for errors, values in (
            (measured.time_stderrs_s, measured.times_s),
            (measured.energy_stderrs_j, measured.energies_j),
        )
        for error, value in zip(errors, values, strict=False)
        if not math.isnan(error) and value > 0
    ]
    return float(np.median(told)) if told else None


def _relative(errors: Sequence[float], values: Sequence[float]) -> Array:
    """What single measurements say of themselves: relative standard errors; 0 where they say nothing."""
    told = np.array(errors) / np.array(values) if len(errors) else np.zeros(len(values))
    return np.where(np.isfinite(told), told, 0.0)


def _of_time(x: Array) -> Array:
    return np.stack([np.ones_like(x), 1 / x], axis=1)


def _of_power(x: Array, knee: float) -> Array:
    above = np.maximum(0.0, x - knee)
    return np.stack([np.ones_like(x), x, x * above, x * above**2], axis=1)


class _Process:
    """A Gaussian process around a basis, given measurements.

    Args:
        basis: The terms of the physics at each measured clock.
        x: The clocks.
        values: What was measured there, about 1.
        left: What physics leaves over: standard deviation.
        noise: Standard error of a measurement.
        told: What each measurement says of its own error, which counts where it is larger.
        knee: Kept with it.

    Attributes:
        evidence: Log likelihood of the measurements.
    """

    def __init__(
        self, basis: Array, x: Array, values: Array, left: float, noise: float, told: Array, knee: float = 0.0
    ) -> None:
        self.noise, self.knee = noise, knee
        self._basis, self._x, self._left = basis, x, left
        known = self._covariance(basis, x) + np.diag(np.maximum(noise, told) ** 2)
        self._factor = np.linalg.cholesky(known)
        self._explained = np.linalg.solve(self._factor, values)
        size = len(x) / 2 * math.log(2 * math.pi)
        self.evidence = float(-0.5 * self._explained @ self._explained - np.log(np.diag(self._factor)).sum() - size)

    def at(self, basis: Array, x: Array) -> tuple[Array, Array]:
        """Expected values and their covariance."""
        between = np.linalg.solve(self._factor, self._covariance(basis, x))
        near = np.exp(-((x[:, None] - x[None, :]) ** 2) / (2 * _LENGTH**2))
        alone = _VAGUE**2 * basis @ basis.T + self._left**2 * near
        return between.T @ self._explained, alone - between.T @ between

    def _covariance(self, basis: Array, x: Array) -> Array:
        """Of what was measured with values elsewhere."""
        near: Array = np.exp(-((self._x[:, None] - x[None, :]) ** 2) / (2 * _LENGTH**2))
        return _VAGUE**2 * self._basis @ basis.T + self._left**2 * near
