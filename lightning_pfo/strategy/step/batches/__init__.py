"""Dividing a batch into microbatches, and putting together what comes of them.

Read `splitting` first; `reading` has its rule: how many samples a batch has, and which lists are lists of samples.
`merging` is the way back, for what steps return. `weights` says how much each microbatch counts in the loss of the
batch. `structures` takes containers apart, and knows what holds samples in a row.
`check` compares the batches of all ranks.
"""
