import ast
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.core.errors import PlanError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner import read_zeus_plan, save_frontier, simulate
from lightning_pfo.planner.frontier.zeus_files import zeus_text


def test_what_was_written_comes_back(frontier, tmp_path):
    save_frontier(frontier, tmp_path)
    for plan in frontier.plans:
        read = read_zeus_plan(tmp_path / f"freqs_pipeline_{frontier.number_of(plan):05d}.py", plan.schedule)
        assert read.clocks_mhz == plan.clocks_mhz
        assert math.isnan(read.iteration_time_s)
        timeline = simulate(frontier.profile, read.schedule, read.clocks_mhz, frontier.p2p_blocking_powers_w)
        assert timeline.iteration_energy_j == pytest.approx(plan.iteration_energy_j)


def test_bare_clocks_of_the_perseus_artifact_are_read(tmp_path):
    path = tmp_path / "freqs_pipeline_00000.py"
    path.write_text("\ufeff# Iteration 0: cost change 0.1\n[[1410, 1395, 900, 885], [1410, 1410, 1400, 870]]\n# end\n")
    assert read_zeus_plan(path, make_schedule("1f1b", 2, 2)).clocks_mhz == (
        (1410, 1395, 900, 885),
        (1410, 1410, 1400, 870),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[1410, 1395, 900]]", r"has \[3\] clocks by row"),
        ("__import__('os').system('true')", "cannot be read as a plan"),
        ("", "cannot be read as a plan"),
        ("5", "a list with a list per stage"),
        ("[[1, 2, 3, 4], [1, 2, 3, -4]]", "the entry of 1B1 must be a clock"),
        ("[[1, 2, 3, 4], [1, 2, 3, True]]", "the entry of 1B1 must be a clock"),
        ("[[1, 2, 3, 4], [1, ('forward', 2), 3, 4]]", r"'forward' where the schedule runs 1B0 \(backward\)"),
    ],
)
def test_files_that_do_not_fit_are_errors(tmp_path, text, message):
    path = tmp_path / "plan.py"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        read_zeus_plan(path, make_schedule("1f1b", 2, 2))
    with pytest.raises(PlanError, match="cannot be read"):
        read_zeus_plan(tmp_path / "missing.py", make_schedule("1f1b", 2, 2))


@pytest.mark.parametrize(
    "text",
    [
        "{[1],}",
        "[[1, 2, 3, 4], [1, 2, 3, {[1],}]]",
        "[[1, 2, 3, 4], [1, 2, 3, 0x" + "f" * 8000 + "]]",
        "[[1, 2, 3, 4], [1, 2, 3, " + "9" * 8000 + "]]",
        "[[1, 2, 3, 4], [1, 2, 3, ('" + "x" * 5000 + "', 4)]]",
        "[[1, 2, 3, 4], [1, 2, 3, 1000000]]",
        "[" * 9000,
        "(" * 9000 + ")" * 900,
        "-" * 9000 + "1",
        "[" + "1+" * 4000 + "1]",
        "[" * 90 + "]" * 90,
        "[[]," * 2000,
        "[" + "[]," * 2000 + "]",
        "# " + "x" * 100_000 + "\n[[1, 2, 3, 4], [1, 2, 3, 4]]",
        "[[1, 2, 3, 4], [1, 2, 3, 4]]" + " " * 10**7,
        "[[1, 2, 3, 4], [1, 2, 3, 4j]]",
        "[[1, 2, 3, 4], [1, 2, 3, b'4']]",
        "[[1, 2, 3, 4], [1, 2, 3, '\\ud800']]",
    ],
    ids=lambda text: text[:20],
)
def test_whatever_python_can_write_is_refused_in_short(tmp_path, text):
    path = tmp_path / "plan.py"
    path.write_text(text)
    with pytest.raises(PlanError) as error:
        read_zeus_plan(path, make_schedule("1f1b", 2, 2))
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("path", [None, 7, b"plan.py", "nul\0byte", "x" * 10_000, "."], ids=repr)
def test_what_is_no_path_is_refused(path):
    with pytest.raises(PlanError) as error:
        read_zeus_plan(path, make_schedule("1f1b", 2, 2))
    assert len(str(error.value)) < 1000


@given(st.text(alphabet="[](),1 '\"frwd{}:-x\n", max_size=60))
def test_any_text_is_read_or_refused(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.py"
        path.write_text(text)
        with pytest.raises(PlanError):
            read_zeus_plan(path, make_schedule("1f1b", 2, 2))


@given(st.data())
def test_a_damaged_plan_file_is_read_as_it_is_or_refused(data):
    schedule = make_schedule("1f1b", 2, 2)
    clocks = data.draw(st.lists(st.integers(1, 3000), min_size=8, max_size=8))
    plan = FrequencyPlan(schedule, (tuple(clocks[:4]), tuple(clocks[4:])), 1.0, 1.0)
    text = zeus_text(plan, 0)
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(start + 12, len(text))))
    damaged = (
        text[:start] + data.draw(st.sampled_from(["", "1", "[", "]", ",", '"', "-", "(", "\n", "#"])) + text[stop:]
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.py"
        path.write_text(damaged)
        try:
            read = read_zeus_plan(path, schedule)
        except PlanError:
            return
        rows = ast.literal_eval(damaged.strip())
        assert [[entry[1] if isinstance(entry, tuple) else entry for entry in row] for row in rows] == [
            list(row) for row in read.clocks_mhz
        ]
        assert all(clock > 0 for row in read.clocks_mhz for clock in row)
