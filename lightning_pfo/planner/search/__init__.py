"""Assignments of options whose cost comes near the bound.

Read `solver` (the method), `targets` and `pool` (what is wanted, what is known), `guide` and `beam` (the search
along the relaxation), `splice` and `event_moves` (better assignments from good ones), `long_solver` (very long
pipelines), and `time_cost_tradeoff`, the same for any networkx graph.
"""
