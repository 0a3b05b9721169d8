"""`lightning-pfo compare`."""

import json

import pytest

from lightning_pfo.cli import main
from lightning_pfo.planner import write_profile
from tests.planner.conftest import physical_profile


@pytest.fixture
def profile_csv(tmp_path):
    profile = physical_profile([0.02, 0.027, 0.024], clocks=(1400, 1250, 1100, 950))
    write_profile(tmp_path / "p.csv", profile.to_frame().assign(gpu="A100 (emulated)").to_dict("records"))
    return tmp_path / "p.csv"


ARGUMENTS = ["num_microbatches=4", "p2p_blocking_power_w=80", "num_plans=4"]


def test_one_json_object_keyed_by_policy(profile_csv, capsys):
    assert main(["compare", f"profile={profile_csv}", *ARGUMENTS, "json=true"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert {"max_frequency", "envpipe_envelope_balanced", "zeus_global", "perseus", "ours"} <= {*figures}
    for row in figures.values():
        assert {"iteration_time_s", "iteration_energy_j", "saving_percent", "slowdown_percent"} <= {*row}
    assert figures["ours"]["saving_percent"] > figures["envpipe_envelope_balanced"]["saving_percent"] - 1e-9


def test_tables_and_pictures_of_several_profiles(profile_csv, tmp_path, capsys):
    other = tmp_path / "other" / "p.csv"
    other.parent.mkdir()
    other.write_text(profile_csv.read_text())
    out = tmp_path / "out"
    some = ["policies=[perseus, envpipe_envelope_balanced_early_forwards]", f"output_dir={out}"]
    assert main(["compare", f"profile=[{profile_csv},{other}]", *ARGUMENTS, *some]) == 0
    text = " ".join(capsys.readouterr().out.split())  # long paths wrap titles
    for word in ("perseus", "ours_early_forwards", "A100 (emulated)", "3 stages x 4 microbatches", f"written to {out}"):
        assert word in text
    assert {path.name for path in out.iterdir()} == {"comparison.json", "comparison_0_p.png", "comparison_1_p.png"}
    assert (out / "comparison_0_p.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((out / "comparison.json").read_text())
    assert {*figures} == {str(profile_csv), str(other)}
    assert {*figures[str(other)]} >= {"perseus", "ours"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("profile=[]", "profile is the path of a profile, or a list of such"),
        ("policies=[perseus,zeus]", "got 'zeus'."),
        ("max_in_flight=-1", "max_in_flight is a whole number between 1"),
        ("num_plans=1", "num_plans must be at least 2"),
        ("profil=x", "There is no setting 'profil'. Did you mean profile?"),
    ],
)
def test_what_cannot_be_compared_is_said(profile_csv, tmp_path, capsys, given, message):
    assert main(["compare", f"profile={profile_csv}", *ARGUMENTS, f"output_dir={tmp_path / 'out'}", given]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_plan_takes_the_policys_own_choice(profile_csv, tmp_path, capsys):
    arguments = ["plan", f"profile={profile_csv}", *ARGUMENTS, f"output_dir={tmp_path / 'out'}"]
    assert main([*arguments, "policy=envpipe_uniform_default"]) == 0
    text = capsys.readouterr().out
    assert "1 plan of envpipe_uniform_default" in text
    assert "own" in text
    assert main([*arguments, "policy=persues"]) == 2
    assert "Did you mean perseus?" in capsys.readouterr().err
