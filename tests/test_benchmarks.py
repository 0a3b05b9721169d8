"""The benchmarks that sessions with a GPU start with judge themselves, and need neither permission nor CUDA."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_pfo.core.errors import ClockPermissionError
from lightning_pfo.device import EmulatedGpu, load_gpu_config
from tests.example_scripts import ROOT
from tests.launch import run_script
from tests.strategy.zoo import CASES, Outcome

sys.path.insert(0, str(ROOT / "benchmarks"))
import clock_overhead
import model_zoo
import on_gpu
import one_gpu
import own_clock
import perseus_tables
import planner_ablation
import rendezvous
from pipelines import emulate, evaluation_set


@pytest.mark.parametrize(
    ("overheads", "verdict"),
    [
        ([0.001, 0.002, 0.003] * 5, "within the limit"),
        ([-0.001, 0.0, 0.001] * 5, "within the limit"),
        ([0.009, 0.010, 0.011] * 5, "ABOVE THE LIMIT"),
        ([-0.02, 0.004, 0.03], "undecided: give more steps"),
    ],
)
def test_the_overhead_is_judged_with_two_standard_errors_to_spare(overheads: list[float], verdict: str) -> None:
    judged = clock_overhead.judge(overheads)
    assert judged["verdict"] == verdict
    assert judged["overhead_percent"] == pytest.approx(100 * sorted(overheads)[len(overheads) // 2])


SETTINGS = ["gpu=emulated_a100", "steps=4", "microbatches=2", "instruction_ms=4"]


def test_the_overhead_is_measured_and_judged_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    code = clock_overhead.main(SETTINGS)
    result = json.loads(capsys.readouterr().out)
    assert (result["training"], result["limit_percent"], result["instructions_per_step"]) == ("cpu", 0.5, 4)
    assert "(emulated)" in result["gpu"]
    assert code == (result["verdict"] == "ABOVE THE LIMIT")


def test_without_permission_the_cost_of_setting_clocks_is_not_called_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(gpu: EmulatedGpu, clock_mhz: int) -> None:
        raise ClockPermissionError("Ask root.")

    monkeypatch.setattr(EmulatedGpu, "lock_graphics_clock", refuse)
    assert clock_overhead.main([*SETTINGS, "sets_clocks=true"]) == 2
    assert capsys.readouterr().err.endswith("error: Ask root.\n")


@pytest.mark.slow
def test_kinds_of_training_are_compared_with_plain_lightning(capsys: pytest.CaptureFixture[str]) -> None:
    cases = ["offload-gpipe", "replicas"]
    assert one_gpu.main(["device=cpu", f"cases={','.join(cases)}", "stages=2", "steps=2"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["case"], each["stages"], each["replicas"]) for each in told] == [(cases[0], 2, 1), (cases[1], 2, 2)]
    assert all(each["largest_gap"] < 1e-5 for each in told)
    assert one_gpu.main(["device=cpu", "cases=offload-gpipe", "stages=2", "limit_s=0.01"]) == 1
    assert "too slow" in capsys.readouterr().out


@pytest.mark.parametrize("asked", [[], ["set_clocks=true"]])
def test_the_first_thing_to_run_on_a_gpu_changes_clocks_only_if_asked(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[str] = []
    monkeypatch.setattr(on_gpu.Session, "run", lambda session, name, *command: commands.append(" ".join(command)))
    monkeypatch.setattr(on_gpu, "killed_process_is_cleaned_up", lambda gpu: (True, "cleaned up"))
    monkeypatch.setattr(on_gpu.nvml, "visible_gpu_count", lambda: 1)
    code = on_gpu.main(["gpu=emulated_a40", f"output_dir={tmp_path}", *asked])
    assert code == 0
    setting = [command for command in commands if "probe=true" in command or "sets_clocks=true" in command]
    assert len(setting) == 2 * len(asked)
    (own_clock,) = (command for command in commands if "own_clock.py" in command)
    assert own_clock == "benchmarks/own_clock.py gpu=emulated_a40"
    training, shared = (command for command in commands if "train.py" in command)
    assert ("gpu=emulated_a100" in training) == (not asked)
    assert "trainer.share_gpus=true" in shared  # which sets no clocks, see `check_shared_gpus`
    assert "gpu=" not in shared
    assert ("skipped kill: it changes clocks: set_clocks=true" in capsys.readouterr().out) == (not asked)


@pytest.mark.parametrize("arguments", [[], ["instruction_ms=5", "repeats=60"]])
def test_energy_at_the_own_clock_is_that_of_steady_loads(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert own_clock.main(["gpu=emulated_a40", "seconds=2", *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    config = load_gpu_config("emulated_a40")
    computing_w = config.static_power_w + config.dynamic_power_w
    assert (result["gpu"], result["clock_mhz"]) == ("NVIDIA A40 (emulated, virtual time)", config.top_clock_mhz)
    assert result["idle_w"] == pytest.approx(config.idle_power_w, rel=0.01)
    assert result["busy_w"] == pytest.approx(min(computing_w, config.power_limit_w), rel=0.02)
    assert result["idle_w"] < result["blocked_w"] < result["busy_w"]
    assert result["attributed_to_counted_percent"] == pytest.approx(0, abs=0.5)
    assert result["verdict"] == "as under steady loads"


def test_energy_that_is_attributed_wrongly_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = own_clock.mean_powers
    monkeypatch.setattr(
        own_clock,
        "mean_powers",
        lambda *given: {kind: replace(power, power_w=1.2 * power.power_w) for kind, power in right(*given).items()},
    )
    assert own_clock.main(["gpu=emulated_a40", "seconds=2"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"] == "NOT AS UNDER STEADY LOADS"
    assert result["attributed_to_counted_percent"] == pytest.approx(20, abs=1)
    assert own_clock.main(["gpu=emulated_a40", "seconds=0.1"]) == 2
    assert "Use more seconds" in capsys.readouterr().err


def test_pipelines_to_judge_the_planner_on_are_made_without_measured_profiles() -> None:
    made = evaluation_set(["emulated a40 7+1 8x12"])
    assert [pipeline.name for pipeline in made] == ["emulated a40 7+1 8x12"]
    assert made[0].schedule.num_microbatches == 12
    profile, power_w = emulate("a40", [1.0, 1.2])
    assert profile.num_stages == 2
    assert 50 < power_w < 100


def test_the_ablation_judges_every_variant_by_the_best_bound() -> None:
    (pipeline,) = evaluation_set(["emulated a40 7+1 8x12"])
    some = {name: planner_ablation.variants()[name] for name in ("fast", "best")}
    results = planner_ablation.measure(pipeline, some, 1)
    for result in results.values():
        assert min(result.gaps) >= 0
        assert max(result.gaps) <= max(result.own_gaps) + 1e-9
        assert result.saving > 10
    assert sum(results["best"].gaps) <= sum(results["fast"].gaps)


def test_published_tables_stand_beside_what_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, power_w = emulate("a40", [1.0, 1.2])
    profile.to_frame().to_csv(tmp_path / "made.csv", index=False)
    monkeypatch.setattr(perseus_tables, "MEASURED_DIR", tmp_path)
    made = perseus_tables.Published("made.csv", power_w, {4: 10.0}, {4: 11.0}, (20.0, 10.0))
    monkeypatch.setattr(perseus_tables, "NUM_PIPELINES", (16,))
    monkeypatch.setattr(perseus_tables, "NUM_PERSEUS_PLANS", 10)
    monkeypatch.setattr(perseus_tables, "PUBLISHED", {"made": made, "absent": replace(made, file="absent.csv")})
    assert perseus_tables.main(["microbatches=4", "json=true"]) == 0
    result = json.loads(capsys.readouterr().out)
    ((row,),) = result["table"].values()
    assert (row["EnvPipe published"], row["Perseus published"]) == (10.0, 11.0)
    assert 0 < row["EnvPipe"] <= row["ours"] <= row["bound"]
    assert row["Perseus"] <= row["ours at Perseus's time"] + 1e-9
    assert [*result["zeus"]["made"]["4"]] == ["global", "per stage"]
    for savings in result["stragglers"]["made"].values():
        beside = zip(savings[perseus_tables.THEN], savings["Perseus"], strict=True)
        assert all(ours >= perseus - 1e-6 for ours, perseus in beside)
        assert savings["ours"][0] == pytest.approx(row["ours"])
        assert savings["ours"][4] > savings["ours"][0]  # beside a straggler slower plans save more
        assert savings["EnvPipe"][10] < savings["EnvPipe"][0]  # while a fixed plan waits
    assert perseus_tables.main([f"output_dir={tmp_path / 'out'}", "microbatches=4"]) == 0
    printed = capsys.readouterr().out
    assert "| 4 | 10.0 |" in printed
    assert "| WRN101-8 | 15.3 (+7.6) | 17.9 (+14.3) |" in printed  # as published
    assert (tmp_path / "out" / "stragglers.png").exists()
    assert perseus_tables.main(["output=x"]) == 2


def test_queues_by_direction_cost_no_time_and_one_queue_for_all_does() -> None:
    limit = sys.getrecursionlimit()
    (lost,) = rendezvous.losses("interleaved_1f1b", 4, 8, [1.1])
    assert sys.getrecursionlimit() == limit  # others would run into the end of the stack
    assert lost["rank"] > 3
    assert lost["direction"] == 0


def test_a_cluster_of_emulated_gpus_trains_in_cloned_processes() -> None:
    settings = ["stages=2", "microbatches=3", "replicas=2", "steps=2", "width=8", "gpu.forward_s=0.002"]
    output = run_script(ROOT / "benchmarks" / "emulated_cluster.py", *settings).stdout
    (line,) = (line for line in output.splitlines() if line.startswith("{"))
    result = json.loads(line)
    assert (result["pipeline"], result["processes"]) == ("2 stages x 3 microbatches x 2 replicas", 4)
    assert result["emulated_iteration_time_s"] > 0
    # forks share what was imported; of their own, the processes would have four times as much as one
    assert 0 < result["memory_mb"] < 2 * 400


def test_the_table_of_models_has_a_row_for_each_training() -> None:
    equal = Outcome(CASES["llama"], 2, "equal", "", 3.1e-8, 0.0, 0.05, 0.6, 1.23)
    refused = Outcome(CASES["unet"], 4, "refused", "Do not: a | b.\nNever. " + 200 * "x")
    rows = [model_zoo.row(outcome) for outcome in (equal, refused)]
    assert rows[0] == "| llama | transformers | 2 | equal | 3.1e-08 | 0.0e+00 | 5.0 % | 60.0 % | 1.2 |"
    assert rows[1].startswith("| unet | own | 4 | refused: Do not: a \\| b. Never. xxx")
    assert rows[1].endswith("x... |  |  |  |  |  |")
    page = model_zoo.page([equal, refused], rows, 8)
    assert "Of 2 trainings: 1 equal, 1 refused." in page
    assert page.endswith("\n".join(rows) + "\n")


def test_a_model_that_is_not_in_the_zoo_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert model_zoo.main(["models=unicorn"]) == 2
    assert "No model is called 'unicorn'. There are " in capsys.readouterr().err
