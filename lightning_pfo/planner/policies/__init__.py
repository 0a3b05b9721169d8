"""Ways to choose clocks, by name: each maps a problem and a deadline to the clock of every instruction.

Read `policy` (the protocol), then `top_clocks`, what every other one is compared with; `zeus` (with `knobs`), `envpipe`
(with `envelope`, `reconfigure` and `early_forwards`), `perseus` (with `exponential`), and `registry`, which names them.
The planner's own policy is in `lightning_pfo.planner.plan`, as it takes the whole planner.
"""
