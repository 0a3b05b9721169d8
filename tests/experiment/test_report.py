import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.experiment.report import Report, TrainingResult

SCHEDULE = make_schedule("1f1b", 2, 2)
CLOCKS = ((1410,) * 4,) * 2


def make_report(**changes):
    values = {
        "device": "NVIDIA A100 (emulated)",
        "is_emulated": True,
        "baseline": TrainingResult((2.0, 1.9, 9.0), (400.0, 390.0, 800.0), (3.0, 2.0), 2.5),
        "plan": TrainingResult((2.1, 2.0, 2.05), (300.0, 330.0, 310.0), (3.0, 2.0), 2.5),
        "predicted_baseline": FrequencyPlan(SCHEDULE, CLOCKS, 1.6, 320.0),
        "predicted_plan": FrequencyPlan(SCHEDULE, CLOCKS, 1.64, 248.0, lower_bound_j=240.0),
        "settings": {"seed": 0},
    }
    return Report(**values | changes)


def test_percentages():
    report = make_report()
    assert report.baseline.iteration_time_s == 2.0  # the disturbed iteration does not count
    assert report.slowdown_percent == pytest.approx(2.5)
    assert report.saving_percent == pytest.approx(22.5)
    assert report.lower_bound_saving_percent == pytest.approx(25)


def test_json_has_what_is_promised(tmp_path):
    make_report().write(tmp_path / "report.json")
    record = json.loads((tmp_path / "report.json").read_text())
    assert record["device"] == "NVIDIA A100 (emulated)"
    assert record["emulated"] is True
    assert record["baseline"]["iteration_time_s"] == 2.0
    assert record["baseline"]["iteration_energies_j"] == [400, 390, 800]
    assert record["plan"]["iteration_energy_j"] == 310
    assert record["predicted"]["plan"] == {"iteration_time_s": 1.64, "iteration_energy_j": 248}
    errors = record["prediction_error_percent"]
    assert errors["baseline"] == pytest.approx({"iteration_time": 25, "iteration_energy": 25})
    assert errors["plan"] == pytest.approx({"iteration_time": 25, "iteration_energy": 25})
    assert record["saving_percent"] == pytest.approx(22.5)
    assert record["slowdown_percent"] == pytest.approx(2.5)
    assert record["lower_bound_saving_percent"] == pytest.approx(25)
    assert record["losses"]["identical"] is True
    assert record["settings"] == {"seed": 0}


def test_losses_that_differ_are_said(tmp_path):
    report = make_report()
    report = replace(report, plan=replace(report.plan, losses=(3.0, 2.25)))
    assert report.as_dict()["losses"] == {
        "baseline": (3.0, 2.0),
        "plan": (3.0, 2.25),
        "identical": False,
        "max_difference": 0.25,
    }
    assert "up to 0.2" in shown(report)


def shown(report):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report.table())
    return console.export_text()


def test_table_fits_a_terminal_and_says_emulated():
    text = shown(make_report())
    assert "EMULATED" in text
    assert "EMULATED" not in shown(make_report(is_emulated=False, device="NVIDIA A100"))
    for cell in ("2.0000", "2.0500", "+2.50 %", "400.00", "310.00", "-22.50 %", "-25.00 %", "+25.00 %", "identical"):
        assert cell in text
    assert len({len(line) for line in text.splitlines() if line and line[0] in "┏┡├└│"}) == 1


def test_a_single_iteration_suffices():
    report = make_report(plan=TrainingResult((2.0,), (200.0,), (3.0, 2.0), None))
    assert report.saving_percent == 50
    assert not math.isnan(report.slowdown_percent)


def test_clocks_that_were_not_set_are_said():
    clocks = {"rank 0": {"num_changes": 9}, "rank 1": {"num_changes": 0, "failure": "You may not."}}
    plan = TrainingResult((2.0,), (200.0,), (3.0, 2.0), None, clocks_of_ranks=clocks)
    report = make_report(plan=plan)
    assert report.as_dict()["clock_failures"] == {"plan, rank 1": "You may not."}
    assert report.table().caption == "NOT THE PLAN: clocks were not set (plan, rank 1)."
