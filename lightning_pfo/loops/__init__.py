"""Pipelines for loops of one's own: plain torch, and Accelerate (`lightning_pfo.accelerate` is its public name).

Read `plain` first: `PipelinedModel` runs a step of the whole pipeline when it is called. `accelerate` prepares one for
an `Accelerator`, and `accelerator` replaces those of its methods which have to know of the pipeline.
"""

from lightning_pfo.loops.plain import PipelinedModel

__all__ = ["PipelinedModel"]
