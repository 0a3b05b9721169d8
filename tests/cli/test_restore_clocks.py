"""Which leases `restore-clocks` undoes; that clocks are restored is tested with killed processes in tests/device."""

import pytest

from lightning_pfo.cli import main
from lightning_pfo.device.clock_lease import DIRECTORY_VARIABLE, Lease, write_lease
from lightning_pfo.device.processes import this_process

LEASES = {"GPU-aa11": "nvml", "GPU-aa22": "zeus", "GPU-bb33": "nvml"}


@pytest.fixture(autouse=True)
def _leases(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    for uuid, backend in LEASES.items():
        write_lease(Lease(uuid, f"GPU [/{backend}]", backend, this_process(), {}))  # held: it is named and left alone


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], LEASES),
        (["gpu=auto"], LEASES),
        (["gpu=nvml"], {"GPU-aa11", "GPU-bb33"}),
        (["gpu=zeus"], {"GPU-aa22"}),
        (["uuid=GPU-aa"], {"GPU-aa11", "GPU-aa22"}),
        (["gpu=nvml", "uuid=GPU-aa"], {"GPU-aa11"}),
    ],
)
def test_gpu_means_what_it_means_elsewhere(arguments, named, capsys):
    assert main(["restore-clocks", *arguments]) == 2
    error = capsys.readouterr().err
    assert {uuid for uuid in LEASES if uuid in error} == set(named)


@pytest.mark.parametrize("arguments", [["gpu=emulated_a40"], ["uuid=GPU-cc"]])
def test_nothing_to_restore(arguments, capsys):
    assert main(["restore-clocks", *arguments]) == 0
    assert "Nothing to restore: no lease" in capsys.readouterr().out


def test_an_unknown_gpu_is_refused(capsys):
    assert main(["restore-clocks", "gpu=GPU-aa11"]) == 2
    assert "For one GPU use uuid=GPU-aa11." in capsys.readouterr().err
    assert main(["restore-clocks", "gpu=nvm"]) == 2
    assert "gpu is one of auto, " in capsys.readouterr().err
