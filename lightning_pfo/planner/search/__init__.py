"""Assignments of options whose cost comes near the bound.

Read `solver` (the method), `effort` (how much of it), `targets` and `pool` (what is wanted, what is known), `guide`,
`beam` and `beam_memory` (the search along the relaxation), `late_settings` (options whose settings take effect
late, for `limits`), `splice` and `moves` (better assignments from good ones),
`long_solver` (very long pipelines), and `time_cost_tradeoff`, the same for any networkx graph.
"""
