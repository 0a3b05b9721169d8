"""What layers log and measure by themselves, and what hooks keep of them, is that of one device on every rank."""

import json
from pathlib import Path

import pytest

from tests.launch import run_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saying_layers")
    run_script(Path(__file__).parents[1] / "scripts" / "saying_layers.py", folder)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("1_0", "2_0", "2_1")}


@pytest.mark.parametrize(
    "case",
    ["logs", "measures", "listens", "listens within", "listens globally", "listens around", "listens in layers"],
)
def test_what_is_said_of_layers_is_that_of_one_device(trained, case):
    expected = trained["1_0"][case]
    assert len(expected) > 6
    for rank in ("2_0", "2_1"):
        assert trained[rank][case] == pytest.approx(expected, rel=2e-5, abs=1e-6)
