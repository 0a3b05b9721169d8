"""What is split into stages, and what a stage computes.

Read `find` (which module, and its layers), `partition` (numbers in, boundaries out) and `split` (both together) first;
then `ownership` (which rank holds what), `materialise` (models built on the meta device) and `layers` (recomputation
and compilation). `sequential` is the module a stage runs for an `nn.Sequential`, `tower` for everything else.
"""
