import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.core.errors import ConfigurationError, PfoError
from lightning_pfo.core.ranges import (
    CLOCK,
    ENERGY,
    ERROR,
    POWER,
    TIME,
    check_above,
    check_between,
    check_switches,
    check_whole,
    items,
)

NO_NUMBERS = [None, True, False, "1", b"1", [1], (1,), {1: 1}, 1j, object(), np.bool_(True), np.array([1.0, 2.0])]


@pytest.mark.parametrize(
    "value", [*NO_NUMBERS, math.nan, math.inf, -math.inf, -1.0, 1e278, pytest.param(10**8000, id="long")]
)
@pytest.mark.parametrize("quantity", [CLOCK, TIME, ENERGY, POWER])
def test_what_is_no_number_of_the_range_is_not_allowed(quantity, value):
    assert not quantity.allows(value)
    with pytest.raises(ConfigurationError, match=r"Each of values must be .* number 1 is") as error:
        quantity.column("values", [100, value])
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("value", [1410, np.int64(1410), np.uint16(1410)])
def test_numbers_of_any_library_are_numbers(value):
    assert all(quantity.allows(value) for quantity in (CLOCK, TIME, ENERGY, POWER, ERROR))
    assert CLOCK.column("clocks", np.array([value])) == (1410,)
    assert isinstance(CLOCK.column("clocks", [value])[0], int)
    assert TIME.column("times", [np.float32(0.5), Fraction(1, 4), value]) == (0.5, 0.25, 1410.0)
    assert not CLOCK.allows(float(value))


def test_ranges_say_their_units():
    assert str(TIME) == "a positive number of seconds (1e-09 to 1e+06 s)"
    assert str(CLOCK) == "a clock in whole MHz (1 to 100,000 MHz)"


@pytest.mark.parametrize("values", [None, 5, 5.0, "12", b"12", {1: 2}, {1, 2}, np.array(5.0), iter([1])])
def test_what_has_no_order_is_no_sequence(values):
    with pytest.raises(ConfigurationError, match="must be a list or tuple; got"):
        items("values", values)


@given(st.one_of(st.sampled_from(NO_NUMBERS), st.text(), st.binary(), st.floats(), st.integers()))
def test_settings_of_any_type_pass_or_are_refused(value):
    for check, arguments in ((check_between, (0, 1)), (check_above, (0,)), (check_whole, (0, 5))):
        try:
            check("setting", value, *arguments)
        except PfoError:
            continue
        assert isinstance(value, (int, float))
        assert 0 <= value < math.inf


@pytest.mark.parametrize("value", ["no", "", None, 2, 1.0, [], torch.tensor(True)])
def test_switches_are_true_or_false(value):
    check_switches(check_loss=True, compile=False, precise_gradients=0)
    with pytest.raises(ConfigurationError, match=r"^compile is True or False; got "):
        check_switches(check_loss=True, compile=value)
