"""What follows from measurements, on numbers only: nothing here knows of ranks, iterations or GPUs.

`curves` (time and energy at every clock, and how certain they are), `choice` (the plan, and what to measure next),
`decision` (measure, or train under the plan), `objectives` (which plan is wanted, now).
"""
