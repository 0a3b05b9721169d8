import json
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_pfo.core.errors import ConfigurationError, ProfileError
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner.profile.blocking_power import BlockingPower, read_blocking_power, resolve_blocking


def test_power_between_and_beyond_measured_clocks():
    power = BlockingPower((1400, 1000, 800), (90.0, 70.0, 71.0))
    assert [power.at(clock) for clock in (2000, 1400, 1200, 1000, 900, 800, 100)] == [90, 90, 80, 70, 70.5, 71, 71]
    assert (power.least_w, power.least_clock_mhz) == (70, 1000)
    flat = BlockingPower((), (85.0,))
    assert (flat.at(5), flat.least_w, flat.least_clock_mhz) == (85, 85, None)


def test_all_forms_of_the_option(profile, tmp_path):
    schedule = make_schedule("1f1b", 4, 4)

    def powers(given, clock):
        return [power.at(clock) for power in resolve_blocking(profile, schedule, given)]

    assert powers(85, 900) == [85] * 4
    assert powers([60, 70, 80, 90], 900) == [60, 70, 80, 90]
    assert powers({1400: 90, 800: 60}, 1100) == [75] * 4
    assert powers([60, {1400: 90, 800: 60}, 70, 70], 1100) == [60, 75, 70, 70]
    assert powers(None, 1100) == [70] * 4
    path = tmp_path / "power.json"
    path.write_text(json.dumps({"gpu": "g", "blocked": [{"clock_mhz": 1400, "power_w": 90.0}]}))
    assert powers(path, 800) == [90] * 4


def test_stages_of_one_rank_share_its_gpus(profile):
    schedule = make_schedule("interleaved_1f1b", 2, 4, 2)
    powers = resolve_blocking(profile, schedule, [{1400: 90, 800: 60}, 50, {1400: 100, 1100: 70}, 70])
    assert [power.at(1400) for power in powers] == [95, 60]
    assert powers[0].at(1100) == (75 + 70) / 2
    assert powers[1].clocks_mhz == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (-1, "finite power in watts"),
        (float("nan"), "finite power in watts"),
        ({}, "one for each clock such as"),
        ({"low": 5}, "one for each clock such as"),
        ({-5: 5}, "one for each clock such as"),
        ({0: 5}, "one for each clock such as"),
        ({1410.5: 5}, "one for each clock such as"),
        ({1410: "5"}, "one for each clock such as"),
        ({True: 5}, "one for each clock such as"),
        (True, "finite power in watts"),
        (b"UUUU", "finite power in watts"),
        (bytearray(b"UUUU"), "finite power in watts"),
        ([85, 85, 85, True], "finite power in watts"),
        (1e278, r"at least 0 \(0 to 1e\+09 W\)"),
        ("nan", "finite power in watts, .* got nan"),
        ("nul\0byte", "neither a number nor a file"),
        ([85, 85], "got 2 for 4 stages"),
        ("nowhere.json", "lightning-pfo p2p-power json=true > nowhere.json"),
    ],
)
def test_what_is_no_power_is_an_error(profile, given, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve_blocking(profile, make_schedule("1f1b", 4, 4), given)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"blocked": 5}', '{"blocked": [{"clock_mhz": "x", "power_w": 1}]}'])
def test_a_file_without_powers_is_an_error(profile, tmp_path, text):
    (tmp_path / "power.json").write_text(text)
    with pytest.raises((ConfigurationError, ProfileError), match=r"power\.json"):
        resolve_blocking(profile, make_schedule("1f1b", 4, 4), tmp_path / "power.json")


def power_text(*rows):
    """A power file; rows are JSON texts of clock and power."""
    return '{"blocked": [' + ", ".join(f'{{"clock_mhz": {clock}, "power_w": {power}}}' for clock, power in rows) + "]}"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(1410, 85), (1410, 80)], "more than one at 1410 MHz"),
        ([(0, 85)], "got 0: 85"),
        ([(1410.0, 85)], "got 1410.0: 85"),
        ([(1410, "true")], "got 1410: True"),
        ([("true", 85)], "got True: 85"),
        ([(1410, "NaN")], "got 1410: nan"),
        ([(1410, "1e999")], "got 1410: inf"),
        ([(1410, '"85"')], "got 1410: '85'"),
        ([(1410, "null")], "got 1410: None"),
        ([], "got none"),
    ],
)
def test_files_are_read_strictly(tmp_path, rows, message):
    path = tmp_path / "power.json"
    path.write_text(power_text(*rows))
    with pytest.raises(ConfigurationError, match=message) as error:
        read_blocking_power(path)
    assert "power.json" in str(error.value)


def test_a_byte_order_mark_is_read_over(tmp_path):
    (tmp_path / "power.json").write_text("\ufeff" + power_text((1410, 85)), encoding="utf-8")
    assert read_blocking_power(tmp_path / "power.json") == {1410: 85.0}


@example(b'{"blocked":' + b"[" * 100_000)
@example(b"[" * 100_000)
@settings(deadline=None)
@given(st.one_of(st.binary(), st.text('{}[]":blocked_mhzpwr0123456789.,eE-+ ', max_size=120).map(str.encode)))
def test_any_file_is_powers_or_a_clear_error(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "power.json"
        path.write_bytes(content)
        with suppress(ConfigurationError):
            assert all(power >= 0 for power in read_blocking_power(path).values())
