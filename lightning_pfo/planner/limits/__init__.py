"""Plans for GPUs that change clocks slowly: fewer changes, and clocks for long waits.

Read `fewest_changes` (equal plans that change clocks least), `wait_clocks` (low clocks for long waits), `switching`
(what a latency, a least dwell and a cost of changes leave of a frontier) and `rank_programme`, its dynamic programme.
"""
