"""torchmetrics objects in pipelined steps, which run to their end on the rank of the last stage alone.

`states` has them computed everywhere from what that rank knows; `aggregators` tells those that add up numbers of steps
once for a batch. `compat` has torchmetrics' private names.
"""
