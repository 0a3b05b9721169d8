"""Energy attributed to instructions, checked on synthetic traces whose true energies are known."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device.energy.attribution import MeanPower, mean_powers
from lightning_pfo.device.energy.trace import EnergyTrace
from lightning_pfo.device.energy.trace import snap_to_period as snapped_readings

FORWARD, BACKWARD, WAIT = "forward", "backward", "wait"


@dataclass
class World:
    """A GPU that executes intervals of known power; its counter ticks, and each tick is seen a little early or late.

    What the counter shows at a tick is what had been used `lag_s` before; or would have been, had the power of the last
    part `look` of each tick been that of all of it.
    """

    chance: random.Random
    tick_s: float = 0.1
    resolution_s: float = 0.002
    power_spread: float = 0.0
    drift_per_s: float = 0.0
    lag_s: float = 0.0
    look: float = 1.0
    edges_s: list[float] = field(default_factory=lambda: [0.0])
    energies_j: list[float] = field(default_factory=lambda: [0.0])
    intervals: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    used_j: dict[str, float] = field(default_factory=dict)

    def spend(self, kind: str | None, duration_s: float, power_w: float) -> None:
        begin_s = self.edges_s[-1]
        drift = 1 + self.drift_per_s * begin_s
        energy_j = duration_s * power_w * drift * (1 + self.chance.gauss(0, self.power_spread))
        self.edges_s.append(begin_s + duration_s)
        self.energies_j.append(self.energies_j[-1] + energy_j)
        if kind is not None:
            self.intervals.setdefault(kind, []).append((begin_s, begin_s + duration_s))
            self.used_j[kind] = self.used_j.get(kind, 0.0) + energy_j

    def true_power_w(self, kind: str) -> float:
        return self.used_j[kind] / sum(end - begin for begin, end in self.intervals[kind])

    def trace(self) -> EnergyTrace:
        ticks_s = np.arange(self.chance.random() * self.tick_s, self.edges_s[-1], self.tick_s)
        used_j = np.interp(ticks_s, self.edges_s, self.energies_j)
        if self.look < 1:
            before_j = np.interp(ticks_s - self.look * self.tick_s, self.edges_s, self.energies_j)
            used_j = np.cumsum(used_j - before_j) / self.look
        counter_mj = np.floor(1000 * used_j)
        seen_s = [tick_s + self.lag_s + self.chance.uniform(-1, 1) * self.resolution_s for tick_s in ticks_s]
        return EnergyTrace(seen_s, (counter_mj / 1000).tolist(), self.resolution_s)


def snap_to_period(trace: EnergyTrace) -> EnergyTrace:
    return snapped_readings(trace.times_s, trace.energies_j, [trace.resolution_s] * len(trace.times_s))


def pipeline(seed: int, repeats: int = 50, instruction_s: float = 0.02, **options: float) -> World:
    """Forward, backward and waiting in between, as one rank of a pipeline sees them."""
    chance = random.Random(seed)
    world = World(chance, **options)
    for number in range(repeats):
        for kind, power_w in ((FORWARD, 300.0), (BACKWARD, 250.0)):
            world.spend(WAIT, chance.uniform(0, 0.03), 80.0)
            world.spend(kind, instruction_s * (1 + chance.gauss(0, 0.02)), power_w)
        if number % 12 == 11:
            world.spend(None, chance.uniform(0.005, 0.02), 60.0)  # the optimizer's step, which belongs to nobody
    return world


def powers_of(world: World) -> dict[str, MeanPower]:
    return mean_powers(snap_to_period(world.trace()), world.intervals)


def errors(world: World) -> dict[str, float]:
    powers = powers_of(world)
    return {kind: powers[kind].power_w / world.true_power_w(kind) - 1 for kind in world.intervals}


@dataclass(frozen=True)
class Outcome:
    """Errors and standard errors of forward and backward in many traces, relative to the true powers."""

    errors: np.ndarray  # traces x 2
    stderrs: np.ndarray

    @property
    def rms(self) -> float:
        return float(np.sqrt(np.mean(self.errors**2)))

    @property
    def share_covered(self) -> float:
        return float(np.mean(np.abs(self.errors) < 2 * self.stderrs))


def outcome_of(worlds: Iterable[World]) -> Outcome:
    found = []
    for world in worlds:
        powers = powers_of(world)
        for kind in (FORWARD, BACKWARD):
            true_w = world.true_power_w(kind)
            found.append((powers[kind].power_w / true_w - 1, powers[kind].stderr_w / true_w))
    errors, stderrs = np.array(found).reshape(-1, 2, 2).transpose(2, 0, 1)
    return Outcome(errors, stderrs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"drift_per_s": 0.02},  # a GPU that warms up: all its powers rise together
        {"lag_s": 0.003},
        {"lag_s": 0.13, "drift_per_s": 0.02},
    ],
    ids=str,
)
def test_20_ms_instructions_with_a_100_ms_counter_are_within_2_percent_after_50_repeats(
    options: dict[str, float],
) -> None:
    found = outcome_of(pipeline(seed, **options) for seed in range(10))  # type: ignore[arg-type]
    assert np.max(np.abs(found.errors)) < 0.02
    assert found.rms < 0.0045
    assert found.share_covered >= 0.9


@pytest.mark.parametrize("options", [{"look": 0.5}, {"look": 0.25, "lag_s": 0.03}], ids=str)
def test_a_counter_may_look_at_a_part_of_the_time(options: dict[str, float]) -> None:
    """At a quarter if it sums up the power readings of an A100 or H100."""
    found = outcome_of(pipeline(seed, **options) for seed in range(6))  # type: ignore[arg-type]
    assert np.max(np.abs(found.errors)) < 0.02
    assert found.share_covered > 0.8


def test_missed_ticks_of_a_counter_that_looks_at_a_part_of_the_time() -> None:
    world = pipeline(0, look=0.25)
    trace = world.trace()
    seen = [i for i in range(len(trace.times_s)) if i % 7]
    missed = EnergyTrace([trace.times_s[i] for i in seen], [trace.energies_j[i] for i in seen], trace.resolution_s)
    powers = mean_powers(snap_to_period(missed), world.intervals)
    assert powers[FORWARD].power_w == pytest.approx(300, rel=0.02)
    assert powers[BACKWARD].power_w == pytest.approx(250, rel=0.02)


def test_what_a_lagging_counter_shows_of_the_time_before_is_left_out() -> None:
    for seed in range(4):
        world = pipeline(seed, repeats=70, lag_s=0.12)
        trace = snap_to_period(world.trace())
        from_s = world.intervals[FORWARD][20][0]
        readings = [pair for pair in zip(trace.times_s, trace.energies_j, strict=True) if pair[0] >= from_s]
        times_s, energies_j = zip(*readings, strict=True)
        intervals = {
            kind: [interval for interval in known if interval[0] >= from_s] for kind, known in world.intervals.items()
        }
        powers = mean_powers(EnergyTrace(times_s, energies_j, trace.resolution_s), intervals)
        assert powers[FORWARD].power_w == pytest.approx(300, rel=0.02)
        assert powers[BACKWARD].power_w == pytest.approx(250, rel=0.02)


def least_stderr(world: World, kind: str) -> float:
    """Cramer-Rao bound: of any unbiased estimate of a mean power from these ticks, relative.

    Independent of the method under test: generalised least squares that is told everything but the mean powers, even
    the covariance of the ticks.
    """
    edges_s = np.array(world.edges_s)
    begins_s = {k: [begin_s for begin_s, _ in intervals] for k, intervals in world.intervals.items()}
    kinds = [next((k for k, begins in begins_s.items() if begin_s in begins), None) for begin_s in world.edges_s[:-1]]
    powers_w = np.diff(world.energies_j) / np.diff(edges_s)
    ticks_s = np.array(snap_to_period(world.trace()).times_s)
    within_s = np.minimum(ticks_s[1:, None], edges_s[None, 1:]) - np.maximum(ticks_s[:-1, None], edges_s[None, :-1])
    within_s = np.clip(within_s, 0, None)  # ticks x intervals
    names = (FORWARD, BACKWARD, WAIT, None)
    mixture_s = np.stack([within_s[:, [k == name for k in kinds]].sum(axis=1) for name in names], axis=1)
    covariance = (within_s * (world.power_spread * powers_w) ** 2) @ within_s.T
    bound = np.linalg.inv(mixture_s.T @ np.linalg.solve(covariance, mixture_s))
    index = names.index(kind)
    return float(np.sqrt(bound[index, index])) / world.true_power_w(kind)


@pytest.mark.parametrize("power_spread", [0.01, 0.02])
def test_where_repeats_scatter_no_unbiased_estimate_could_be_much_better(power_spread: float) -> None:
    worlds = [pipeline(seed, power_spread=power_spread) for seed in range(14)]
    bounds = [least_stderr(world, kind) for world in worlds for kind in (FORWARD, BACKWARD)]
    bound = float(np.sqrt(np.mean(np.square(bounds))))
    assert bound == pytest.approx(0.57 * power_spread, rel=0.05)
    found = outcome_of(worlds)
    assert found.rms < 1.15 * bound
    assert found.share_covered > 0.9


@pytest.mark.parametrize("power_spread", [0.01, 0.02])
def test_measured_until_the_standard_error_allows_it_errors_are_within_2_percent(power_spread: float) -> None:
    """More repeats as `FrequencyScan` takes them: until two standard errors are below 2 %."""

    def long_enough(seed: int) -> World:
        repeats = 50
        while max(outcome_of([world := pipeline(seed, repeats, power_spread=power_spread)]).stderrs[0]) > 0.01:
            repeats += 50
        assert repeats <= 250
        return world

    found = outcome_of(long_enough(seed) for seed in range(7))
    assert np.mean(np.abs(found.errors) < 0.02) >= 0.95


def test_interpolation_within_ticks_would_not_do() -> None:
    """What the method is for: dividing each tick's energy by time misses by tens of per cent."""
    world = pipeline(1)
    trace = world.trace()
    used_j = sum(
        np.interp(end, trace.times_s, trace.energies_j) - np.interp(begin, trace.times_s, trace.energies_j)
        for begin, end in world.intervals[WAIT]
    )
    interpolated_w = used_j / sum(end - begin for begin, end in world.intervals[WAIT])
    assert interpolated_w > 1.5 * world.true_power_w(WAIT)
    assert abs(errors(world)[WAIT]) < 0.05


@pytest.mark.parametrize(
    ("repeats", "options"),
    [
        (50, {"power_spread": 0.05}),  # each repeat draws another power
        (4, {"power_spread": 0.02}),  # two ticks or three: nothing can be told, and that is said
        (8, {"power_spread": 0.02, "lag_s": 0.02}),
        (12, {"power_spread": 0.02, "lag_s": 0.1}),
    ],
)
def test_standard_errors_are_honest(repeats: int, options: dict[str, float]) -> None:
    found = outcome_of(pipeline(seed, repeats, **options) for seed in range(12))  # type: ignore[arg-type]
    assert found.share_covered > 0.9
    assert abs(np.mean(found.errors / found.stderrs)) < 0.5 or repeats < 20  # the prior is not about these powers


@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    tick_s=st.sampled_from([0.02, 0.05, 0.1]),
    instruction_s=st.floats(0.005, 0.2),
)
def test_errors_stay_small_for_other_durations(seed: int, tick_s: float, instruction_s: float) -> None:
    repeats = int(3 / (2 * instruction_s + 0.03)) + 20
    world = pipeline(seed, repeats, instruction_s, tick_s=tick_s)
    shortest_s = min(instruction_s, tick_s)
    for kind in (FORWARD, BACKWARD):
        assert abs(errors(world)[kind]) < 0.02 + 0.0004 / shortest_s


def test_mixtures_that_are_all_alike_fall_back_to_interpolation() -> None:
    world = World(random.Random(0), resolution_s=0.001)
    for _ in range(50):
        world.spend(FORWARD, 0.05, 300.0)
        world.spend(BACKWARD, 0.05, 200.0)  # a period is a tick: nobody can tell
    powers = mean_powers(
        EnergyTrace([0.1 * i for i in range(51)], [25.0 * i for i in range(51)], 0.001), world.intervals
    )
    assert powers[FORWARD].power_w == pytest.approx(250)
    assert powers[BACKWARD].power_w == pytest.approx(250)
    assert powers[FORWARD].stderr_w > 50


def test_a_perfect_counter_gives_exact_powers() -> None:
    world = pipeline(3, repeats=20)
    exact = EnergyTrace(world.edges_s, world.energies_j, 1e-9)
    for kind, power in mean_powers(exact, world.intervals).items():
        assert power.power_w == pytest.approx(world.true_power_w(kind), rel=5e-4)
        assert power.stderr_w < 5e-4 * power.power_w


def test_kinds_outside_of_the_trace_and_empty_traces() -> None:
    trace = EnergyTrace([0.0, 1.0, 2.0], [0.0, 100.0, 200.0], 0.001)
    assert set(mean_powers(trace, {"inside": [(0.5, 1.0)], "outside": [(5.0, 6.0)], "empty": []})) == {"inside"}
    assert mean_powers(EnergyTrace([], [], 0.001), {"a": [(0.0, 1.0)]}) == {}
    assert mean_powers(EnergyTrace([1.0], [1.0], 0.001), {"a": [(0.0, 1.0)]}) == {}


def test_snapping_finds_a_period_even_if_ticks_were_missed() -> None:
    chance = random.Random(5)
    counts = [count for count in range(60) if count % 7]
    times_s = [10 + 0.1 * count + chance.uniform(-0.002, 0.002) for count in counts]
    snapped = snap_to_period(EnergyTrace(times_s, counts, 0.002))
    assert snapped.times_s == pytest.approx([10 + 0.1 * count for count in counts], abs=0.001)
    assert snapped.resolution_s < 0.001


@pytest.mark.parametrize("times_s", [[0.0, 0.1, 0.17, 0.3, 0.41], [0.0, 0.1, 0.2], [0.0, 0.1, 0.1001, 0.2, 0.3]])
def test_irregular_or_short_traces_are_not_snapped(times_s: list[float]) -> None:
    trace = EnergyTrace(times_s, list(range(len(times_s))), 0.002)
    assert snap_to_period(trace) == trace


def test_ticks_that_were_seen_late_are_known_from_their_neighbours() -> None:
    chance = random.Random(2)
    seen = []
    for count in range(40):
        late_s = 0.02 if count % 3 == 0 else 0.002  # the driver was busy
        seen.append((0.1 * count + chance.uniform(-1, 1) * late_s, float(count), late_s))
    times_s, energies_j, resolutions_s = zip(*seen, strict=True)
    trace = snapped_readings(times_s, energies_j, resolutions_s)
    assert trace.times_s == pytest.approx([0.1 * count for count in range(40)], abs=0.001)
    assert trace.resolution_s < 0.0005


def test_a_counter_that_stands_still_is_told_of_once_it_would_have_moved() -> None:
    def of(span_s: float) -> dict[str, MeanPower]:
        times_s = np.linspace(0.0, span_s, 40).tolist()
        return mean_powers(EnergyTrace(times_s, [7.0] * 40, 0.002), {FORWARD: [(0.0, span_s)]})

    assert of(0.5) == {}
    with pytest.raises(DeviceError, match=r"got 0 J in \d.* s\. Its counter stands still, or its power reads 0 W"):
        of(3.0)
