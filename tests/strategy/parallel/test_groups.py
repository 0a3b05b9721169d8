"""Groups are made once, with the timeout that was asked for, and destroyed together when nobody uses them.

In processes of their own: those of a test process that has trained something could not train (CUDA builds of torch).
"""

from pathlib import Path

import pytest
import torch

from lightning_pfo.strategy.parallel.groups import as_bytes, content_of
from tests.launch import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "groups.py"


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(3.0), torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3)[:1, 1], torch.zeros(0, 3)],
    ids=["number", "matrix", "column of one row", "nothing"],
)
def test_bytes_are_the_memory_of_any_contiguous_tensor(tensor):
    data = as_bytes(tensor)
    assert len(data) == tensor.nbytes
    data.zero_()
    assert not tensor.any()


def test_layers_may_resize_a_buffer_whose_bytes_were_read():
    buffer = torch.tensor([1.0, 2.0]).to(torch.bfloat16)
    assert content_of(buffer).tobytes() == buffer.view(torch.int16).numpy(force=True).tobytes()
    assert content_of(torch.zeros(0, 3)).size == 0
    conjugate = torch.tensor([1 + 2j]).conj()
    assert content_of(conjugate).tobytes() == content_of(torch.tensor([1 - 2j])).tobytes()
    other = torch.zeros(2)
    content_of(other)
    other.resize_(8)


def test_all_know_what_each_has_told():
    run_script(SCRIPT, "check_spread", 5)


def test_groups_are_made_once_and_go_with_their_users():
    run_script(SCRIPT, "check", 4)


def test_groups_are_made_by_processes_that_are_in_different_numbers_of_them():
    run_script(SCRIPT, "check_uneven", 4)


def test_fits_one_after_the_other_leave_no_groups_behind():
    run_script(SCRIPT, "fit_again_and_again", 4)
