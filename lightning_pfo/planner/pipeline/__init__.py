"""A pipeline as an activity network, and the simulation of one iteration.

Read `problem` (schedule, profile and blocking power as a network with effective energies as costs), `steady_state`
(where a schedule repeats itself), `timeline` (what a choice of clocks takes and costs), `clock_signal` (clocks that
land late).
"""
