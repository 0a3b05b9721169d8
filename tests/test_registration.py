"""`strategy="pfo_pipeline"` is known in any order of imports, and importing the package stays cheap."""

import subprocess
import sys

import pytest

USE = """
for name in ("pfo_pipeline", "pfo_pipeline_spawn", "pfo_pipeline_notebook"):
    strategy = lightning.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
    print(type(strategy).__module__, type(strategy).__name__, strategy.launcher.is_interactive_compatible)
"""
IN_ANY_ORDER = [
    "import lightning_pfo, lightning",
    "import lightning, lightning_pfo",
    "import lightning_pfo.planner, lightning",
]
WITHOUT_US = "import lightning"
TWICE = """
import importlib, sys, lightning_pfo
importlib.reload(lightning_pfo)
print(sum(type(finder).__name__ == "_StrategiesFinder" for finder in sys.meta_path))
import lightning
print(sum(type(finder).__name__ == "_StrategiesFinder" for finder in sys.meta_path))
"""
FORKS = """
import os, sys
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp, torchmetrics  # what takes Lightning so long

assert not {"lightning", "lightning_pfo"} & set(sys.modules)
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


def run(code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Of each program, what it wrote to stdout and to stderr."""
    folder = tmp_path_factory.mktemp("registration")
    programs = [*(imports + USE for imports in [*IN_ANY_ORDER, WITHOUT_US]), TWICE]
    result = run(FORKS, str(folder), *programs)
    assert result.returncode == 0, result.stderr
    names = [*IN_ANY_ORDER, WITHOUT_US, TWICE]
    return {name: [(folder / f"{number}.{s}").read_text() for s in (1, 2)] for number, name in enumerate(names)}


@pytest.mark.parametrize("imports", IN_ANY_ORDER)
def test_the_name_is_known_in_any_order(outputs, imports):
    output, errors = outputs[imports]
    lines = [f"lightning_pfo.strategy.trainer.strategy PfoPipelineStrategy {value}" for value in (False, False, True)]
    assert output.splitlines()[-3:] == lines, errors


def test_lightning_without_us_does_not_know_the_name(outputs):
    assert "invalid strategy name" in outputs[WITHOUT_US][1]


def test_importing_the_package_imports_neither_torch_nor_lightning():
    code = "import sys, lightning_pfo; print(sorted({'torch', 'lightning', 'pynvml', 'pandas'} & set(sys.modules)))"
    assert run(code).stdout.strip() == "[]"


def test_importing_twice_registers_once(outputs):
    assert outputs[TWICE][0].split() == ["1", "0"]
