"""Lightning's part: the strategy `pfo_pipeline` and all that knows of a Trainer. Only this room imports Lightning.

Read `strategy` (what a user constructs) first, then its bases `checkpointing` and `processes`, and the `launchers` that
start those processes. `checks` refuses what cannot work; `signals`, `precision`, `finetuning` and `weight_averaging`
make parts of Lightning that expect the whole model work on a pipeline.
"""
