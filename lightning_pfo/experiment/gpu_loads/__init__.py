"""What a GPU does without a model, to learn of it: under loads of our own, or waiting for another.

Read `load` (what it can be kept doing), `square_wave` (how its energy counter looks at power), then `p2p_power` and
`p2p_neighbour` (what it draws while it waits for another rank).
"""
