"""A plan from few clocks against that of a full scan: within 0.5 % of its energy from a quarter of its iterations."""

import pytest

from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.device import load_gpu_config
from lightning_pfo.planner import PlanSettings, read_profile
from tests.listeners.optimizer.replay import emulated_profile, replayed
from tests.planner.conftest import measured  # noqa: F401


def check(outcome):
    assert outcome.iterations <= outcome.iterations_of_scan / 4
    assert outcome.more_energy <= outcome.energy_of_scan + 0.005
    assert outcome.more_time <= max(outcome.time_of_scan, 0) + 0.001


@pytest.mark.parametrize("model", ["emulated_a100", "emulated_rtx3090"])
def test_emulated(model):
    full, held_mhz = emulated_profile(load_gpu_config(model))
    check(replayed(full, make_schedule("1f1b", 4, 6), held_mhz=held_mhz))


@pytest.mark.parametrize(
    ("name", "power_w"), [("gpt3-175b_a100-sxm_bf16.csv", 83.64), ("bloom-176b_a40_bf16.csv", 70.38)]
)
def test_measured(measured, name, power_w):  # noqa: F811
    full = read_profile(measured(name))
    check(replayed(full, make_schedule("1f1b", 8, 8), PlanSettings(p2p_blocking_power_w=power_w, num_plans=10)))
