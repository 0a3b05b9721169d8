"""Groups are made once, with the timeout that was asked for, and destroyed together when nobody uses them.

In processes of their own: those of a test process that has trained something could not train (CUDA builds of torch).
"""

from pathlib import Path

from tests.launch import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "groups.py"


def test_all_know_what_each_has_told():
    run_script(SCRIPT, "check_spread", 5)


def test_groups_are_made_once_and_go_with_their_users():
    run_script(SCRIPT, "check", 4)


def test_groups_are_made_by_processes_that_are_in_different_numbers_of_them():
    run_script(SCRIPT, "check_uneven", 4)


def test_fits_one_after_the_other_leave_no_groups_behind():
    run_script(SCRIPT, "fit_again_and_again", 4)
