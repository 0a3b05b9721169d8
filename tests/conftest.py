"""Settings of all tests."""

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from lightning_pfo.strategy.parallel import random_state
from tests.launch import start_script_server

# How long an example takes says how busy the machine is; and the same tests run each time, on every machine.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("searching", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("PFO_HYPOTHESIS", "repeatable"))


LONGEST = [
    "experiment/test_run_integration.py",
    "strategy/trainer/test_promises.py",
    "strategy/trainer/test_further_promises.py",
    "strategy/trainer/test_kept_promises.py",
    "strategy/step/test_memory.py",
    "strategy/trainer/test_manual.py",
    "strategy/model/test_huggingface.py",
    "strategy/test_zoo.py",
    "strategy/trainer/test_options.py",
    "strategy/step/test_heads.py",
    "strategy/step/by_units/test_by_units.py",
    "strategy/step/test_later_batches.py",
    "strategy/state/test_resuming.py",
    "strategy/model/tracing/test_every_cut.py",
    "strategy/engine/test_varying_sizes.py",
    "strategy/trainer/test_launching.py",
    "strategy/step/test_left_behind.py",
    "strategy/trainer/test_pipeline_training.py",
    "loops/test_launching.py",
    "callbacks/test_clock_safety.py",
    "experiment/test_config.py",
    "callbacks/test_optimizer.py",
    "callbacks/test_interrupted.py",
    "strategy/step/test_metrics_anywhere.py",
    "listeners/emulated/test_oracle.py",
    "strategy/parallel/test_three_dimensions.py",
    "experiment/test_reproducibility.py",
    "strategy/step/batches/test_loading.py",
    "strategy/step/test_any_batch.py",
    "loops/test_users.py",
    "server/test_clients.py",
    "strategy/model/test_huggingface_options.py",
    "strategy/parallel/test_data_parallel.py",
    "strategy/trainer/test_skipping.py",
    "listeners/optimizer/test_replay.py",
    "planner/limits/test_switching.py",
    "strategy/step/test_kinds_of_batches.py",
    "device/energy/test_attribution.py",
    "strategy/step/test_zeros.py",
    "strategy/engine/test_all_schedules.py",
    "strategy/engine/test_in_flight.py",
    "strategy/step/test_other_forms.py",
    "strategy/trainer/test_momentum.py",
    "strategy/step/test_first_batch.py",
    "loops/test_equality.py",
    "callbacks/test_profile_and_plan.py",
    "pictures/test_pictures.py",
    "device/safety/test_guard.py",
    "cli/test_main.py",
    "callbacks/test_stragglers.py",
    "cli/test_gpu.py",
    "test_dependencies.py",
    "device/energy/test_counters.py",
    "server/jobs/test_interleavings.py",
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
def _same_numbers():
    """Weights that a test draws are the same each time, on every machine."""
    random_state.seed(torch.device("cpu"), 0)


@pytest.fixture(autouse=True)
def _no_group_is_left():
    """What a Trainer in the tests' own process has started is not in the way of forks, nor of the next test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


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
