import subprocess
import sys

import pytest

from lightning_pfo.cli import main
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner import load_frontier, write_profile
from tests.example_scripts import ROOT


@pytest.fixture
def profile_csv(tmp_path):
    rows = [
        {
            "stage": stage,
            "instruction": kind,
            "frequency": mhz,
            "time": work * 1400 / mhz,
            "energy": work * mhz / 7,
            "gpu": "A100 (emulated)",
        }
        for stage, speed in enumerate((1.0, 1.2))
        for kind, work in (("forward", 0.02 * speed), ("backward", 0.04 * speed))
        for mhz in (1400, 1200, 1000, 800)
    ]
    write_profile(tmp_path / "profile.csv", rows)
    return tmp_path / "profile.csv"


def test_plan_writes_everything_as_a_program(profile_csv, tmp_path):
    out = tmp_path / "out"
    result = subprocess.run(
        [sys.executable, "-m", "lightning_pfo", "plan", f"profile={profile_csv}", "num_microbatches=4",
         "p2p_blocking_power_w=50", f"output_dir={out}", "num_plans=7", "deadlines_s=[0.4,0.5]", "select=1.1x"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "top clocks" in result.stdout
    assert "1.1x" in result.stdout
    assert "A100 (emulated)" in result.stdout
    frontier = load_frontier(out)
    plan_files = {f"freqs_pipeline_{i:05d}.py" for i in range(len(frontier.plans))}
    pictures = {"frontier.png", "timeline_fastest.png", "timeline_chosen.png"}
    assert {path.name for path in out.iterdir()} == plan_files | pictures | {"frontier.csv", "frontier.json"}


def test_energies_of_zero_are_planned_and_drawn(profile_csv, tmp_path, capsys):
    header, *rows = profile_csv.read_text().splitlines()
    energy = header.split(",").index("energy")
    zero = [",".join("0" if place == energy else cell for place, cell in enumerate(row.split(","))) for row in rows]
    (tmp_path / "zero.csv").write_text("\n".join([header, *zero]) + "\n")
    options = [f"profile={tmp_path / 'zero.csv'}", "num_microbatches=4", "p2p_blocking_power_w=0", "num_plans=3"]
    assert main(["plan", *options, f"output_dir={tmp_path / 'plan'}", "least_dwell_s=0.01"]) == 0
    assert "0.00 %" in capsys.readouterr().out
    assert main(["compare", *options, f"output_dir={tmp_path / 'compare'}"]) == 0


def test_plan_reckons_with_the_times_of_transfers_in_a_profile(profile_csv, tmp_path):
    options = ["num_microbatches=4", "p2p_blocking_power_w=50", "num_plans=3"]
    header, *rows = profile_csv.read_text().splitlines()
    (tmp_path / "slow.csv").write_text("\n".join([f"{header},transfer_time", *(f"{row},0.01" for row in rows)]) + "\n")
    times_s = []
    for name in ("profile", "slow"):
        assert main(["plan", f"profile={tmp_path / name}.csv", f"output_dir={tmp_path / name}", *options]) == 0
        times_s.append(load_frontier(tmp_path / name).fastest.iteration_time_s)
    # Of a forward at the beginning and a backward at the end the pipeline waits, whatever happens between.
    assert times_s[1] >= times_s[0] + 0.02 - 1e-9


def test_beside_a_straggler_slower_plans_are_made_and_shown(tmp_path, capsys):
    rows = [
        {"stage": stage, "instruction": kind, "frequency": mhz, "time": time_s, "energy": time_s * power_w}
        for stage in range(2)
        for kind, work in (("forward", 0.02), ("backward", 0.04))
        for mhz in (1400, 1000, 800)
        for time_s, power_w in [(work * 1400 / mhz, 100 + 200 * (mhz / 1400) ** 3)]
    ]
    write_profile(tmp_path / "profile.csv", rows)
    options = ["num_microbatches=3", "p2p_blocking_power_w=90", "num_plans=5", f"output_dir={tmp_path / 'out'}"]
    assert main(["plan", f"profile={tmp_path / 'profile.csv'}", *options, "select=T'=2x"]) == 0
    assert "It has no number: it pays beside a straggler only, and needs " in capsys.readouterr().out
    assert load_frontier(tmp_path / "out").straggler_plans


def test_help_of_the_program_and_of_a_command(capsys):
    assert main(["--help"]) == 0
    assert "plan" in capsys.readouterr().out
    assert main(["plan", "--help"]) == 0
    text = capsys.readouterr().out
    for setting in ("profile", "num_microbatches", "deadlines_s", "select"):
        assert setting in text
    assert main([]) == 2


def test_plan_takes_limits_and_powers_by_clock_and_thins_what_it_writes(profile_csv, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [f"profile={profile_csv}", "num_microbatches=4", f"output_dir={out}", "deadlines_s=[0.41]", "every=50"]
    limits = ["p2p_blocking_power_w={1400: 60, 800: 40}", "switch_latency_s=0.005", "least_dwell_s=0.01"]
    assert main(["plan", *arguments, *limits, "all_pictures=true", "select=T'=1.2x"]) == 0
    assert "times per iteration; few changes cost it" in capsys.readouterr().out
    frontier = load_frontier(out)
    assert 3 <= len(frontier.plans) <= 5
    assert (out / "timelines.png").exists()
    assert (out / "energy_valleys.png").exists()
    assert any(plan.wait_clocks for plan in frontier.plans)
    assert (frontier.switch_latency_s, frontier.least_dwell_s) == (0.005, 0.01)
    assert frontier.blocking[0].powers_w == (60, 40)


def test_all_noise_of_a_profile_is_in_a_file_and_nothing_of_an_earlier_plan_stays(profile_csv, tmp_path, capsys):
    out, clean = tmp_path / "out", profile_csv.read_text()
    arguments = [f"profile={profile_csv}", "num_microbatches=4", "p2p_blocking_power_w=1", "num_plans=2"]
    header, *rows = clean.splitlines()
    swapped = [row.replace(",1200,", ",1201,").replace(",1400,", ",1200,").replace(",1201,", ",1400,") for row in rows]
    profile_csv.write_text("\n".join([header, *swapped]))
    assert main(["plan", *arguments, f"output_dir={out}"]) == 0
    heading, *notes = (out / "noise.txt").read_text().splitlines()
    printed = capsys.readouterr().out
    assert f"{len(notes)} findings of noise" in heading
    assert sum("no faster at 1400 than at 1200 MHz" in note for note in notes) == 4
    assert [note in printed for note in notes] == [True] * 3 + [False] * (len(notes) - 3)
    profile_csv.write_text(clean)
    (out / "timelines.png").write_text("drawn by an earlier plan with all_pictures=true")
    assert main(["plan", *arguments, f"output_dir={out}"]) == 0
    assert not (out / "noise.txt").exists()
    assert not (out / "timelines.png").exists()


def test_an_order_of_ones_own_says_how_many_microbatches_there_are(profile_csv, tmp_path, capsys):
    order = tmp_path / "mine.txt"
    order.write_text("\n".join(" ".join(map(str, row)) for row in make_schedule("gpipe", 2, 3).orders))
    arguments = [f"profile={profile_csv}", "p2p_blocking_power_w=50", "num_plans=2", f"output_dir={tmp_path / 'out'}"]
    assert main(["plan", *arguments, f"schedule=file:{order}"]) == 0
    assert load_frontier(tmp_path / "out").schedule.num_microbatches == 3
    assert main(["plan", *arguments, f"schedule=file:{order}", "num_microbatches=4"]) == 2
    assert main(["plan", *arguments]) == 2
    assert "give num_microbatches, e.g." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["plan", "profile=p", "output_dir=o", "num_microbatches=4", "select=cheap"],
            "Cannot select a plan by 'cheap'",
        ),
        (["pln"], "Unknown command 'pln'. Did you mean plan? Commands: plan, "),
        (["plan"], "Give profile=..., output_dir=..."),
        (
            ["plan", "num_microbatch=4"],
            "no setting 'num_microbatch'. Did you mean num_microbatches? Available: profile, ",
        ),
        (["plan", "profile.csv"], "Settings read key=value, got 'profile.csv'"),
        (["plan", "profile=p", "output_dir=o", "num_microbatches=many"], "got num_microbatches=many"),
        (["plan", "profile=p", "output_dir=o", "num_microbatches=4", "deadlines_s=[1"], "read as YAML"),
        (["plan", "profile=p", "output_dir=o", "num_microbatches=4", "deadlines_s=soon"], "deadlines_s"),
        (["plan", "profile=${p}", "output_dir=o", "num_microbatches=4"], "profile"),
        (["plan", "profile=p", "output_dir=o", "num_microbatches=4"], "There is no profile at p"),
        (["plan", "profile=p", "output_dir=o", "num_microbatches=4", "deadlines_s=2.9"], "There is no profile at p"),
    ],
)
def test_errors_are_one_paragraph_and_status_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_cannot_be_selected_leaves_nothing_behind(profile_csv, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [f"profile={profile_csv}", "num_microbatches=4", "p2p_blocking_power_w=50", f"output_dir={out}"]
    assert main(["plan", *arguments, "select=0.5x"]) == 2
    assert "iteration times range from" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    "command", [["plan", "profile=nowhere.csv", "num_microbatches=4"], ["sample", "frontier=nowhere"]]
)
def test_a_folder_that_cannot_be_made_is_named_before_anything_is_read(profile_csv, capsys, command):
    assert main([*command, f"output_dir={profile_csv}"]) == 2
    error = f"got '{profile_csv}' ({profile_csv}: File exists). Give another path.\n"
    assert capsys.readouterr().err == f"lightning-pfo: error: output_dir is a folder that you may write to; {error}"


def test_ctrl_c_ends_a_command_without_a_traceback(profile_csv, tmp_path, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt  # as Python does, but for a test run that itself ignores SIGINT, as in the background

    monkeypatch.setattr("lightning_pfo.cli.plan.plan_frontier", interrupt)
    arguments = [f"profile={profile_csv}", "num_microbatches=4", f"output_dir={tmp_path / 'out'}"]
    assert main(["plan", *arguments]) == 130
    assert capsys.readouterr().err.strip().endswith("Interrupted.")
    assert not (tmp_path / "out").exists()


def test_names_may_hold_what_rich_and_matplotlib_read_as_markup(profile_csv, tmp_path, capsys):
    profile_csv.write_text(profile_csv.read_text().replace("A100 (emulated)", r"GPU [/x] $\frac$ [bold]"))
    out = tmp_path / "out[/a]"
    arguments = [f"profile={profile_csv}", "num_microbatches=4", "p2p_blocking_power_w=50", "num_plans=3"]
    assert main(["plan", *arguments, f"output_dir={out}", "all_pictures=true"]) == 0
    printed = capsys.readouterr().out
    assert r"GPU [/x] $\frac$ [bold]" in " ".join(printed.split())
    assert f"written to {out}" in printed
    assert (out / "energy_valleys.png").exists()
    assert main(["sample", f"frontier={out}", f"output_dir={out}/few"]) == 0
    assert f"plans written to {out}/few" in capsys.readouterr().out
    before = (out / "frontier.json").read_bytes()
    assert main(["sample", f"frontier={out}/frontier.json", f"output_dir={out}/few/.."]) != 0
    assert "where the frontier is" in capsys.readouterr().err.replace("\n", " ")
    assert (out / "frontier.json").read_bytes() == before


def test_a_folder_in_the_place_of_a_file_is_named_before_planning(profile_csv, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lightning_pfo.cli.plan.plan_frontier", lambda *_, **__: pytest.fail("it was planned"))
    (tmp_path / "out" / "frontier.png").mkdir(parents=True)
    assert main(["plan", f"profile={profile_csv}", "num_microbatches=4", f"output_dir={tmp_path / 'out'}"]) == 2
    assert "out/frontier.png is a folder). Give another path." in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[" * 100_000, '{"blocked": ' + "[" * 100_000])
def test_a_power_file_of_brackets_is_no_power_file(content, profile_csv, tmp_path, capsys):
    (tmp_path / "power.json").write_text(content)
    arguments = [f"profile={profile_csv}", "num_microbatches=4", f"output_dir={tmp_path / 'out'}"]
    assert main(["plan", *arguments, f"p2p_blocking_power_w={tmp_path / 'power.json'}"]) == 2
    assert "is neither a number nor a file that holds blocking powers" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["x" * 600_000],
        ["plan", "x" * 600_000],
        ["plan", f"{'x' * 600_000}=1"],
        ["plan", f"profile={'x' * 600_000}", "output_dir=o", "num_microbatches=4"],
        ["plan", "profile=p", f"output_dir={'x' * 600_000}", "num_microbatches=4"],
        ["plan", "profile=p", "output_dir=o", f"num_microbatches={'x' * 600_000}"],
        ["plan", "profile=p", "output_dir=o", "num_microbatches=4", f"select={'x' * 600_000}"],
        ["plan", "profile=p", "output_dir=o", "num_microbatches=4", f"deadlines_s=[{'1,' * 5_000}"],
        ["gpu", f"gpu={'x' * 600_000}"],
        ["gpu", "gpu=emulated_a40", f"write={'x' * 600_000}"],
    ],
)
def test_an_error_repeats_no_more_than_a_screenful(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "..." in error
    assert len(error) < 4000


def test_the_demo_becomes_its_script(monkeypatch):
    from lightning_pfo.cli import demo

    ran = []
    monkeypatch.setattr(demo.os, "execv", lambda *arguments: ran.append(arguments))  # else these tests would be it
    demo.run(demo.Settings(output_dir="there", gpu="emulated_h100"))
    ((executable, command),) = ran
    assert executable == command[0] == sys.executable
    assert command[1:] == [str(demo.demo_script()), "plan=auto", "gpu=emulated_h100", "output_dir=there"]


def test_the_demo_is_found_in_a_clone_and_packed_into_wheels():
    from lightning_pfo.cli.demo import demo_script

    assert demo_script().read_text().startswith('"""Train a byte-level language model')
    included = (ROOT / "pyproject.toml").read_text().partition("[tool.hatch.build.targets.wheel.force-include]")[2]
    assert '"examples/gpt" = "lightning_pfo/examples/gpt"' in included.partition("[tool.")[0]
