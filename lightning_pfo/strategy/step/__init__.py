"""A user's step on the pipeline: from a batch to a loss, gradients and what was logged, on every rank.

Read `runner` first. It splits the batch (room `batches`; `microbatches` says into how many) and runs the step on it
(`on_stages`, by what `programs` says that stages do, from traces that leave nothing: `tracing`). It collects what the
last stage logs (`recording`) and all that comes of the run (`outcome`), tells all ranks (`values`, room `metrics`), and
hands out the `gradients`. Room `iterations` runs several for a step that optimizes several times, room `first_batch`
compares first batches with one device. `layer_times` measures layers for partition='profile'. Room `by_units` is for
hooks that call the model between steps, and for evaluations that stages cannot run. `fetching` is for steps that take
a `dataloader_iter`.
"""
