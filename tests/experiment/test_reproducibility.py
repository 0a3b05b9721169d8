"""In virtual time a run depends on its settings only, not on what else the machine does."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.example_scripts import ROOT
from tests.launch import run_script

pytestmark = pytest.mark.slow

# Everything of an emulated GPU that is random or has a moment of its own.
UNSTEADY = (
    *(
        "gpu=emulated_a40",
        "gpu.noise=0.02",
        "gpu.counter_tick_s=0.02",
        "gpu.counter_lag_s=0.01",
        "gpu.seed=3",
        "gpu.lead_clocks=true",
    ),
    *("gpu.straggler_index=1", "gpu.straggler_factor=1.1", "cluster=pcie", "cluster.optimizer_s=0.02"),
)
SMALL = (
    *(
        "trainer=quick",
        "trainer.steps=3",
        "trainer.window_steps=3",
        "trainer.val_batches=0",
        "trainer.progress_bar=false",
        "model.num_blocks=4",
    ),
    *("profiler=quick", "profiler.min_clock_mhz=1300", "profiler.max_iterations_per_clock=2"),
)
FILES = ("report.json", "profile.csv", "plans/frontier.json", "plans/frontier.csv")


@contextmanager
def busy_machine():
    """Every core has something else to do, though other tests come first."""
    loop = [sys.executable, "-c", "import os; os.nice(10)\nwhile True: pass"]
    loops = [subprocess.Popen(loop) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def results_of(folder):
    run_script(ROOT / "examples" / "gpt" / "train.py", *SMALL, *UNSTEADY, f"output_dir={folder}")
    results = {name: (folder / name).read_bytes() for name in FILES}
    for name in FILES:
        (folder / name).unlink()  # the next run must write its own
    return results


def test_a_run_gives_the_same_bytes_however_busy_the_machine_is(tmp_path):
    alone = results_of(tmp_path)
    with busy_machine():
        beside_others = results_of(tmp_path)
    assert alone == beside_others
