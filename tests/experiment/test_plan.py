"""How an experiment plans on the profile it has measured."""

from dataclasses import replace

import pytest

from lightning_pfo.device import GpuConfig
from lightning_pfo.experiment.config import ExperimentConfig, PlanConfig, ScheduleConfig
from lightning_pfo.experiment.run import _plan
from lightning_pfo.planner import write_profile


@pytest.mark.parametrize(
    ("leads", "given_s", "expected_s"),
    [(False, None, 0.01), (True, None, 0.0), (True, 0.02, 0.02), (False, 0.0, 0.0)],
)
def test_plans_reckon_with_the_measured_latency_where_clocks_are_not_asked_for_ahead(
    tmp_path, leads, given_s, expected_s
):
    rows = [
        {"stage": stage, "instruction": kind, "frequency": clock, "time": 0.03 * 1400 / clock, "energy": energy_j}
        | {"p2p_blocking_power_w": 80.0, "switch_latency": 0.01}
        for stage in (0, 1)
        for kind in ("forward", "backward")
        for clock, energy_j in ((1400, 9.0), (1200, 8.0), (1000, 7.8))
    ]
    write_profile(tmp_path / "profile.csv", rows)
    config = ExperimentConfig(
        gpu=GpuConfig(lead_clocks=leads),
        plan=PlanConfig(num_plans=3, switch_latency_s=given_s),
        schedule=replace(ScheduleConfig(), num_microbatches=2),
    )
    frontier, _ = _plan(config, tmp_path)
    assert frontier.switch_latency_s == expected_s
