"""A profiling run before it begins."""

import pytest

from lightning_pfo.callbacks.profiling_run import ProfilingRun
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.device import GpuConfig
from tests.callbacks.fakes import FakeSource


def test_a_profile_that_cannot_be_written_is_refused_before_the_scan(tmp_path):
    source = FakeSource()
    with pytest.raises(ConfigurationError, match=r"output is a file in a folder that you .*\(it is a folder\)"):
        ProfilingRun(source, tmp_path, gpu=GpuConfig(kind="emulated"), num_gpus=1)
    with ProfilingRun(source, tmp_path / "profile.csv", gpu=GpuConfig(kind="emulated"), num_gpus=1) as run:
        assert not run.done  # nothing of the first try is in the way
