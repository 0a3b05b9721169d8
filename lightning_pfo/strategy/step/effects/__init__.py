"""What a step leaves behind besides gradients, and how every rank gets it.

`within` says whether a step is under way. `attributes` notes what a step changes of its module and of what it reaches
from it (`meters` and `generators` go on in ways of their own), `outward` what it does to others; `merge` puts
microbatches together as one batch, by what `left` has learnt of traces. `tensors` knows these as they were, and which
large ones earlier batches wrote into. `parcel` takes anything apart into tensors, numbers and the rest, so that most of
it needs no pickling. Room `layers`: what these keep by themselves.
"""
