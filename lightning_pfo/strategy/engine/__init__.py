"""A schedule on one rank: instructions, transfers between stages, and the events that listeners hear.

Read `engine` first, then `executor` (instructions and transfers in order), `channels` (groups for these) and `stage`
(forwards and backwards of one stage). `split_backward` cuts a backward into input and weight gradients, `work_counter`
counts operations and bytes of an instruction. `forked` tells processes that cannot talk to other ranks.
"""
