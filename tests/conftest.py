"""Settings of all tests."""

import gc
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import settings

from tests.launch import start_script_server

# How long an example takes says how busy the machine is; and the same tests run each time, on every machine.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("searching", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("PFO_HYPOTHESIS", "repeatable"))


LONGEST = [
    "strategy/engine/test_varying_sizes.py",
    "experiment/test_run_integration.py",
    "strategy/step/test_memory.py",
    "strategy/trainer/test_launching.py",
    "strategy/model/tracing/test_every_cut.py",
    "strategy/test_zoo.py",
    "strategy/model/test_huggingface.py",
    "strategy/trainer/test_pipeline_training.py",
    "strategy/trainer/test_promises.py",
    "strategy/parallel/test_three_dimensions.py",
    "strategy/state/test_resuming.py",
    "listeners/emulated/test_oracle.py",
    "callbacks/test_interrupted.py",
    "callbacks/test_optimizer.py",
    "callbacks/test_clock_safety.py",
    "loops/test_launching.py",
    "experiment/test_reproducibility.py",
    "strategy/step/test_left_behind.py",
    "strategy/trainer/test_options.py",
    "strategy/parallel/test_data_parallel.py",
    "experiment/test_config.py",
    "strategy/model/test_huggingface_options.py",
    "strategy/engine/test_in_flight.py",
    "strategy/engine/test_all_schedules.py",
    "loops/test_users.py",
    "planner/limits/test_switching.py",
    "device/safety/test_guard.py",
    "server/test_clients.py",
    "callbacks/test_stragglers.py",
    "listeners/emulated/test_policies.py",
    "strategy/step/batches/test_loading.py",
    "strategy/step/test_kinds_of_batches.py",
    "strategy/trainer/test_unequal_batches.py",
    "strategy/step/test_any_batch.py",
    "device/safety/test_watchdog.py",
]
"""Files of more than ten seconds of CPU time, the longest first: begun last, one would keep a single process busy."""


def pytest_configure(config):
    gc.set_threshold(20_000, 10, 10)  # the libraries' many objects stay, and looking for those that go took 3 %
    if not hasattr(config, "workerinput"):  # not one of several processes of tests
        start_script_server()


def pytest_collection_modifyitems(items):
    rank = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(LONGEST)))  # stable: others stay as they are


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
