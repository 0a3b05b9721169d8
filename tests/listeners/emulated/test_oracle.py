"""What training measures on emulated GPUs is what the planner predicts, to rounding: see scripts/oracle.py."""

from pathlib import Path

import pytest

from tests.launch import run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "oracle.py"
CHECKS = [
    *("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"),
    *("zbv", "dualpipev", "envpipe", "envpipe:1,0", "latency", "limits", "replicas", "tensor parallel"),
    *("transfers zbv", "transfers interleaved_1f1b", "transfers 1f1b"),
]


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    return run_script(SCRIPT, tmp_path_factory.mktemp("oracle")).stdout.splitlines()


@pytest.mark.parametrize("what", CHECKS)
def test_measured_is_predicted(checked, what):
    assert what in checked
