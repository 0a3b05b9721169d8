"""Steps that look at values of layers, and fail on the zeros of a trace: they run, or the line is named."""

from pathlib import Path

import pytest

from tests.launch import of_ranks, run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "zeros.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zeros")
    run_script(SCRIPT, folder)
    return of_ranks(folder, 2)


CASES = ["divides", "asserts", "takes_logarithms", "asks_for_variety", "divides_by_deviation"]


@pytest.mark.parametrize("case", [*CASES, *(f"{case} in layer" for case in [*CASES, "doubles", "refuses_both"])])
def test_a_step_that_fails_on_zeros_trains_as_on_one_device(ranks, case):
    for found in ranks:
        loss, expected = found[case]
        assert loss == pytest.approx(expected, rel=1e-6)


def test_a_loop_that_has_no_end_on_zeros_is_an_error_with_the_line(ranks):
    for found in ranks:
        assert "x = x * 2" in found["doubles"]
        assert found["doubles"].startswith("DeviationError")


def test_a_step_that_fails_on_all_that_stands_for_values_is_an_error_with_the_line(ranks):
    for found in ranks:
        assert found["refuses_both"].startswith("ConfigurationError: A step is traced on numbers")
        assert "'module.layers.2' is needed" in found["refuses_both"]
        assert "neither zeros nor ones" in found["refuses_both"]
        assert 'raise ValueError("neither' in found["refuses_both"]
