"""Plans while a job trains, on numbers only: what to measure next, and whether a plan keeps what it promises.

`curves` (time and energy at every clock, from few, and how certain they are), `choice` (the plan, what to measure next,
and whether that is worth it); `windows` (steps at the top clocks and under the plan in turn), `verification` (what they
say). The one-run optimizer and the server both stand on it: the one among the ranks of a job, the other over the wire.
"""
