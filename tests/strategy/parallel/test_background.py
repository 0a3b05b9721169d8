"""Threads that move data do not interrupt those that compute."""

import os
import sys
import threading
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_pfo.strategy.parallel.groups import Groups, in_background
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="policies of threads are those of Linux")


def policy_of_new_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


@contextmanager
def policy(number, priority=0):
    """Another policy for this thread, as whoever starts the tests may have chosen one."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, number, os.sched_param(priority))
    except PermissionError:
        pytest.skip("this process may not choose its policy")
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


def test_new_threads_are_in_the_background_and_this_one_is_not():
    with policy(os.SCHED_OTHER):
        with in_background():
            assert policy_of_new_thread() == os.SCHED_BATCH
        assert os.sched_getscheduler(0) == policy_of_new_thread() == os.SCHED_OTHER
        with pytest.raises(KeyError), in_background():
            raise KeyError
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_policy_that_somebody_chose_is_kept():
    with policy(os.SCHED_BATCH):
        with in_background():
            assert policy_of_new_thread() == os.SCHED_BATCH
        assert os.sched_getscheduler(0) == os.SCHED_BATCH


def test_where_policies_cannot_be_chosen_all_goes_on(monkeypatch):
    def refuse(*arguments):
        raise PermissionError

    with policy(os.SCHED_OTHER):
        with monkeypatch.context() as patch:
            patch.setattr(os, "sched_setscheduler", refuse)
            with in_background():
                assert policy_of_new_thread() == os.SCHED_OTHER
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


def check():
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    made = Groups("cpu", timedelta(seconds=60)).of([0, 1])
    started = set(tasks.iterdir()) - before
    assert started
    assert {os.sched_getscheduler(int(thread.name)) for thread in started} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    dist.barrier(made)


def test_threads_of_groups_are_in_the_background():
    with policy(os.SCHED_OTHER):  # which the ranks get
        run_ranks(check, 2)
