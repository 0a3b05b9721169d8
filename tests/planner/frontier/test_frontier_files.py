import ast
import csv
import errno
import json
import math
import re
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pfo.core.errors import PlanError
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner import load_frontier, plan_frontier, save_frontier
from lightning_pfo.planner.frontier.frontier_json import frontier_from, frontier_text
from tests.planner.problems import with_transfers


@pytest.fixture
def folder(frontier, tmp_path):
    save_frontier(frontier, tmp_path / "plans")
    return tmp_path / "plans"


def test_a_frontier_comes_back_equal_from_file_and_directory(frontier, folder):
    assert load_frontier(folder) == frontier
    assert load_frontier(folder / "frontier.json") == frontier


def test_the_csv_numbers_plans_from_slow_to_fast(frontier, folder):
    with (folder / "frontier.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:5] == ["plan", "iteration_time_s", "iteration_energy_j", "lower_bound_j", "gap"]
    assert list(rows[0])[5:] == ["clock_changes", "switching_cost_j"]
    assert [int(row["plan"]) for row in rows] == list(range(len(frontier.plans)))
    for row, plan in zip(rows, reversed(frontier.plans), strict=True):
        assert float(row["iteration_time_s"]) == plan.iteration_time_s
        assert float(row["lower_bound_j"]) == plan.lower_bound_j
        assert float(row["gap"]) == pytest.approx(plan.gap)
        assert int(row["plan"]) == frontier.number_of(plan)


def test_zeus_files_are_literals_in_execution_order(frontier, folder):
    for plan in frontier.plans:
        text = (folder / f"freqs_pipeline_{frontier.number_of(plan):05d}.py").read_text()
        rows = ast.literal_eval(text)
        assert [[mhz for _, mhz in row] for row in rows] == [list(row) for row in plan.clocks_mhz]
        names = [[inst.type.profile_name for inst in order] for order in plan.schedule.orders]
        assert [[name for name, _ in row] for row in rows] == names


def test_plan_files_of_a_longer_frontier_are_removed(profile, folder):
    (folder / "freqs_pipeline_00999.py").write_text("[]")
    (folder / "freqs_pipeline_notes.py").write_text("mine")
    short = plan_frontier(profile, num_microbatches=6, num_plans=3)
    save_frontier(short, folder)
    numbered = sorted(path.name for path in folder.glob("freqs_pipeline_0*.py"))
    assert numbered == [f"freqs_pipeline_{i:05d}.py" for i in range(len(short.plans))]
    assert (folder / "freqs_pipeline_notes.py").exists()


def test_the_json_is_readable(folder):
    text = (folder / "frontier.json").read_text()
    assert '"0F0 0F1 0F2 0F3 0B0' in text
    assert max(map(len, text.splitlines())) < 4000
    assert len(text.splitlines()) < 400


def edit(folder, change):
    path = folder / "frontier.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


def wait(rank, position):
    return {"rank": [rank], "position": [position], "clock_mhz": [900], "hold_s": [0.1]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=99), "version 99"),
        (lambda d: d.update(format="other"), "not a frontier file"),
        (lambda d: d.pop("plans"), "lacks 'plans'"),
        (lambda d: d.update(plans=[]), "contains no plan"),
        (lambda d: d["plans"].reverse(), "from the slowest to the fastest"),
        (lambda d: d["plans"][0].update(iteration_time_s=math.nan), "finite number"),
        (lambda d: d["plans"][0].update(iteration_energy_j=1e308), "without needing less energy"),
        (lambda d: d["plans"][0].update(lower_bound_j=1e308), "less energy than its lower bound"),
        (lambda d: d["plans"][0]["clocks_mhz"][0].pop(), "one clock per instruction"),
        (lambda d: d["plans"][0]["clocks_mhz"][0].__setitem__(0, 1234), "1234 MHz is not among"),
        (lambda d: d["plans"][0]["clocks_mhz"][0].__setitem__(0, "1400"), "whole number"),
        (lambda d: d["schedule"]["orders"].__setitem__(0, "0F0 nonsense"), "nonsense"),
        (lambda d: d["schedule"]["orders"].pop(), "lacks one at stage 3"),
        (lambda d: d["p2p_blocking"].pop(), "one entry for each of 4 ranks"),
        (lambda d: d["p2p_blocking"][0]["powers_w"].append(3), "one value for each of its clocks"),
        (lambda d: d["plans"][0]["wait_clocks"]["rank"].append(3), "malformed"),
        (lambda d: d["plans"][0].update(wait_clocks=wait(9, 0)), "A wait has at most one clock"),
        (lambda d: d["plans"][0].update(wait_clocks=wait(1, 1.5)), "whole number"),
        (lambda d: d["plans"][0].update(switching_cost_j=math.nan), "finite number"),
        (lambda d: d.update(least_dwell_s=-1), "finite number, at least 0"),
        (lambda d: d.update(profile=7), "malformed"),
        (lambda d: d["profile"][0]["times_s"].pop(), "needs one time and one energy"),
        (lambda d: d["profile"][0]["times_s"].__setitem__(0, 0.0), "a positive number of seconds"),
        (lambda d: d["profile"][0]["clocks_mhz"].reverse(), "from the highest to the lowest"),
        (lambda d: d["profile"][0].update(transfer_s=-1), "a number of seconds, at least 0"),
        (lambda d: d["profile"][0].update(transfer_s="1"), "a number of seconds, at least 0"),
        (lambda d: d["profile"][0].update(transfer_s=0.01), "the longest path with the profile's own times"),
        (lambda d: d["baseline"].update(iteration_time_s=0.0), "takes time"),
        (lambda d: d.update(gpus=[7]), "list of names"),
        (lambda d: d.update(gpus_per_stage=0), "gpus_per_stage is a whole number"),
    ],
)
def test_a_damaged_frontier_is_a_clear_error(folder, change, message):
    with pytest.raises(PlanError, match=message):
        load_frontier(edit(folder, change))


def test_version_1_is_still_read(frontier, folder):
    def downgrade(data):
        data["version"] = 1
        data["p2p_blocking_powers_w"] = [power["powers_w"][0] for power in data.pop("p2p_blocking")]
        del data["switch_latency_s"], data["least_dwell_s"], data["gpus"]
        for plan in (data["baseline"], *data["plans"]):
            del plan["wait_clocks"], plan["switching_cost_j"], plan["clock_changes"]

    assert load_frontier(edit(folder, downgrade)) == frontier


def test_times_of_transfers_come_back_and_are_reckoned_with(make_profile, tmp_path):
    profile = with_transfers(make_profile([0.03, 0.05]), lambda stage, kind: 0.01 if stage == 0 else None)
    frontier = plan_frontier(profile, num_microbatches=3, num_plans=3)
    save_frontier(frontier, tmp_path)
    loaded = load_frontier(tmp_path)
    assert loaded == frontier
    assert loaded.timeline(loaded.fastest).starts_s == frontier.timeline(frontier.fastest).starts_s
    # A release that would leave them out must not read the file, and a file without them is wrong.
    assert json.loads((tmp_path / "frontier.json").read_text())["version"] == 3
    with pytest.raises(PlanError, match="the longest path with the profile's own times"):
        load_frontier(edit(tmp_path, lambda d: [row.pop("transfer_s") for row in d["profile"]]))


def test_clocks_that_were_not_reached_come_back(make_profile, tmp_path):
    measured = make_profile([1.0, 1.2])
    key, forward = next(iter(measured.instructions.items()))
    flagged = replace(forward, unreached_mhz=forward.clocks_mhz[1:3])
    profile = replace(measured, instructions={**measured.instructions, key: flagged})
    frontier = plan_frontier(profile, num_microbatches=2, num_plans=2, p2p_blocking_power_w=80, use_unreached=True)
    save_frontier(frontier, tmp_path)
    assert load_frontier(tmp_path).profile.of(*key).unreached_mhz == forward.clocks_mhz[1:3]


def test_without_them_an_older_release_can_read_the_file(folder):
    data = json.loads((folder / "frontier.json").read_text())
    assert data["version"] == 2
    assert not any("transfer_s" in row for row in data["profile"])


def test_the_names_of_the_gpus_come_back(make_profile, tmp_path):
    profile = replace(make_profile([0.03, 0.05]), gpus=("A100 (emulated)", "A40 (emulated)"))
    save_frontier(plan_frontier(profile, num_microbatches=2, num_plans=2), tmp_path)
    assert load_frontier(tmp_path).profile.device == "A100 (emulated) and A40 (emulated)"


NAMES = ["A100 [ lab 3 ]", "a\n[\n1,\n2\n]", '[ "x" ]', "\ud800", "{ [ ] }", "", " ", "\\[ ", "x" * 300]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_strings_come_back_as_they_were(make_profile, tmp_path, name):
    profile = replace(make_profile([0.03]), gpus=(name, "B"))
    schedule = replace(make_schedule("1f1b", 1, 2), name=f"file:{name}")
    frontier = plan_frontier(profile, schedule=schedule, num_plans=2)
    save_frontier(frontier, tmp_path)
    assert load_frontier(tmp_path) == frontier


@given(st.text())
def test_any_string_comes_back(frontier, name):
    named = replace(frontier, profile=replace(frontier.profile, gpus=(name,)))
    assert frontier_from(json.loads(frontier_text(named))) == named


def test_a_table_has_the_numbers_of_the_csv(frontier, folder):
    pd.testing.assert_frame_equal(
        frontier.to_frame(), pd.read_csv(folder / "frontier.csv", float_precision="round_trip")
    )


def test_a_plan_without_predictions_is_not_written(frontier, tmp_path):
    plan = replace(frontier.fastest, iteration_energy_j=math.nan)
    with pytest.raises(PlanError, match="Only plans whose time and energy are predicted"):
        save_frontier(replace(frontier, plans=(plan,)), tmp_path / "plans")
    assert list(tmp_path.iterdir()) == []


def test_on_a_full_disk_the_earlier_frontier_stays_whole(frontier, folder, monkeypatch):
    def content():
        return {path.name: path.read_bytes() for path in folder.rglob("*")}

    before, write = content(), Path.write_text
    for failing in range(len(before)):
        written = []

        def write_until_full(path, text, failing=failing, written=written, **options):
            written.append(path)
            if len(written) > failing:
                write(path, text[: len(text) // 2], **options)
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(path, text, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", write_until_full)
            with pytest.raises(OSError, match="No space left"):
                save_frontier(frontier, folder)
        assert content() == before
        assert load_frontier(folder) == frontier


def test_wait_clocks_and_limits_come_back(make_profile, tmp_path):
    limited = plan_frontier(
        make_profile([0.03, 0.05]),
        num_microbatches=4,
        num_plans=3,
        p2p_blocking_power_w={1400: 90, 800: 60},
        switch_latency_s=0.005,
        least_dwell_s=0.05,
    )
    assert any(plan.wait_clocks for plan in limited.plans)
    save_frontier(limited, tmp_path)
    assert load_frontier(tmp_path) == limited


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", '"frontier"', "\x00", "[" * 100_000, '{"a":' * 100_000])
def test_other_files_are_errors_too(tmp_path, text):
    path = tmp_path / "frontier.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"frontier\.json"):
        load_frontier(path)


@pytest.fixture(scope="module")
def small(make_profile):
    """With clocks of waits and limits on switching, so that everything there is can be damaged."""
    power_w = {1400: 90, 800: 60}
    return plan_frontier(
        make_profile([0.03, 0.05]), num_microbatches=3, num_plans=3, p2p_blocking_power_w=power_w, least_dwell_s=0.01
    )


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_damage_is_a_clear_error_or_a_frontier(small, data):
    def damage(node):
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(node[key], (dict, list)) and node[key] and data.draw(st.integers(0, 3)):
            damage(node[key])
        else:
            node[key] = data.draw(st.sampled_from([None, -1, 0, 1e308, math.nan, True, "x", [], {}, [[]]]))

    with tempfile.TemporaryDirectory() as folder:
        save_frontier(small, folder)
        path = edit(Path(folder), damage)
        with suppress(PlanError):
            assert len(load_frontier(path).plans) == len(small.plans)


@settings(deadline=None)
@given(st.one_of(st.binary(), st.text('{}[]":,0123456789.eE-+format vsin', max_size=100).map(str.encode)))
def test_any_file_is_a_frontier_or_a_clear_error(content):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "frontier.json").write_bytes(content)
        with pytest.raises(PlanError) as error:
            load_frontier(folder)
        assert len(str(error.value)) < 2000


@pytest.mark.parametrize("where", [None, 7, b"frontier.json", "nul\0byte", "x" * 10_000], ids=repr)
def test_what_is_no_path_is_refused(where):
    with pytest.raises(PlanError) as error:
        load_frontier(where)
    assert len(str(error.value)) < 1000


def test_a_missing_frontier_says_how_to_make_one(tmp_path):
    for place in (tmp_path, tmp_path / "plans", tmp_path / "plans" / "frontier.json"):
        folder = place.parent if place.suffix else place
        with pytest.raises(PlanError, match=rf"lightning-pfo plan \.\.\. output_dir={re.escape(str(folder))}`"):
            load_frontier(place)
