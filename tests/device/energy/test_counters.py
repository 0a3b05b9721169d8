"""Claimed intervals cover the truth, whatever a counter makes of power that varies."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from lightning_pfo.device.energy.attribution import MeanPower, mean_powers
from lightning_pfo.device.energy.looks import Look, Usage
from lightning_pfo.device.energy.trace import snap_to_period

STEP_S = 0.001
POWERS_W = {"forward": 300.0, "backward": 250.0, "wait": 80.0, None: 60.0}


@dataclass
class Counter:
    """A GPU's power in steps of a millisecond, and the counter that sums it up.

    Attributes:
        tick_s: How often it advances.
        window_s: It counts the mean power of so long a time.
        smoothing_s: It counts power behind a low-pass filter of this time constant.
        inside: By which share the first half of an instruction draws more than its mean, the second less.
        spread: Standard deviation of the power of repeats.
        lag_s: How late it shows what it has counted.
        period_s: The iteration takes a multiple of it, always the same; None: waits are random.
        jitter_s: Pauses between such iterations, up to that.
    """

    tick_s: float = 0.1
    window_s: float = 0.0
    smoothing_s: float = 0.0
    inside: float = 0.0
    spread: float = 0.0
    lag_s: float = 0.01
    period_s: float | None = None
    jitter_s: float = 0.0
    intervals: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    powers_w: list[float] = field(default_factory=list)

    def run(self, seed: int, repeats: int = 50) -> dict[str, MeanPower]:
        """Powers of the kinds, as they are made out of the ticks."""
        chance = random.Random(seed)
        self.intervals, self.powers_w = {}, [60.0] * 300
        for number in range(repeats):
            for kind in ("forward", "backward"):
                wait_s = chance.uniform(0, 0.03) if self.period_s is None else (0.013, 0.027)[kind == "backward"]
                self._spend(chance, "wait", wait_s)
                self._spend(chance, kind, 0.02)
            if self.period_s is not None and number % 5 == 4:  # 5 x 80 ms
                self._spend(chance, None, chance.uniform(0, self.jitter_s))
            elif self.period_s is None and number % 12 == 11:
                self._spend(chance, None, 0.012)
        powers_w = np.array(self.powers_w)
        steps = round(self.window_s / STEP_S)
        if steps:
            powers_w = np.convolve(
                np.concatenate([np.full(steps - 1, 60.0), powers_w]), np.ones(steps) / steps, "valid"
            )
        if self.smoothing_s:
            weights = np.exp(-np.arange(0, 8 * self.smoothing_s, STEP_S) / self.smoothing_s)
            before = np.full(len(weights) - 1, 60.0)
            powers_w = np.convolve(np.concatenate([before, powers_w]), weights / weights.sum(), "valid")
        times_s = STEP_S * np.arange(len(powers_w) + 1)
        counted_j = np.concatenate([[0.0], np.cumsum(powers_w) * STEP_S])
        ticks_s = np.arange(chance.random() * self.tick_s, times_s[-1], self.tick_s)
        seen_s = [tick_s + self.lag_s + chance.uniform(-1, 1) * 0.002 for tick_s in ticks_s]
        shown_j = np.floor(1000 * np.interp(ticks_s, times_s, counted_j)) / 1000
        return mean_powers(snap_to_period(seen_s, shown_j.tolist(), [0.002] * len(seen_s)), self.intervals)

    def _spend(self, chance: random.Random, kind: str | None, duration_s: float) -> None:
        steps = round(duration_s / STEP_S)
        if not steps:
            return
        begin_s = STEP_S * len(self.powers_w)
        power_w = POWERS_W[kind] * (1 + chance.gauss(0, self.spread))
        inside = self.inside if kind in ("forward", "backward") else 0.0
        halves = steps // 2
        self.powers_w += [power_w * (1 + inside)] * halves + [power_w * (1 - inside)] * (steps - halves)
        if kind is not None:
            self.intervals.setdefault(kind, []).append((begin_s, begin_s + STEP_S * steps))

    def true_w(self, kind: str) -> float:
        """What a kind draws in the mean; of a low-pass filter, what it makes the counter show in the end."""
        if not self.spread:
            return POWERS_W[kind]
        steps = [slice(round(begin / STEP_S), round(end / STEP_S)) for begin, end in self.intervals[kind]]
        return float(np.mean(np.concatenate([self.powers_w[step] for step in steps])))


def outcome(counter: Counter, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Relative errors and standard errors of forward, backward and waiting."""
    found = []
    for seed in range(seeds):
        powers = counter.run(seed)
        for kind in ("forward", "backward", "wait"):
            true_w = counter.true_w(kind)
            found.append((powers[kind].power_w / true_w - 1, powers[kind].stderr_w / true_w))
    errors, stderrs = np.array(found).T
    return errors.reshape(-1, 3), stderrs.reshape(-1, 3)


@pytest.mark.parametrize(
    ("counter", "largest"),
    [
        (Counter(), 0.01),
        (Counter(window_s=0.025), 0.02),
        (Counter(window_s=0.057, inside=0.3), 0.03),
        (Counter(window_s=0.1, lag_s=0.03), 0.03),
        (Counter(tick_s=0.02, window_s=0.1), 0.02),
        (Counter(smoothing_s=0.01), 0.02),  # or power itself ramps up and down
        (Counter(smoothing_s=0.045), 0.03),
        (Counter(inside=0.3), 0.02),
        (Counter(inside=-0.3), 0.02),
        (Counter(period_s=0.1, jitter_s=0.1, inside=0.3), 0.05),
        (Counter(period_s=0.1, jitter_s=0.1, window_s=0.1), 0.1),
    ],
    ids=lambda value: str({k: v for k, v in vars(value).items() if v}) if isinstance(value, Counter) else "",
)
def test_powers_and_claims_hold_on_all_counters(counter: Counter, largest: float) -> None:
    errors, stderrs = outcome(counter, seeds=3)
    assert np.max(np.abs(errors)) < largest
    assert np.mean(np.abs(errors) < 2 * stderrs) > 0.83
    assert np.median(stderrs[:, :2]) < 0.02


@pytest.mark.parametrize(
    "counter", [Counter(spread=0.02), Counter(spread=0.02, window_s=0.04)], ids=["plain", "window"]
)
def test_they_hold_where_repeats_scatter(counter: Counter) -> None:
    errors, stderrs = outcome(counter, seeds=6)
    assert np.mean(np.abs(errors) < 2 * stderrs) > 0.87
    assert np.max(np.abs(errors[:, :2])) < 0.08


def test_an_iteration_that_is_a_multiple_of_the_tick_tells_nothing_and_says_so() -> None:
    """Which is what the pauses are for; see `Counter.jitter_s` above."""
    errors, stderrs = outcome(Counter(period_s=0.4), seeds=3)
    assert np.max(np.abs(errors)) > 0.1
    assert np.all(np.abs(errors) < 2 * stderrs)


@pytest.mark.parametrize("look", [Look(), Look(window_s=0.03), Look(smoothing_s=0.02)], ids=str)
def test_looks_are_what_steps_of_a_tenth_of_a_millisecond_say(look: Look) -> None:
    intervals = [(0.01, 0.025), (0.03, 0.09), (0.2, 0.21)]
    step_s = 1e-4
    rate = np.zeros(5000)
    for begin_s, end_s in intervals:
        rate[round(begin_s / step_s) : round(end_s / step_s)] = 1.0
    if look.window_s:
        steps = round(look.window_s / step_s)
        rate = np.convolve(rate, np.ones(steps) / steps)[: len(rate)]
    if look.smoothing_s:
        weights = np.exp(-(np.arange(5000) + 0.5) * step_s / look.smoothing_s) * step_s / look.smoothing_s
        rate = np.convolve(rate, weights)[: len(rate)]
    times_s = np.linspace(-0.02, 0.45, 60)
    expected_s = np.interp(times_s, step_s * np.arange(5001), np.concatenate([[0.0], np.cumsum(rate) * step_s]))
    assert Usage(intervals).seen_until(times_s, look) == pytest.approx(expected_s, abs=1e-4)
