"""What a step reaches besides the tensors that flow through it, and how a trial leaves nothing there.

`places` finds attributes and containers, with `model.variables` those outside of objects.
`untouched` puts places back, `caches` keeps those of the process empty.
`made_weights` makes weights where a layer runs, `rewritten` puts back those that layers write into.
"""
