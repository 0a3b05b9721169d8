"""The command line starts quickly, and ends without a traceback whatever happens meanwhile."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_pfo.cli import COMMANDS
from tests.launch import ROOT, heed_signals

HEAVY = {
    "torch",
    "lightning",
    "pandas",
    "highspy",
    "hydra",
    "matplotlib",
    "numpy",
    "networkx",
    "rich",
    "omegaconf",
    "yaml",
}
WHAT_IS_LOADED = """
import runpy, sys
sys.argv = ["lightning-pfo", *sys.argv[1:]]
try:
    runpy.run_module("lightning_pfo", run_name="__main__", alter_sys=True)
except SystemExit as leaving:
    assert leaving.code == 0
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def start(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | options.pop("environment", {})
    return subprocess.Popen(
        [sys.executable, *arguments],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options,
        env=environment,
        preexec_fn=heed_signals,
    )


def run(*arguments, **options):
    process = start(*arguments, **options)
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_the_list_of_commands_loads_no_library(flag):
    status, output, errors = run("-c", WHAT_IS_LOADED, flag)
    assert (status, errors) == (0, "")
    assert set(output.splitlines()[-1].split()) & HEAVY == set()


def test_importing_the_package_loads_two_modules_of_its_own():
    code = "import sys; before = set(sys.modules); import lightning_pfo; print(*sorted(set(sys.modules) - before))"
    loaded = set(run("-c", code)[1].split())
    assert {name for name in loaded if "pfo" in name} == {
        "lightning_pfo",
        "lightning_pfo.registration",
    }
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names == {"lightning_pfo"}


def test_help_has_a_line_for_each_command():
    output = run("-m", "lightning_pfo", "--help")[1]
    for name in COMMANDS:
        (line,) = [line for line in output.splitlines() if line.startswith(f"  {name} ")]
        assert len(line.removeprefix(f"  {name} ").strip()) > 20


def test_the_version_is_the_projects():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert run("-m", "lightning_pfo", "--version") == (0, f"lightning-pfo {version[1]}\n", "")


@pytest.mark.parametrize("command", ["plan", "gpu"])
@pytest.mark.parametrize("module", ["yaml", "rich"])
def test_ctrl_c_while_importing_is_one_line(tmp_path, command, module):
    (tmp_path / f"{module}.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    assert run("-m", "lightning_pfo", command, environment=environment) == (130, "", "Interrupted.\n")


@pytest.mark.parametrize("arguments", [["--help"], ["gpu", "gpu=emulated_a40", "watch_s=0.01", "probe=false"]])
def test_a_reader_that_leaves_is_no_error(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    status, _, errors = run("-m", "lightning_pfo", *arguments, stdout=writer)
    os.close(writer)
    assert (status, errors) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_one_line():
    with open("/dev/full", "w") as full:  # noqa: PTH123
        status, _, errors = run("-m", "lightning_pfo", "--help", stdout=full)
    assert (status, errors.count("\n")) == (2, 1)
    assert "No space left on device" in errors


def test_names_that_the_terminal_cannot_show_are_shown_as_escapes(tmp_path):
    arguments = ["gpu", "gpu=emulated_a40", "watch_s=0.01", "probe=false", f"write={tmp_path}/\u00e4.yaml"]
    status, output, errors = run("-m", "lightning_pfo", *arguments, environment={"PYTHONIOENCODING": "ascii"})
    assert (status, errors) == (0, "")
    assert "\\xe4.yaml" in output
