"""Settings of all tests."""

import threading
import time

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    """A test ends the threads that it starts; one that is ending may take its time."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("pfo-")]
    deadline_s = time.monotonic() + 10
    for thread in left:
        thread.join(max(0, deadline_s - time.monotonic()))
    assert not [thread.name for thread in left if thread.is_alive()]
