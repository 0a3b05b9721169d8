"""`strategy="pfo_pipeline"` is known in any order of imports, and importing the package stays cheap."""

import subprocess
import sys

import pytest

from tests.launch import run_script

USE = """
for name in ("pfo_pipeline", "pfo_pipeline_spawn", "pfo_pipeline_notebook"):
    strategy = lightning.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
    print(type(strategy).__module__, type(strategy).__name__, strategy.launcher.is_interactive_compatible)
"""
US_FIRST = """
import importlib, sys, lightning_pfo, lightning_pfo.planner
importlib.reload(lightning_pfo)
finders = [sum(type(finder).__name__ == "_StrategiesFinder" for finder in sys.meta_path)]
import lightning
finders.append(sum(type(finder).__name__ == "_StrategiesFinder" for finder in sys.meta_path))
print(*finders)
"""
LIGHTNING_FIRST = f"""
import lightning
try:{USE.replace(chr(10), chr(10) + "    ")}
except ValueError as error:
    print(error)
import lightning_pfo
"""
FORKS = """
import os, sys

# as if none of these had been imported yet; what they import, and takes much longer, stays
for name in list(sys.modules):
    if name.partition(".")[0] in ("lightning", "lightning_fabric", "lightning_pfo", "pytorch_lightning"):
        del sys.modules[name]
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "_StrategiesFinder"]
folder, *programs = sys.argv[1:]
for number, program in enumerate(programs):
    if os.fork() == 0:
        for stream in (1, 2):
            os.dup2(os.open(f"{folder}/{number}.{stream}", os.O_CREAT | os.O_WRONLY), stream)
        exec(program, {"__name__": "__main__"})
        break
else:
    for _ in programs:
        os.wait()
"""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Of the programs that import us first and Lightning first, what they wrote to stdout and to stderr."""
    folder = tmp_path_factory.mktemp("registration")
    (script := folder / "forks.py").write_text(FORKS)
    run_script(script, folder, US_FIRST + USE, LIGHTNING_FIRST + USE)
    return [[(folder / f"{number}.{stream}").read_text() for stream in (1, 2)] for number in range(2)]


@pytest.mark.parametrize("number", range(2))
def test_the_name_is_known_in_any_order(outputs, number):
    output, errors = outputs[number]
    lines = [f"lightning_pfo.strategy.trainer.strategy PfoPipelineStrategy {value}" for value in (False, False, True)]
    assert output.splitlines()[-3:] == lines, errors


def test_lightning_without_us_does_not_know_the_name(outputs):
    assert "invalid strategy name" in outputs[1][0]


def test_importing_the_package_imports_neither_torch_nor_lightning():
    code = "import sys, lightning_pfo; print(sorted({'torch', 'lightning', 'pynvml', 'pandas'} & set(sys.modules)))"
    assert run(code).stdout.strip() == "[]"


def test_importing_twice_registers_once(outputs):
    assert outputs[0][0].splitlines()[0].split() == ["1", "0"]
