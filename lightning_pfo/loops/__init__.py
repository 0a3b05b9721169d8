"""Pipelines for loops of one's own: plain torch, and Accelerate (`lightning_pfo.accelerate` is its public name).

Read `plain` first: `PipelinedModel` runs a step of the whole pipeline for each `call`, with `inputs` that may have a
graph and `outputs` that ranks may ask for; all ranks call it `together`. `state` saves and loads it, `clipping`
notices torch's own. `accelerate` prepares one for an `Accelerator`, of which `accelerator` replaces those methods that
have to know of the pipeline, as do its `loaders` and `optimizers`.
"""

from lightning_pfo.loops.plain import PipelinedModel

__all__ = ["PipelinedModel"]
