"""Pipeline parallelism for an Accelerate loop; see `lightning_pfo.loops.accelerate`."""

from lightning_pfo.loops.accelerate import AcceleratedPipeline, prepare_pipeline

__all__ = ["AcceleratedPipeline", "prepare_pipeline"]
