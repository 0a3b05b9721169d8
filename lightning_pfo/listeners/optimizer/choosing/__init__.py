"""What follows from measurements, on numbers only: nothing here knows of ranks, iterations or GPUs.

`decision` (measure, or train under the plan: `planner.adaptive` says how), `objectives` (which plan is wanted, now).
"""
