"""What is split into stages, and what a stage computes.

Read `find` (which module, and its layers), `partition` (numbers in, boundaries out) and `split` (both together)
first; then `ownership` (which rank holds what), `materialise` (models built on the meta device) and `layers`
(recomputation and compilation). A stage runs `sequential` of an `nn.Sequential`, and `tower` of everything else;
`redirection` leads calls of modules elsewhere for a while. `compat` has private names of Hugging Face models.
"""
