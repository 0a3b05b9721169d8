import math
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pfo.core.errors import PfoError, ProfileError
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.planner import InstructionProfile, Profile, plan_frontier, read_profile

F, B = InstructionType.FORWARD, InstructionType.BACKWARD
GOOD = {
    "clocks_mhz": (1410, 1200),
    "times_s": (0.05, 0.06),
    "energies_j": (20.0, 17.0),
    "p2p_blocking_powers_w": (80.0, 70.0),
    "time_stderrs_s": (0.001, 0.001),
    "energy_stderrs_j": (0.1, 0.1),
}
BAD = [math.nan, math.inf, -math.inf, -1.0, 1e278, None, True, "1", b"1", [1.0], 1j]


@pytest.mark.parametrize("bad", BAD, ids=repr)
@pytest.mark.parametrize("column", [name for name in GOOD if "stderr" not in name])
def test_what_is_no_measurement_is_refused_in_every_column(column, bad):
    with pytest.raises(ProfileError, match=rf"Each of {column} must be .* number 1 is"):
        InstructionProfile(**{**GOOD, column: (GOOD[column][0], bad)})


@pytest.mark.parametrize("bad", [None, 5, "12", b"12", {1410: 1.0}, {1.0}, np.zeros((2, 2))])
@pytest.mark.parametrize("column", GOOD)
def test_what_is_no_list_of_numbers_is_refused(column, bad):
    with pytest.raises(ProfileError, match=column):
        InstructionProfile(**{**GOOD, column: bad})


def test_lists_and_arrays_are_measurements_too():
    lists = InstructionProfile(**{name: list(values) for name, values in GOOD.items()})
    arrays = InstructionProfile(**{name: np.array(values) for name, values in GOOD.items()})
    assert lists == arrays == InstructionProfile(**GOOD)
    assert hash(lists) == hash(arrays)


def test_errors_about_many_clocks_are_short():
    clocks = tuple(range(1, 50_001))
    for arguments in ((clocks, clocks, clocks), (clocks[::-1], clocks, clocks[:-1])):
        with pytest.raises(ProfileError) as error:
            InstructionProfile(*arguments)
        assert len(str(error.value)) < 1000
    with pytest.raises(ProfileError, match=r"7 MHz is not among .* \(49,000 in all\)") as error:
        InstructionProfile(clocks[:999:-1], clocks[:49_000], clocks[:49_000]).at(7)
    assert len(str(error.value)) < 2000


MEASURED = InstructionProfile(**GOOD)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({},), "at least one instruction"),
        ((None,), "at least one instruction"),
        (([MEASURED],), "at least one instruction"),
        (({(0, "forward"): MEASURED},), "maps stage and InstructionType"),
        (({(0, F): None},), "maps stage and InstructionType"),
        (({F: MEASURED},), "maps stage and InstructionType"),
        (({("0", F): MEASURED},), "maps stage and InstructionType"),
        (({(-1, F): MEASURED},), "maps stage and InstructionType"),
        (({(1, F): MEASURED},), "there is no stage 0"),
        (({(0, F): MEASURED}, 0), "gpus_per_stage is a whole number between 1 and"),
        (({(0, F): MEASURED}, True), "gpus_per_stage is a whole number between 1 and"),
        (({(0, F): MEASURED}, 1, "A100"), "gpus must be a list or tuple"),
        (({(0, F): MEASURED}, 1, [7]), "gpus are names"),
    ],
)
def test_what_is_no_profile_is_refused(arguments, message):
    with pytest.raises(ProfileError, match=message):
        Profile(*arguments)


ANYTHING = st.sampled_from([*BAD, 0, 2, 3.5, "1f1b", [], {}, (), object(), 10**400])
ARGUMENTS = ("num_microbatches", "schedule", "stages_per_rank", "num_plans", "deadlines_s", "p2p_blocking_power_w",
             "switch_latency_s", "least_dwell_s", "change_cost_j")  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(ARGUMENTS), value=ANYTHING)
def test_arguments_of_any_type_plan_or_are_refused(profile, name, value):
    arguments = {"num_microbatches": 2, "p2p_blocking_power_w": 70, "num_plans": 2, name: value}
    with suppress(PfoError):
        frontier = plan_frontier(profile, **arguments)
        assert all(math.isfinite(plan.iteration_energy_j) for plan in frontier.plans)


@pytest.mark.parametrize("number", [10**7, 1e7, "50"])
def test_plans_without_number_are_refused_at_once(profile, number):
    with pytest.raises(PfoError, match=r"num_plans must be at least 2 .* at most 10,000; got"):
        plan_frontier(profile, num_microbatches=2, num_plans=number)
    with pytest.raises(PfoError, match="deadlines_s are at most 10,000"):
        plan_frontier(profile, num_microbatches=2, deadlines_s=[1.0] * 20_000)


@pytest.mark.parametrize("source", [None, 7, b"p.csv", "nul\0byte", "x" * 10_000, "."], ids=repr)
def test_what_is_no_path_of_a_profile_is_refused(source):
    with pytest.raises(ProfileError) as error:
        read_profile(source)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("num_gpus", [1, 4])
@pytest.mark.parametrize("gpus", [(), ("A100 [ lab 3 ], emulated",)])
def test_a_table_of_a_profile_comes_back(profile, num_gpus, gpus):
    given = Profile(profile.instructions, num_gpus, gpus)
    table = given.to_frame()
    assert list(table)[:5] == ["stage", "instruction", "frequency", "time", "energy"]
    assert len(table) == num_gpus * sum(len(measured.clocks_mhz) for measured in profile.instructions.values())
    read = read_profile(table)
    assert (read.gpus_per_stage, read.gpus, set(read.instructions)) == (num_gpus, gpus, set(given.instructions))
    for key, measured in given.instructions.items():
        assert read.instructions[key].clocks_mhz == measured.clocks_mhz
        assert read.instructions[key].times_s == measured.times_s
        assert read.instructions[key].energies_j == pytest.approx(measured.energies_j, rel=1e-15)
        assert read.instructions[key].p2p_blocking_powers_w == pytest.approx(measured.p2p_blocking_powers_w, rel=1e-15)


def test_what_only_some_instructions_know_is_left_open_in_the_table():
    bare = InstructionProfile(*list(GOOD.values())[:3])
    table = Profile({(0, F): MEASURED, (0, B): bare}).to_frame()
    assert table["energy_stderr"].isna().tolist() == [False, False, True, True]
    assert read_profile(table) == Profile({(0, B): bare, (0, F): MEASURED})
    table.loc[1, "time"] = math.nan
    with pytest.raises(ProfileError, match="the table, line 3: column 'time' must be a positive number"):
        read_profile(table)
    assert isinstance(table, pd.DataFrame)


def test_pandas_is_loaded_for_tables_only(tmp_path, profile):
    profile.to_frame().to_csv(tmp_path / "profile.csv", index=False)
    code = (
        "import sys; from lightning_pfo.planner import read_profile, regularise; "
        f"regularise(read_profile({str(tmp_path / 'profile.csv')!r})); assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_clocks_under_a_power_cap_are_one_point_in_profiles_made_in_python_too():
    measured = {"times_s": (1.03, 0.98, 1.2), "energies_j": (10.2, 9.9, 9.0)}
    stderrs = {"time_stderrs_s": (0.03, 0.04, 0.01), "energy_stderrs_j": (0.3, 0.4, 0.1)}
    merged = InstructionProfile((1700, 1600, 1400), **measured, **stderrs, capped_mhz=[[1700, 1600]])
    assert merged.times_s == pytest.approx((1.005, 1.005, 1.2))
    assert merged.energies_j == pytest.approx((10.05, 10.05, 9.0))
    assert merged.time_stderrs_s == pytest.approx((0.025, 0.025, 0.01))
    assert merged.energy_stderrs_j == pytest.approx((0.25, 0.25, 0.1))
    assert replace(merged) == merged  # merging again changes nothing
    assert InstructionProfile((1700, 1600, 1400), **measured, capped_mhz=((1700, 1600),)).time_stderrs_s == ()
    with pytest.raises(ProfileError, match=r"groups of the measured clocks, such as \[\(1410, 1395\)\]; got .*1500"):
        InstructionProfile((1700, 1600, 1400), **measured, capped_mhz=((1700, 1500),))
