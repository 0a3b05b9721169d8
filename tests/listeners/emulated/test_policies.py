"""What training under other systems' plans measures on emulated GPUs is what is predicted: see scripts/policies.py."""

from pathlib import Path

from tests.launch import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "policies.py"


def test_measured_is_predicted_for_every_policy(tmp_path):
    checked = run_script(SCRIPT, tmp_path, timeout_s=120).stdout.splitlines()
    reconfigured = [f"envpipe_{kind}_{how} 1f1b" for kind in ("uniform", "envelope") for how in ("greedy", "balanced")]
    assert {*reconfigured, "envpipe_baseline 1f1b", "envpipe_uniform_default 1f1b", "perseus 1f1b"} <= {*checked}
    assert {f"envpipe_envelope_{how}_early_forwards envpipe" for how in ("default", "balanced")} <= {*checked}
    assert any(line.startswith("online after") for line in checked)
    assert len(checked) == 14
