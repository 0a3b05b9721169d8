"""A pipeline of however many processes there are: prints the loss and the number of processes."""

import sys

from accelerate import Accelerator
from net import Net, make_loaders
from torch import nn

from lightning_pfo.accelerate import prepare_pipeline

accelerator = Accelerator(cpu=True)
model, _, loader = prepare_pipeline(
    accelerator, Net(), None, make_loaders()[0], nn.functional.cross_entropy, pipeline_module="layers"
)
x, y = next(iter(loader))
accelerator.print(f"loss {model.step(x, y).item():.3f} on {accelerator.num_processes} processes")
print("imported:", {"lightning", "torchmetrics"} & set(sys.modules))
accelerator.end_training()
