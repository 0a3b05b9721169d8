"""Lower bounds: what no choice of options can be cheaper than.

Read `linear_programme` (activities may mix two options), `aggregated` (the same for very long pipelines), `recurring`
(what delays add to it), `reconvergence` (what must be lost where options cannot be mixed) and `bound`, the only place
that proves.
"""
