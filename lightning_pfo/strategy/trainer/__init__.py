"""Lightning's part: the strategy `pfo_pipeline` and all that knows of a Trainer. Only this room imports Lightning.

Read `strategy` (what a user constructs) first, then its bases from the outside in: `steps` (what is done with
batches), `checkpointing`, `processes`, and the `launchers` that start those processes. `together` marks what all
ranks call together. `manual` runs steps that optimize by themselves. `checks` refuses what cannot work. `signals`,
`precision`, `finetuning` and `weight_averaging` let parts of Lightning that expect the whole model work on a pipeline.
`compat` has Lightning's private names.
"""
