"""A user's step on the pipeline: from a batch to a loss, gradients and what was logged, on every rank.

Read `runner` first. It splits the batch (`batches`; into how many: `microbatches`), learns what the step feeds to the
model and replays it with the model's output (`capture`), tells all ranks what came of it (`values`, `metrics`), and
hands out the `gradients`.
`batch_check` compares the batches of all ranks; `layer_times` measures layers in a step for partition='profile'.
`compat` has torchmetrics' private names.
"""
