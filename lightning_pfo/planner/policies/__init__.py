"""Ways to choose clocks, by name: each maps a problem and a deadline to the clock of every instruction.

Read `policy` (the protocol), then `top_clocks`, what every other one is compared with. The planner's own policy is in
`lightning_pfo.planner.plan`, as it takes the whole planner.
"""
