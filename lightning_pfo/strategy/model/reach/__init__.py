"""What a step reaches besides the tensors that flow through it, and how a trial leaves nothing there.

`places` finds attributes and containers, `variables` those outside of objects, and says what is the user's own.
`untouched` puts places back, `caches` keeps those of the process empty.
"""
