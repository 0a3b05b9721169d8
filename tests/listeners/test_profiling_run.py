"""A profiling run before it begins, and where its profile goes."""

import pandas as pd
import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.device import EmulatedGpu, GpuConfig
from lightning_pfo.listeners.profile_row import ProfileRow
from lightning_pfo.listeners.profiling_run import ProfilingRun, ScanSettings, clocks_to_scan
from tests.listeners.fakes import FakeSource


@pytest.mark.parametrize(
    ("settings", "config", "clocks_mhz"),
    [
        ({"min_clock_mhz": 1350}, {}, (1410, 1395, 1380, 1365, 1350)),
        ({"clock_step_mhz": 40}, {}, (1410, 1365, 1320, 1275, 1230)),
        ({"clock_step_mhz": 15, "min_clock_mhz": 1380}, {"scan_step_mhz": 60}, (1410, 1395, 1380)),
        ({}, {"scan_max_mhz": 1300, "scan_min_mhz": 1230, "scan_step_mhz": 30}, (1290, 1260, 1230)),
    ],
)
def test_clocks_are_scanned_from_the_top_at_least_a_step_apart(settings, config, clocks_mhz):
    config = GpuConfig(kind="emulated", min_clock_mhz=1215, **config)
    assert clocks_to_scan(ScanSettings(**settings), EmulatedGpu(config), config) == clocks_mhz


def test_no_clock_to_scan_is_an_error_that_names_one():
    config = GpuConfig(kind="emulated", min_clock_mhz=1215)
    with pytest.raises(ConfigurationError, match=r"from 2000 MHz .* Use min_clock_mhz=1215"):
        clocks_to_scan(ScanSettings(min_clock_mhz=2000), EmulatedGpu(config), config)


def test_a_profile_that_cannot_be_written_is_refused_before_the_scan(tmp_path):
    source = FakeSource()
    with pytest.raises(ConfigurationError, match=r"output is a file in a folder that you .*\(it is a folder\)"):
        ProfilingRun(source, tmp_path, gpu=GpuConfig(kind="emulated"), num_gpus=1)
    with ProfilingRun(source, tmp_path / "profile.csv", gpu=GpuConfig(kind="emulated"), num_gpus=1) as run:
        assert not run.done  # nothing of the first try is in the way


def test_the_profile_of_an_earlier_run_is_kept(tmp_path, caplog):
    output = tmp_path / "profile.csv"
    rows = [ProfileRow(0, "forward", mhz, 0.05, 20.0, 0.0, 0.1, 4, 60.0) for mhz in (1410, 1200, 1005)]

    def scan(number):
        with ProfilingRun(FakeSource(), output, gpu=GpuConfig(kind="emulated"), num_gpus=1) as run:
            for done in range(1, number + 1):
                run._write(rows[:done])
        kept = sorted(tmp_path.glob("earlier/*/profile.csv"))
        return [len(pd.read_csv(path)) for path in (output, *kept)]

    assert scan(3) == [3]
    assert scan(0) == [3]
    assert scan(1) == [1, 3]  # one that was cut off
    assert scan(2) == [2, 3, 1]
    assert caplog.text.count("The profile of an earlier run was moved to") == 2
