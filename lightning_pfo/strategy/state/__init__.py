"""Checkpoints of a split model: in the names, order and ids of a single device, for any number of stages.

Read `full` (one state dict, gathered on the first rank) first, then `sharded` (every rank writes its part) and
`files` (whole or not at all). `placeholders` keeps what other ranks hold out of files.
"""
