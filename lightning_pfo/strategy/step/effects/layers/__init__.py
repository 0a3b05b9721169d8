"""What layers keep and change by themselves: they run on one rank only, once for each microbatch.

`watch` lets numbers be those of one device, `counters` are such that lie in buffers. `once` does so for other buffers:
`changing` is a layer that has some, `repeating` lets it see the whole batch, and `joining` makes that of microbatches.
`looks` names what else changes.
"""
