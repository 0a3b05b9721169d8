"""Where a script meets Hydra: composition, sweeps, and errors that a user can act on.

Read `hydra_main`, the decorator, first; then `search_path` (where groups are found), `arguments` (what is understood
beyond Hydra's grammar), `sweep` (each job is a script of its own), `explain` (mistakes as one paragraph), `earlier`
(what a run before has left) and `instances` (callbacks and loggers by their `_target_`).
"""
