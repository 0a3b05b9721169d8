"""Runs examples/accelerate/train.py on an emulated GPU of short instructions; usage: run_example.py FOLDER."""

import importlib.util
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from lightning_pfo.device import load_gpu_config

path = Path(__file__).parents[3] / "examples" / "accelerate" / "train.py"
spec = importlib.util.spec_from_file_location("accelerate_example", path)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
gpu = replace(load_gpu_config("emulated_a100"), forward_s=0.003, clock_latency_s=0.001)
example.main(Namespace(output=sys.argv[1], gpu=gpu, clock_step_mhz=300, select="1.1x", epochs=2))
print("imported:", {"lightning", "torchmetrics"} & set(sys.modules))
