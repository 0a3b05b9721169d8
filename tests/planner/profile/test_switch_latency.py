import pytest

from lightning_pfo.core.errors import ProfileError
from lightning_pfo.planner import read_profile, write_profile
from lightning_pfo.planner.profile.switch_latency import SwitchLatency, summarised


def row(clock, **more):
    return {"stage": 0, "frequency": clock, "time": 0.05 * 1400 / clock, "energy": 10.0, **more}


def profile_of(tmp_path, cells):
    rows = [
        row(clock, instruction=name, **({} if cell is None else {"switch_latency": cell}))
        for clock, cell in cells.items()
        for name in ("forward", "backward")
    ]
    write_profile(tmp_path / "profile.csv", rows)
    return read_profile(tmp_path / "profile.csv")


def test_pairs_are_told_apart_only_where_they_differ():
    assert summarised({}) is None
    near = {(1400, 1200): [0.0052, 0.0050], (1200, 1400): [0.0047, 0.0049]}
    assert summarised(near).pairs_s == ()
    assert summarised(near).of(800, 900) == pytest.approx(0.00495)
    once = {**near, (1400, 800): [0.03]}  # may have been the host
    assert summarised(once).pairs_s == ()
    found = summarised({**near, (800, 1400): [0.02, 0.022]})
    assert found.of(800, 1400) == pytest.approx(0.021)
    assert found.of(1400, 1200) == pytest.approx(0.0051)
    assert found.of(1000, 1100) == pytest.approx((0.021 + 0.0048) / 2)  # others that rise
    assert found.longest_s == found.of(800, 1400)


@pytest.mark.parametrize(
    "latency", [SwitchLatency(0.005), SwitchLatency(0.01, ((1400, 1200, 0.005), (1200, 1400, 0.015)))]
)
def test_a_profile_carries_it(tmp_path, latency):
    profile = profile_of(tmp_path, latency.cells([1400, 1200]))
    assert profile.switch_latency == latency
    assert read_profile(profile.to_frame()).switch_latency == latency


def test_profiles_without_it_and_with_empty_cells_are_read(tmp_path):
    assert profile_of(tmp_path, {1400: None, 1200: None}).switch_latency is None
    assert profile_of(tmp_path, {1400: None, 1200: 0.004}).switch_latency == SwitchLatency(0.004)


@pytest.mark.parametrize("cell", ["soon", "-1", "1400:", "x:0.1", "1400:1e9"])
def test_cells_that_say_nothing_are_named(tmp_path, cell):
    with pytest.raises(ProfileError, match="switch_latency"):
        profile_of(tmp_path, {1400: cell})
