"""What layers keep and change by themselves: they run on one rank only, once for each microbatch.

`watch` lets numbers be those of one device, `counters` are such that lie in buffers; `looks` names what else changes.
"""
