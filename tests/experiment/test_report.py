import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.device import GpuConfig
from lightning_pfo.experiment import run
from lightning_pfo.experiment.compared import comparison_table
from lightning_pfo.experiment.config import ExperimentConfig
from lightning_pfo.experiment.report import Report
from lightning_pfo.experiment.windows import Training
from lightning_pfo.planner.adaptive.verification import Verified
from lightning_pfo.planner.adaptive.windows import MeanEnergy, Window, Windowed

SCHEDULE = make_schedule("1f1b", 2, 2)
CLOCKS = ((1410,) * 4,) * 2


def windowed(times_s, energies_j, **options):
    return Windowed(
        tuple(Window((time,), (energy,), **options) for time, energy in zip(times_s, energies_j, strict=True))
    )


def training(losses=(3.0, 2.0), **changes):
    values = {
        "baseline": windowed((2.0, 1.9, 9.0), (400.0, 390.0, 800.0)),
        "plan": windowed((2.1, 2.0, 9.2), (300.0, 330.0, 620.0)),
        "losses": losses,
        "val_loss": 2.5,
    }
    return Training(**values | changes)


def make_report(**changes):
    values = {
        "device": "NVIDIA A100 (emulated)",
        "is_emulated": True,
        "training": training(),
        "predicted_baseline": FrequencyPlan(SCHEDULE, CLOCKS, 1.6, 320.0),
        "predicted_plan": FrequencyPlan(SCHEDULE, CLOCKS, 1.64, 248.0, lower_bound_j=240.0),
        "settings": {"seed": 0},
        "profiling_losses": (3.0, 2.0, 1.0),
    }
    return Report(**values | changes)


def test_differences_are_those_of_pairs():
    report = make_report()
    assert report.training.baseline.iteration_time_s == 2.0  # the disturbed iteration does not count
    assert report.slowdown_percent == pytest.approx(5)  # of 5, 5.3 and 2.2 %: what disturbed both windows drops out
    assert report.saving_percent == pytest.approx(22.5)  # of 25, 15.4 and 22.5 %
    assert (report.saving_interval_percent, report.slowdown_interval_percent) == (None, None)
    assert report.lower_bound_saving_percent == pytest.approx(25)


def test_intervals_are_those_of_the_median():
    energies_j = (80.0, 90.0, 81.0, 82.0, 79.0, 78.0)
    pairs = training(baseline=windowed([1.0] * 6, [100.0] * 6), plan=windowed([1.0] * 6, energies_j))
    report = make_report(training=pairs)
    assert report.saving_percent == pytest.approx(19.5)
    assert report.saving_interval_percent == pytest.approx((10, 22))
    assert report.slowdown_interval_percent == (0, 0)
    text = shown(report)
    assert "-22.00 to -10.00 %" in text
    assert "median of 6 pairs" in text
    assert "no width" not in text
    alike = training(baseline=windowed([1.0] * 6, [100.0] * 6), plan=windowed([1.0] * 6, [80.0] * 6))
    assert "Its interval has no width: without noise the pairs are alike." in shown(make_report(training=alike))


def test_other_plans_of_the_training_are_compared_with_the_top_clocks_and_with_the_plan():
    top, own = windowed([1.0] * 6, [100.0] * 6), windowed([1.0] * 6, [80.0] * 6)
    others = {
        "better": Verified(top, windowed([1.0] * 6, [79.0, 78.0, 77.0, 76.0, 75.0, 74.0])),
        "doubtful": Verified(top, windowed([1.0] * 6, [70.0, 70.0, 70.0, 70.0, 70.0, 81.0])),
        "slower": Verified(top, windowed([1.1] * 6, [60.0] * 6)),
        "ended early": Verified(windowed([1.0], [100.0]), windowed([1.0], [79.0])),
    }
    predicted = FrequencyPlan(SCHEDULE, CLOCKS, 1.0, 240.0, lower_bound_j=160.0)
    changes = {"training": training(baseline=top, plan=own, others=others), "policy": "ours"}
    report = make_report(predicted_others=dict.fromkeys(others, predicted), **changes)
    record = report.as_dict()["policies"]
    assert [*record] == ["ours", *others]
    assert [one["beats_plan"] for one in record.values()] == [False, True, False, False, True]
    assert record["ours"]["saving_percent"] == pytest.approx(20)
    better = record["better"]
    assert better["saving_percent"] == pytest.approx(23.5)
    assert better["saving_interval_percent"] == pytest.approx((21, 26))
    assert better["saving_beside_plan_percent"] == pytest.approx(100 * (1 - 76.5 / 80))
    assert better["lower_bound_saving_percent"] == pytest.approx(50)
    assert better["predicted"] == {"iteration_time_s": 1.0, "iteration_energy_j": 240.0}
    assert record["slower"]["slowdown_percent"] == pytest.approx(10)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(comparison_table(report.policies, "title"))
    text = console.export_text()
    assert "│ better * " in text
    assert "* better needs 4.38 % less energy than ours and is not slower." in text
    assert "slower *" not in text
    assert "policies" not in make_report().as_dict()


def test_json_has_what_is_promised(tmp_path):
    make_report().write(tmp_path / "report.json")
    record = json.loads((tmp_path / "report.json").read_text())
    assert record["device"] == "NVIDIA A100 (emulated)"
    assert record["emulated"] is True
    assert record["baseline"]["iteration_time_s"] == 2.0
    assert record["baseline"]["iteration_energies_j"] == record["baseline"]["window_energies_j"] == [400, 390, 800]
    assert record["baseline"]["window_temperatures_c"] == [None, None, None]
    assert record["plan"]["iteration_energy_j"] == 330
    assert record["predicted"]["plan"] == {"iteration_time_s": 1.64, "iteration_energy_j": 248}
    errors = record["prediction_error_percent"]
    assert errors["baseline"] == pytest.approx({"iteration_time": 25, "iteration_energy": 25})
    assert record["saving_percent"] == pytest.approx(22.5)
    assert record["slowdown_percent"] == pytest.approx(5)
    assert record["saving_interval_percent"] is None
    assert record["lower_bound_saving_percent"] == pytest.approx(25)
    assert record["losses"]["identical"] is True
    assert record["training"] == {"final_loss": 2.0, "val_loss": 2.5, "clocks": {}, "clocks_of_ranks": {}}
    assert record["settings"] == {"seed": 0}


def test_where_counters_tick_means_count():
    one = Windowed(tuple(Window((1.0,), (one_j - 10,), MeanEnergy(one_j, 1.0)) for one_j in (100.0, 200.0)))
    assert (one.iteration_energy_j, one.windows[1].energy_j) == (150.0, 200.0)


def test_temperatures_are_shown_where_known():
    known = [windowed((1.0,), (1.0,), temperature_c=celsius) for celsius in (61.0, 58.5)]
    text = shown(make_report(training=training(baseline=known[0], plan=known[1])))
    assert "hottest (C)" in text
    assert "-2.5" in text
    assert "hottest" not in shown(make_report())


def test_losses_that_differ_from_those_while_profiling_are_said():
    report = make_report(training=training(losses=(3.0, 2.25)))
    assert report.as_dict()["losses"] == {
        "training": (3.0, 2.25),
        "profiling": (3.0, 2.0, 1.0),
        "compared": 2,
        "identical": False,
        "max_difference": 0.25,
    }
    assert "Losses of 2 steps and those while profiling: up to 0.2 apart." in shown(report)
    alone = make_report(profiling_losses=())
    assert alone.as_dict()["losses"]["identical"] is None
    assert "Loss of the last step: 2.0000." in shown(alone)


def shown(report):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report.table())
    return console.export_text()


def test_table_fits_a_terminal_and_says_emulated():
    text = shown(make_report())
    assert "EMULATED" in text
    assert "EMULATED" not in shown(make_report(is_emulated=False, device="NVIDIA A100"))
    for cell in ("2.0000", "2.1000", "+5.00 %", "400.00", "330.00", "-22.50 %", "-25.00 %", "+25.00 %", "identical"):
        assert cell in text
    assert "An interval takes 6 pairs: more trainer.steps." in text
    assert len({len(line) for line in text.splitlines() if line and line[0] in "┏┡├└│"}) == 1


def test_clocks_that_were_not_set_are_said():
    clocks = {"rank 0": {"num_changes": 9}, "rank 1": {"num_changes": 0, "failure": "You may not."}}
    report = make_report(training=training(clocks_of_ranks=clocks))
    assert report.as_dict()["clock_failures"] == {"rank 1": "You may not."}
    assert report.as_dict()["training"]["clocks"] == {"num_changes": 9}
    assert report.table().caption.startswith("NOT THE PLAN: clocks were not set (rank 1).")


def test_the_table_is_shown_where_pictures_cannot_be_written(tmp_path, monkeypatch, capsys):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "draw_pictures", full)
    plan = FrequencyPlan(SCHEDULE, CLOCKS, 1.6, 320.0)
    config = ExperimentConfig(gpu=GpuConfig(kind="emulated"), output_dir=str(tmp_path))
    frontier = SimpleNamespace(policy="ours", baseline=plan)
    with pytest.raises(ConfigurationError, match=r"has not all of them \(.*No space left .* Give another output_dir"):
        run._report(config, frontier, plan, training(), (), run._Narrator())
    assert "energy (J)" in capsys.readouterr().out
    assert (tmp_path / "report.json").exists()
