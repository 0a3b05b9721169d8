"""Whether a plan keeps what it promises.

`trial`: one after the other, and what follows; `checking`: windows at the top clocks and under the plan in turn. What
they say is in `planner.adaptive.verification`.
"""
