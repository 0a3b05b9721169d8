import math

import pytest

from lightning_pfo.client.pace import Pace


def pace_after(step_s, round_trip_s=0.001):
    """Of a rank that begins step 2 at 100 s, and has asked in step 1 last."""
    pace = Pace()
    pace.answered(round_trip_s)
    pace.begin(1, 100.0 - step_s)
    pace.asked(100.0 - step_s / 2)
    pace.begin(2, 100.0)
    return pace


def test_long_steps_are_asked_for_one_by_one_just_in_time():
    pace = pace_after(step_s=1.0)
    assert pace.ahead == 1
    assert pace.ask_at_s == pytest.approx(100.0 + 1.0 - 0.02)
    pace.asked(pace.ask_at_s)
    assert pace.ask_at_s == math.inf  # until step 3 begins


def test_short_steps_are_asked_for_several_at_a_time():
    pace = pace_after(step_s=0.01)
    assert pace.ask_at_s == pytest.approx(100.0 - 0.005 + 0.1)
    assert pace.ahead == 1 + 12  # as begin in 0.1 s and the time for an answer


def test_a_server_that_answers_slowly_is_asked_seldom():
    pace = pace_after(step_s=1.0, round_trip_s=0.1)
    assert pace.ask_at_s == pytest.approx(100.0 - 0.5 + 2.0)
    assert pace.ahead == 1 + 3


def test_nothing_is_known_of_the_first_step():
    pace = Pace()
    pace.begin(0, 100.0)
    assert (pace.ahead, pace.ask_at_s) == (1, math.inf)
