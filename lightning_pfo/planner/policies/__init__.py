"""Clocks by other rules than ours, to compare with: a policy goes from a problem to clocks by rank.

`top_clocks` is the baseline: what GPUs do that nobody slows down.
"""
