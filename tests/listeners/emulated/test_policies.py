"""What training under other systems' plans measures on emulated GPUs is what is predicted: see scripts/policies.py."""

from pathlib import Path

from tests.launch import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "policies.py"


def test_measured_is_predicted_for_every_policy(tmp_path):
    checked = run_script(SCRIPT, tmp_path).stdout.splitlines()
    # EnvPipe's type, reconfiguration and order, each with each; with all clocks at the top there is one
    both = [f"envpipe_{kind}_{how}" for kind in ("uniform", "envelope") for how in ("default", "greedy", "balanced")]
    envpipe = {f"{one} 1f1b" for one in both} | {f"{one}_early_forwards envpipe" for one in both}
    others = {"envpipe_baseline 1f1b", "zeus_global 1f1b", "zeus_per_stage_power_limit 1f1b", "perseus 1f1b"}
    assert {*checked[1:]} == envpipe | others
    assert checked[0].startswith("online after")
