"""torchmetrics objects in pipelined steps, which run to their end on the rank of the last stage alone.

`states` has them computed everywhere from what that rank knows; `aggregators` tells those that add up numbers of steps
once for a batch, and `of_batch` knows what they say of one. `totals` has what a step makes of that and of counts that
it keeps, `running` means and variances that it keeps beside counts. `compat` has torchmetrics' private names.
"""
