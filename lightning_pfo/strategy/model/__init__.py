"""What is split into stages, and what a stage computes.

Read `units` (which modules are called as a whole, and which are layers), `partition` (numbers in, boundaries out) and
`split` (both together) first, then the room `tracing`: what a step does, and running one stage of it. `ownership` says
which rank holds what, `materialise` makes models that were built on the meta device, `layers` recomputes and compiles.
`reach` finds what a step may leave behind, and keeps away what a trial does; `variables` are those that functions of
the user's name. `compat` has private names of Hugging Face models.
"""
