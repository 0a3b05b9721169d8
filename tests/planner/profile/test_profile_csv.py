import math
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pfo.core.errors import ProfileError
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.planner import InstructionProfile, Profile, plan_frontier, read_profile, write_profile
from lightning_pfo.planner.profile.denoise import regularise

F, B = InstructionType.FORWARD, InstructionType.BACKWARD
HEADER = "stage,instruction,frequency,time,energy"
GOOD = ["0,forward,1410,0.05,20", "0,forward,1200,0.06,17", "0,backward,1410,0.1,40", "0,backward,1200,0.12,34"]


def write(tmp_path, lines, header=HEADER):
    path = tmp_path / "profile.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def test_reads_the_contract_columns(tmp_path):
    profile = read_profile(write(tmp_path, GOOD))
    assert profile.num_stages == 1
    forward = profile.of(0, F)
    assert (forward.clocks_mhz, forward.times_s, forward.energies_j) == ((1410, 1200), (0.05, 0.06), (20.0, 17.0))
    assert profile.top_clock_mhz(0) == 1410
    assert profile.p2p_blocking_powers_w(0) == {}


def test_clocks_are_sorted_from_the_top_whatever_the_order_of_rows(tmp_path):
    assert read_profile(write(tmp_path, GOOD[::-1])) == read_profile(write(tmp_path, GOOD))


def test_further_columns_blank_lines_spaces_and_load_rows_are_allowed(tmp_path):
    lines = [f"{line},7,ok" for line in GOOD] + ["", "0,load,0,0.01,1,7,ok"]
    spaced = write(tmp_path, [line.replace(",", " , ") for line in lines], HEADER + ", samples ,flags")
    assert read_profile(spaced) == read_profile(write(tmp_path, GOOD))


@pytest.mark.parametrize(
    ("time", "energy", "said"),
    [
        (0.05, 20.0, ""),
        (59.0, 59.0, ""),
        (1.0, 0.0, ""),
        (0.05, 2000.0, ""),  # of many GPUs
        (80.0, 24_000.0, "2 of its 4 rows have more than 60 s or a power that no GPU has, such as line 2: 80 s, "),
        (80.0, 24.0, "such as line 2: 80 s, 24 J, 0.3 W"),
        (5.0, 1.5, "such as line 2: 5 s, 1.5 J, 0.3 W"),
        (0.05, 15_000.0, "such as line 2: 0.05 s, 15000 J, 300000 W"),
    ],
)
def test_milliseconds_and_millijoules_are_noticed(tmp_path, caplog, time, energy, said):
    path = tmp_path / "profile.csv"
    rows = [f"0,{kind},{clock},{time},{energy}" for clock in (1400, 1200) for kind in ("forward", "backward")]
    rows[1::2] = [row.replace(f",{time},{energy}", ",0.1,30") for row in rows[1::2]]
    path.write_text("\n".join(["stage,instruction,frequency,time,energy", *rows]))
    read_profile(path)
    assert len(caplog.records) == bool(said)
    if said:
        assert said in caplog.text
        assert f"{path} are in seconds, energies in joules; " in caplog.text
        assert "Divide milliseconds and millijoules by 1000." in caplog.text


def test_energies_that_the_profile_doubts_are_told_of(tmp_path, caplog):
    flagged = [
        f"{line},{flags}" for line, flags in zip(GOOD, ("energy_uncertain drift", "", "power_cap", ""), strict=True)
    ]
    read_profile(write(tmp_path, flagged, f"{HEADER},flags"))
    (record,) = caplog.records
    assert "1 of the 4 rows" in record.getMessage()
    assert "flagged drift, energy_uncertain (line 2)" in record.getMessage()


def test_the_names_of_the_gpus_are_known_each_once(tmp_path):
    lines = [f"{line},A100 (emulated)" for line in GOOD] + [f"1{line[1:]}," for line in GOOD]
    assert read_profile(write(tmp_path, lines, HEADER + ",gpu")).device == "A100 (emulated)"
    assert read_profile(write(tmp_path, GOOD)).device == ""


def test_blocking_power_is_the_mean_over_the_instructions_at_each_clock(tmp_path):
    lines = [f"{line},{60 if '1410' in line else 50 if 'forward' in line else 52}" for line in GOOD]
    profile = read_profile(write(tmp_path, lines, HEADER + ",p2p_blocking_power_w"))
    assert profile.p2p_blocking_powers_w(0) == {1410: 60, 1200: 51}
    assert plan_frontier(profile, num_microbatches=2, num_plans=2).p2p_blocking_powers_w == (60,)


def test_between_measured_clocks_an_instruction_lies_on_the_line(tmp_path):
    forward = read_profile(write(tmp_path, GOOD)).of(0, F)
    assert forward.near(1410) == (0.05, 20)
    assert forward.near(1305) == pytest.approx((0.055, 18.5))
    assert forward.near(2000) == (0.05, 20)
    assert forward.near(100) == (0.06, 17)


def test_ranks_of_a_stage_are_merged_to_the_slowest_time_and_the_sum_of_energies(tmp_path):
    lines = []
    for rank, factor in ((0, 1.0), (1, 1.5)):
        for line in GOOD:
            stage, kind, clock, time, energy = line.split(",")
            lines.append(f"{rank},{stage},{kind},{clock},{float(time) * factor},{float(energy) / factor}")
    profile = read_profile(write(tmp_path, lines, "tp_rank," + HEADER))
    assert profile.gpus_per_stage == 2
    assert profile.of(0, F).times_s == pytest.approx((0.075, 0.09))
    assert profile.of(0, F).energies_j == pytest.approx((20 + 20 / 1.5, 17 + 17 / 1.5))


def test_the_time_of_a_transfer_is_the_median_over_the_clocks_where_it_is_known(tmp_path):
    times = {"0,forward": ["0.004", "", "0.002", "0.009"], "0,backward": ["", "", "", ""]}
    lines = [
        f"{kind},{clock},0.05,20,{time}"
        for kind, of_kind in times.items()
        for clock, time in zip((1410, 1300, 1200, 1100), of_kind, strict=True)
    ]
    profile = read_profile(write(tmp_path, lines, HEADER + ",transfer_time"))
    assert profile.of(0, F).transfer_s == profile.transfer_s(0, F) == 0.004
    assert profile.of(0, B).transfer_s is None
    assert profile.transfer_s(0, B) == 0.0
    assert read_profile(write(tmp_path, GOOD)).transfer_s(0, F) == 0.0
    with pytest.raises(ProfileError, match="forward on stage 1"):
        profile.transfer_s(1, F)


def test_a_stage_hands_over_as_late_as_its_latest_rank(tmp_path):
    # 1410 MHz: 3 and 5 ms; 1200 MHz: 4 ms and not known.
    lines = [
        f"{rank},{line},{time}"
        for rank, known in ((0, ("0.003", "0.004")), (1, ("0.005", "")))
        for line, time in zip(GOOD, known * 2, strict=True)
    ]
    profile = read_profile(write(tmp_path, lines, "dp_rank," + HEADER + ",transfer_time"))
    assert profile.transfer_s(0, F) == pytest.approx(0.0045)


def test_times_of_transfers_come_back_from_tables_and_files(tmp_path):
    forward = InstructionProfile((1410, 1200), (0.05, 0.06), (20.0, 17.0), transfer_s=0.004)
    for num_gpus in (1, 4):
        profile = Profile({(0, F): forward, (0, B): replace(forward, transfer_s=None)}, num_gpus)
        table = profile.to_frame()
        assert table["transfer_time"].notna().sum() == 2 * num_gpus
        assert read_profile(table) == profile
        write_profile(tmp_path / "profile.csv", table.to_dict("records"))
        assert ",nan" not in (tmp_path / "profile.csv").read_text()
        assert read_profile(tmp_path / "profile.csv") == profile
    assert "transfer_time" not in read_profile(write(tmp_path, GOOD)).to_frame()


@pytest.mark.parametrize("text", ["-0.001", "nan", "inf", "soon", "2e6", "0_1"])
def test_times_of_transfers_that_cannot_be_are_errors(tmp_path, text):
    lines = [f"{line},0.001" for line in GOOD[1:]] + [f"{GOOD[0]},{text}"]
    rule = r"line 5: column 'transfer_time' must be a number of seconds, at least 0 \(0 to 1e\+06 s\), got '"
    with pytest.raises(ProfileError, match=rule + text):
        read_profile(write(tmp_path, lines, HEADER + ",transfer_time"))


@pytest.mark.parametrize("value", [-0.001, float("nan"), float("inf"), "1", True])
def test_a_profile_refuses_them_too(value):
    with pytest.raises(ProfileError, match="transfer_s must be a number of seconds, at least 0"):
        InstructionProfile((1410,), (0.05,), (20.0,), transfer_s=value)


def test_clocks_not_measured_on_all_ranks_are_dropped(tmp_path):
    lines = [f"{rank},{line}" for rank in (0, 1) for line in GOOD if not (rank == 1 and "forward,1410" in line)]
    profile = read_profile(write(tmp_path, lines, "rank," + HEADER))
    assert profile.of(0, F).clocks_mhz == (1200,)
    assert profile.top_clock_mhz(0) == 1200


def test_a_stage_without_a_clock_for_all_its_instructions_is_an_error(tmp_path):
    lines = ["0,forward,1410,0.05,20", "0,backward,1200,0.1,40"]
    path = write(tmp_path, lines, HEADER)
    with pytest.raises(ProfileError, match="backward at 1200 to 1200 MHz, forward at 1410 to 1410 MHz, none"):
        plan_frontier(path, num_microbatches=2, p2p_blocking_power_w=50)


@pytest.mark.parametrize(
    ("lines", "header", "message"),
    [
        ([], HEADER, "no measurements"),
        (GOOD, "stage,instruction,power limit,time,energy", r"lacks frequency .* so profile over clocks\."),
        (GOOD, HEADER.replace(",", ";"), r"separated by commas, here by semicolons: save it with commas\."),
        (GOOD, HEADER.replace(",", "\t"), r"separated by commas, here by tabs: save it with commas\."),
        ([HEADER, *GOOD], "# by me", r"first line is the header: delete the comment above it\."),
        (GOOD[1:], GOOD[0], r"The first line is the header: write the columns' names above the measurements \(stage,"),
        (GOOD, HEADER.replace("time", "time (s)"), r"\(they are MHz, s and J\): write time, not time \(s\)\."),
        (GOOD, HEADER.replace("stage", "Stage"), r"in lower case: write stage, not Stage\."),
        ([*GOOD[1:], "0,F,1410,0.05,20"], HEADER, "Unknown instruction name 'F'"),
        ([*GOOD[1:], "0,forward,1410,nan,20"], HEADER, "column 'time' must be a positive number"),
        ([*GOOD[1:], "0,forward,1410,-0.05,20"], HEADER, "got '-0.05'"),
        ([*GOOD[1:], "0,forward,1410,0,20"], HEADER, "column 'time'"),
        ([*GOOD[1:], "0,forward,1410,inf,20"], HEADER, "column 'time'"),
        ([*GOOD[1:], "0,forward,1410,0.05,-1"], HEADER, "column 'energy'"),
        ([*GOOD[1:], "0,forward,1410.5,0.05,20"], HEADER, "whole MHz"),
        ([*GOOD[1:], "x,forward,1410,0.05,20"], HEADER, "column 'stage'"),
        ([*GOOD[1:], "0,sideways,1410,0.05,20"], HEADER, "Unknown instruction name 'sideways'"),
        ([*GOOD[1:], "0,forward,1410,0.05"], HEADER, "expected 5 cells"),
        ([*GOOD, GOOD[0]], HEADER, "line 6 repeats line 2"),
        ([line for line in GOOD if "backward" not in line], HEADER, "stage 0 has only forward"),
        ([line.replace("0,", "1,", 1) for line in GOOD], HEADER, "no row of stage 0"),
        ([f"{line},0.1" for line in GOOD], HEADER + ",time", "more than one time"),
    ],
)
def test_bad_files_are_errors_that_name_the_place(tmp_path, lines, header, message):
    with pytest.raises(ProfileError, match=message):
        read_profile(write(tmp_path, lines, header))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "0,forward,1e303,0.05,20",
            r"column 'frequency' must be a clock in whole MHz \(1 to 100,000 MHz\), got '1e303'",
        ),
        ("0,forward,1410,1e278,20", r"column 'time' must be .* \(1e-09 to 1e\+06 s\), got '1e278'"),
        ("0,forward,1410,0.05,1e278", r"column 'energy' must be .* \(0 to 1e\+09 J\)"),
        ("0,forward,1410,0.0_5,20", "column 'time'"),
        ("0,forward," + "9" * 5000 + ",0.05,20", "column 'frequency'"),
        ("9" * 5000 + ",forward,1410,0.05,20", "column 'stage'"),
        ("0," + "forward" * 10_000 + ",1410,0.05,20", "Unknown instruction name 'forward"),
    ],
)
def test_numbers_far_from_any_machine_are_errors_with_the_range(tmp_path, line, message):
    with pytest.raises(ProfileError, match=message) as error:
        read_profile(write(tmp_path, [*GOOD[1:], line]))
    assert len(str(error.value)) < 1000


def test_the_line_in_which_excel_says_how_cells_are_separated_is_no_header(tmp_path):
    assert read_profile(write(tmp_path, [HEADER, *GOOD], "sep=,")) == read_profile(write(tmp_path, GOOD))


def test_a_hundred_thousand_columns_are_read_at_once(tmp_path):
    further = ",".join(f"column {number}" for number in range(100_000))
    path = write(tmp_path, [line + "," * 100_000 for line in GOOD], f"{HEADER},{further}")
    assert read_profile(path) == read_profile(write(tmp_path, GOOD))
    path.write_text(further + "\n")
    with pytest.raises(ProfileError, match=r"it has: column 0, .* \(100,000 in all\)") as error:
        read_profile(path)
    assert len(str(error.value)) < 1000


def test_an_empty_file_lacks_columns(tmp_path):
    path = tmp_path / "profile.csv"
    path.write_text("")
    with pytest.raises(ProfileError, match="nothing at all"):
        read_profile(path)


def test_a_missing_file_and_a_binary_file_are_profile_errors(tmp_path):
    with pytest.raises(ProfileError, match="no profile at"):
        read_profile(tmp_path / "nowhere.csv")
    binary = tmp_path / "profile.csv"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ProfileError, match=r"cannot be read .*\. Save it as UTF-8\."):
        read_profile(binary)


def test_unequal_numbers_of_ranks_are_an_error(tmp_path):
    second = [line.replace("0,", "1,", 1) for line in GOOD]
    lines = [f"0,{line}" for line in GOOD + second] + [f"1,{line}" for line in GOOD]
    with pytest.raises(ProfileError, match="same number of ranks"):
        read_profile(write(tmp_path, lines, "tp_rank," + HEADER))


def test_written_rows_come_back(tmp_path):
    rows = [
        {"instruction": kind, "stage": 0, "frequency": mhz, "time": 0.1 / mhz, "energy": 3.0, "samples": 5}
        for kind in (F, B)
        for mhz in (1410, 1200)
    ]
    path = tmp_path / "new" / "profile.csv"
    write_profile(path, rows)
    assert path.read_text().splitlines()[0] == HEADER + ",samples"
    assert read_profile(path).of(0, B).times_s == (0.1 / 1410, 0.1 / 1200)


def test_a_row_without_a_contract_column_leaves_the_old_file_alone(tmp_path):
    path = write(tmp_path, GOOD)
    before = path.read_text()
    with pytest.raises(ProfileError, match="lacks time, energy"):
        write_profile(path, [{"stage": 0, "instruction": "forward", "frequency": 1}])
    with pytest.raises(ProfileError, match="at least one row"):
        write_profile(path, [])
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_damage_is_a_clear_error_or_a_profile(data):
    text = "\n".join([HEADER, *GOOD]).encode()
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(start + 20, len(text))))
    text = (
        text[:start] + data.draw(st.binary(max_size=6) | st.sampled_from([b"nan", b"1e999", b",,", b'"'])) + text[stop:]
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.csv"
        path.write_bytes(text)
        with suppress(ProfileError):
            assert read_profile(path).num_stages >= 1


@settings(deadline=None, max_examples=150)
@given(st.one_of(st.binary(max_size=200), st.text('0123456789,.\n"-eforwadbck _\0', max_size=200).map(str.encode)))
def test_any_rows_are_a_clear_error_or_a_profile(rows):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.csv"
        path.write_bytes(f"{HEADER}\n".encode() + rows)
        with suppress(ProfileError):
            assert read_profile(path).num_stages >= 1


CELLS = st.fixed_dictionaries({
    "time": st.floats(1e-6, 1e3), "energy": st.floats(0, 1e6), "time_stderr": st.floats(0, 1),
})  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whatever_is_measured_comes_back_from_any_order_of_rows_and_columns(data):
    num_stages = data.draw(st.integers(1, 3))
    measured = {
        (stage, kind): data.draw(st.dictionaries(st.integers(1, 3000), CELLS, min_size=1, max_size=4))
        for stage in range(num_stages)
        for kind in (F, B)
    }
    rows = [
        {"stage": stage, "instruction": kind.profile_name, "frequency": clock, **cells}
        for (stage, kind), by_clock in measured.items()
        for clock, cells in by_clock.items()
    ]
    columns = data.draw(st.permutations(["stage", "instruction", "frequency", "time", "energy", "time_stderr"]))
    rows = data.draw(st.permutations(rows))
    space = data.draw(st.sampled_from(["", " "]))
    end = data.draw(st.sampled_from(["\n", "\r\n", "\n\n"]))
    lines = [columns, *([repr(row[c]) if c != "instruction" else row[c] for c in columns] for row in rows)]
    text = data.draw(st.sampled_from(["", "\ufeff"])) + end.join(f"{space},".join(line) for line in lines)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.csv"
        path.write_bytes(text.encode())
        profile = read_profile(path)
    assert set(profile.instructions) == set(measured)
    for key, by_clock in measured.items():
        clocks = sorted(by_clock, reverse=True)
        found = profile.instructions[key]
        assert found.clocks_mhz == tuple(clocks)
        assert found.times_s == tuple(by_clock[clock]["time"] for clock in clocks)
        assert found.energies_j == tuple(by_clock[clock]["energy"] for clock in clocks)
        assert found.time_stderrs_s == tuple(by_clock[clock]["time_stderr"] for clock in clocks)


def capped_rows(seen_mhz, flags):
    """A stage whose forward meets its power limit above 1500 MHz; its backward does not."""
    capped = {1700: (1.03, 10.2), 1600: (0.98, 9.9), 1500: (1.06, 9.6), 1400: (1.1, 9.0)}
    for clock, (time_s, energy_j) in capped.items():
        row = {"stage": 0, "frequency": clock, "energy_stderr": 0.3, "p2p_blocking_power_w": clock / 20}
        forward_flags = flags.get(clock, "clock_not_reached power_cap" if clock >= 1500 else "")
        yield row | {"instruction": "backward", "time": 3000 / clock, "energy": 20.0}
        yield row | {
            "instruction": "forward",
            "time": time_s,
            "energy": energy_j,
            "clock_seen_mhz": seen_mhz.get(clock),
            "flags": forward_flags,
        }


@pytest.mark.parametrize(
    ("seen_mhz", "flags", "energies_j"),
    [
        ({}, {}, [9.9, 9.9, 9.9, 9.0]),  # as in older profiles, which do not tell the clock seen
        ({1700: 1490.0, 1600: 1491.5, 1500: 1482.0}, {}, [9.9, 9.9, 9.9, 9.0]),
        ({1700: 1590.0, 1600: 1585.0, 1500: 1450.0}, {}, [10.05, 10.05, 9.6, 9.0]),  # the limit was lowered meanwhile
        ({}, {1700: "power_cap", 1500: "clock_not_reached power_cap thermal"}, [10.2, 9.75, 9.75, 9.0]),
    ],
)
def test_clocks_under_a_power_cap_are_one_point(tmp_path, seen_mhz, flags, energies_j):
    path = tmp_path / "capped.csv"
    write_profile(path, capped_rows(seen_mhz, flags))
    profile = read_profile(path)
    forward = profile.of(0, F)
    assert forward.clocks_mhz == (1700, 1600, 1500, 1400)  # so that the top clocks are those of all instructions
    assert forward.energies_j == pytest.approx(energies_j)
    assert len(set(forward.times_s)) == len(set(energies_j))
    assert forward.p2p_blocking_powers_w == (85, 80, 75, 70)  # nobody is capped while it waits
    assert forward.energy_stderrs_j[1] == pytest.approx(0.3 / math.sqrt(energies_j.count(energies_j[1])))
    assert profile.of(0, B).energies_j == (20.0,) * 4
    assert forward.unreached_mhz == ()


@pytest.mark.parametrize(
    "flag", ["clock_not_reached", "clock_above clock_not_reached power_cap", "clock_not_reached thermal"]
)
def test_clocks_that_were_not_reached_are_refused_unless_told_otherwise(tmp_path, flag):
    path = tmp_path / "ignored.csv"
    write_profile(path, capped_rows({}, {1600: flag, 1500: flag}))
    profile = read_profile(path)
    named = "stage 0 forward at 1600 MHz, stage 0 forward at 1500 MHz"
    refusal = rf"2 measurements .* clock_not_reached\): {named}\. .*use_unreached=true"
    for source in (path, profile, profile.to_frame()):
        with pytest.raises(ProfileError, match=refusal):
            plan_frontier(source, num_microbatches=2, num_plans=2)
    assert set(regularise(profile).profile.of(0, F).unreached_mhz) <= {1600, 1500}
    assert plan_frontier(path, num_microbatches=2, num_plans=2, use_unreached=True).plans
