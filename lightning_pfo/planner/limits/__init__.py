"""Plans for GPUs that change clocks slowly: fewer changes, and clocks for long waits.

Read `fewest_changes` (equal plans that change clocks least), `wait_clocks` (low clocks for long waits) and `switching`
(what a latency, a least dwell and a cost of changes leave of a frontier), which goes through `late_search` (the search
of `planner.search` for late clocks), and for a dwell through `limited_pipeline` (what
the limits are, and how an iteration is played under them), `start` (clocks within the limits), `windows` (when a rank
may run what) and `rank_programme` (the cheapest clocks of a rank within its windows, a dynamic programme).
"""
