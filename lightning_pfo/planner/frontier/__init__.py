"""The result: plans from the fastest to the one of least energy, how to choose one, and their files.

Read `data` (the frontier), `select` (choosing a plan by a short expression), `thin` (fewer plans), `frontier_files` and
`zeus_files`. Nothing in here solves anything, so a job that only applies a plan loads no solver.
"""
