"""`strategy="pfo_pipeline"` is known in any order of imports, and importing the package stays cheap."""

import subprocess
import sys

import pytest


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


USE = """
for name in ("pfo_pipeline", "pfo_pipeline_spawn", "pfo_pipeline_notebook"):
    strategy = lightning.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
    print(type(strategy).__module__, type(strategy).__name__, strategy.launcher.is_interactive_compatible)
"""


@pytest.mark.parametrize(
    "imports",
    ["import lightning_pfo, lightning", "import lightning, lightning_pfo", "import lightning_pfo.planner, lightning"],
)
def test_the_name_is_known_in_any_order(imports):
    result = run(imports + USE)
    lines = [f"lightning_pfo.strategy.pipeline_strategy PfoPipelineStrategy {value}" for value in (False, False, True)]
    assert result.stdout.splitlines()[-3:] == lines, result.stderr


def test_lightning_without_us_does_not_know_the_name():
    assert "invalid strategy name" in run("import lightning" + USE).stderr


def test_importing_the_package_imports_neither_torch_nor_lightning():
    code = "import sys, lightning_pfo; print(sorted({'torch', 'lightning', 'pynvml', 'pandas'} & set(sys.modules)))"
    assert run(code).stdout.strip() == "[]"


def test_importing_twice_registers_once():
    code = """
import importlib, sys, lightning_pfo
importlib.reload(lightning_pfo)
print(sum(type(finder).__name__ == "_StrategiesFinder" for finder in sys.meta_path))
import lightning
print(sum(type(finder).__name__ == "_StrategiesFinder" for finder in sys.meta_path))
"""
    assert run(code).stdout.split() == ["1", "0"]
