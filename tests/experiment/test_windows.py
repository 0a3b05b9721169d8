"""The windows of a training, and what is told of them."""

import random
from statistics import median

import pytest

from lightning_pfo.experiment.earlier import set_aside
from lightning_pfo.planner.adaptive.windows import Windows, change_percent, median_interval


def test_windows_take_turns_and_every_other_pair_begins_with_the_plan():
    windows = Windows(num_pairs=3, steps=2, warmup_steps=1)
    assert windows.num_steps == 12
    places = [windows.place_of(step) for step in range(12)]
    clocks = ["plan" if is_plan else "top" for _, is_plan in places[::2]]
    assert clocks == ["top", "plan", "plan", "top", "top", "plan"]
    assert [pair for pair, _ in places] == [0] * 4 + [1] * 4 + [2] * 4
    assert [step for step in range(12) if windows.is_measured(step)] == [1, 3, 5, 7, 9, 11]
    assert len({windows.group_of(step) for step in range(12)}) == 12


def test_a_steady_drift_favours_neither():
    windows = Windows(num_pairs=8, steps=2, warmup_steps=1)
    energies_j = [100 + step - 10 * windows.place_of(step)[1] for step in range(windows.num_steps)]
    measured = [step for step in range(windows.num_steps) if windows.is_measured(step)]
    of = {windows.place_of(step): energies_j[step] for step in measured}
    assert median(of[pair, True] - of[pair, False] for pair in range(8)) == -10


@pytest.mark.parametrize("count", [6, 8, 9, 12, 20])
def test_intervals_cover_the_median_whatever_the_distribution(count):
    draw = random.Random(count)
    made = [[draw.expovariate(1) for _ in range(count)] for _ in range(1500)]  # skewed; the median is log 2
    intervals = [median_interval(values) for values in made]
    covered = sum(low <= 0.693147 <= high for low, high in intervals) / len(made)
    assert 0.935 <= covered <= 1  # two standard errors below 95 %
    assert all(low in values and high in values for (low, high), values in zip(intervals, made, strict=True))
    if count >= 9:
        assert any(min(values) < low for (low, _), values in zip(intervals, made, strict=True))


def test_too_few_pairs_have_no_interval_and_alike_ones_no_width():
    assert [median_interval([1.0, 2.0, 3.0, 4.0, 5.0][:count]) for count in range(1, 6)] == [None] * 5
    assert median_interval([3.0, 1.0, 2.0, 4.0, 5.0, 6.0]) == (1.0, 6.0)
    assert median_interval([2.5] * 8) == (2.5, 2.5)
    assert change_percent(110, 100) == pytest.approx(10)


def test_earlier_results_are_kept(tmp_path):
    assert set_aside(tmp_path) is None
    for number in (1, 2):
        (tmp_path / "plans").mkdir()
        for name in ("report.json", "profile.csv", "script.log", "plans/frontier.json", "notes.txt"):
            (tmp_path / name).write_text(f"{name} of run {number}")
        assert set_aside(tmp_path) == tmp_path / "earlier" / str(number)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier", "notes.txt"]
    for number in (1, 2):
        kept = tmp_path / "earlier" / str(number)
        assert (kept / "plans" / "frontier.json").read_text() == f"plans/frontier.json of run {number}"


def test_an_earlier_profile_that_is_used_again_stays(tmp_path):
    profile = tmp_path / "profile.csv"
    profile.write_text("measured")
    assert set_aside(tmp_path, keep=str(profile)) is None
    (tmp_path / "report.json").write_text("{}")
    assert set_aside(tmp_path, keep=str(profile)) == tmp_path / "earlier" / "1"
    assert profile.read_text() == (tmp_path / "earlier" / "1" / "profile.csv").read_text() == "measured"
    assert set_aside(tmp_path, keep=str(profile)) is None
