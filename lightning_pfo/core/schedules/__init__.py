"""The order of instructions on each rank: schedules by name, what they must satisfy, and the transfers they imply.

Read `schedule` (the data and its rules), then `registry` (from a name to a schedule). `one_stage_per_rank`,
`interleaved`, `v_shaped` and `envpipe` are families of orders, functions from integers to `Orders`; `order_file` reads
an order of the user's own. `p2p` and `in_flight` say what an order means for channels and memory, and `validation` is
everything that is checked before a training uses one.
"""
