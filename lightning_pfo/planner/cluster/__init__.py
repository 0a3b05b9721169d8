"""Many replicas of a pipeline, some of them slow: what every policy takes and costs then, by calculation.

Read `stragglers` (how much slower each replica is, moment by moment), then `emulation`. Nothing of it is measured.
"""
