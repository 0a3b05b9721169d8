"""The callbacks in real training on emulated GPUs, in virtual time."""

import csv
import math
from pathlib import Path

import pytest

from lightning_pfo.device import load_gpu_config
from lightning_pfo.device.emulated.physics import GpuPhysics
from lightning_pfo.planner import load_frontier, read_profile
from tests.launch import of_ranks, run_script

SCRIPT = Path(__file__).parent / "scripts" / "profile_and_plan.py"
DEVICES = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile_and_plan")
    (folder / "output.txt").write_text(run_script(SCRIPT, folder).stdout)
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return of_ranks(folder, DEVICES)


def logged(folder, name):
    with next(folder.glob("lightning_logs/version_*/metrics.csv")).open() as lines:
        return [float(row[name]) for row in csv.DictReader(lines) if row[name]]


def test_the_profile_covers_every_instruction_from_the_top_clock_down(folder, ranks):
    rows = list(csv.DictReader((folder / "profile.csv").open()))
    assert set(rows[0]) >= {"stage", "instruction", "frequency", "time", "energy", "p2p_blocking_power_w", "samples"}
    for stage in "01":
        for instruction in ("forward", "backward"):
            mine = [row for row in rows if (row["stage"], row["instruction"]) == (stage, instruction)]
            clocks = [int(row["frequency"]) for row in mine]
            assert clocks == list(range(1410, 1410 - 120 * len(mine), -120))
            assert all(int(row["samples"]) == 2 * 4 for row in mine)
            texts = {"flags", "gpu", "transfer_time"}
            numbers = [value for row in mine for name, value in list(row.items())[3:] if name not in texts]
            assert all(math.isfinite(float(number)) for number in numbers)
            transfers_s = {row["transfer_time"] and round(float(row["transfer_time"]), 9) for row in mine}
            is_sent = (stage, instruction) in {("0", "forward"), ("1", "backward")}
            assert transfers_s == {round(5e-6 + 50e6 / 250e9, 9) if is_sent else ""}  # of cluster=nvlink
            assert not any("power_cap" in row["flags"] for row in mine if int(row["frequency"]) < 1300)
    held = {"clock_not_reached", "power_cap"}
    assert any(held <= set(row["flags"].split()) for row in rows if row["frequency"] == "1410")
    assert read_profile(folder / "profile.csv").device == "NVIDIA A100-SXM4-80GB (emulated, virtual time)"


def test_times_and_powers_are_those_of_the_emulated_gpu(folder):
    config = load_gpu_config("emulated_a100")
    physics = GpuPhysics(config)
    rows = list(csv.DictReader((folder / "profile.csv").open()))
    kinds = {}
    for row in rows:
        clock_mhz, time_s, energy_j = int(row["frequency"]), float(row["time"]), float(row["energy"])
        assert energy_j / time_s == pytest.approx(physics.computing_power_w(clock_mhz), rel=1e-6)
        assert float(row["p2p_blocking_power_w"]) == pytest.approx(physics.blocked_power_w(clock_mhz), rel=1e-6)
        assert float(row["time_stderr"]) == pytest.approx(0, abs=1e-9)
        kinds.setdefault((row["stage"], row["instruction"]), {})[clock_mhz] = time_s
    assert max(kinds[stage, "forward"][1410] for stage in "01") == pytest.approx(config.forward_s)
    for times_s in kinds.values():  # one part of the time scales with the clock, the other one does not
        top_s, middle_s = times_s[1410], times_s[930]
        unit = physics.time_s(930, 1.0, 0.0) - 1.0
        compute_s = (middle_s - top_s) / unit
        for clock_mhz, time_s in times_s.items():
            assert time_s == pytest.approx(physics.time_s(clock_mhz, compute_s, top_s - compute_s), rel=1e-6)


def test_the_scan_sets_clocks_in_order_and_restores_them(ranks):
    for seen in ranks:
        assert seen["profile_done"]
        assert seen["profile_restored"]
        scanned = list(dict.fromkeys(seen["profile_locks"]))
        assert scanned == sorted(scanned, reverse=True)
        assert scanned[0] == 1410
    assert ranks[0]["profile_steps"] < 200
    assert ranks[0]["profile_steps"] == ranks[1]["profile_steps"]


def test_training_is_not_changed(ranks):
    for seen in ranks:
        assert len(seen["losses_plain"]) == 6
        assert seen["losses_profiled"] == seen["losses_plain"]
        assert seen["plan"]["losses"] == seen["top"]["losses"] == seen["losses_plain"]


def test_progress_is_shown_and_metrics_are_logged(folder, ranks):
    output = (folder / "output.txt").read_text()
    assert "1410 MHz measured" in output
    assert "(emulated, virtual time)" in output
    clocks = logged(folder / "profiler_log", "pfo/clock_mhz")
    assert clocks[0] == 1410
    measured_s = [m[1] for m in ranks[0]["plan"]["measurements"]]
    assert logged(folder / "plan_log", "pfo/iteration_time_s") == pytest.approx(measured_s, rel=1e-5)


def test_the_plan_is_applied_and_measured_the_same_on_every_rank(folder, ranks):
    plan = load_frontier(folder / "plans").least_energy
    assert len(set(plan.clocks_mhz[0])) > 1 or len(set(plan.clocks_mhz)) > 1
    for rank, seen in enumerate(ranks):
        assert seen["plan"]["clocks"] == [list(row) for row in plan.clocks_mhz]
        waits_mhz = {wait.clock_mhz for wait in plan.wait_clocks if wait.rank == rank}
        assert set(seen["plan"]["locks"]) == set(plan.clocks_mhz[rank]) | waits_mhz
        assert seen["plan"]["restored"]
        assert set(seen["top"]["locks"]) == {1410}
        assert seen["plan"]["measurements"] == ranks[0]["plan"]["measurements"]
        assert [m[0] for m in seen["plan"]["measurements"]] == [1, 2, 3, 4, 5]


def test_the_plan_needs_less_energy_than_the_top_clocks_as_predicted(folder, ranks):
    frontier = load_frontier(folder / "plans")
    predicted = {"top": frontier.baseline, "plan": frontier.least_energy}
    for name, plan in predicted.items():
        energies_j = [m[2] for m in ranks[0][name]["measurements"][1:]]  # clocks land in the first
        # clock changes take 5 ms to land and activations some time to arrive, which is not predicted
        assert energies_j == pytest.approx([plan.iteration_energy_j] * 4, rel=0.05)
        assert len({round(energy_j, 6) for energy_j in energies_j}) == 1
    assert ranks[0]["plan"]["measurements"][-1][2] < 0.9 * ranks[0]["top"]["measurements"][-1][2]


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("microbatches", "PlanMismatchError", ["2 stages x 8 microbatches", "runs 2 x 4", "num_microbatches=4"]),
        ("clock", "PlanMismatchError", ["does not support [1407] MHz", "Profile and plan on the GPU model"]),
        ("gpu", "ConfigurationError", ["emulated_a1000", "emulated_a100"]),
        ("both", "ConfigurationError", ["One callback sets the clocks", "profile first"]),
        ("no_clock", "ConfigurationError", ["Clocks from 9000 MHz (min_clock_mhz", "1410 MHz"]),
        ("missing", "PlanError", ["nothing.json"]),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(ranks, case, kind, words):
    for seen in ranks:
        found, message = seen["errors"][case]
        assert found == kind
        for word in words:
            assert word in message


def test_where_the_disk_is_full_training_goes_on(folder, ranks):
    for seen in ranks:
        for name in ("full", "full_once"):
            assert seen[name] == {"done": True, "error": None, "losses": seen["losses_plain"]}
    assert not (folder / "full.csv").exists()
    assert {row["frequency"] for row in csv.DictReader((folder / "full_once.csv").open())} == {"1410", "810", "210"}
    told = (folder / "output.txt").read_text()
    assert told.count(f"{folder / 'full.csv'} cannot be written ([Errno 27] File too large") == 1
    assert f"the profile is complete: {folder / 'full.csv'}" not in told


def test_an_incomplete_scan_says_so_and_leaves_no_half_profile(folder, ranks):
    assert not ranks[0]["incomplete_file"]
    assert "Training ended before the frequency scan: 0 of up to 11 clocks" in (folder / "output.txt").read_text()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
