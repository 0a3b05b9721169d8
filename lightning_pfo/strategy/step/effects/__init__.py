"""What a step leaves behind besides gradients, and how every rank gets it.

`within` says whether a step is under way. `attributes` notes what a step changes of its module, `calls` what it says to
loggers and prints; both put microbatches together as one batch. `parcel` takes anything apart into tensors, numbers and
the rest, so that most of it needs no pickling.
"""
