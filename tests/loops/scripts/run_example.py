"""Runs examples/accelerate/train.py on an emulated GPU; usage: run_example.py FOLDER."""

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path

path = Path(__file__).parents[3] / "examples" / "accelerate" / "train.py"
spec = importlib.util.spec_from_file_location("accelerate_example", path)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
example.main(Namespace(output=sys.argv[1], gpu="emulated_a100", clock_step_mhz=300, select="1.1x", epochs=2))
sys.stdout.write(
    f"imported: {set(sys.modules) & {'lightning', 'torchmetrics'}}\n"
)  # at once, as another rank writes too
