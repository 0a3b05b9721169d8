"""What processes do together, whatever they train: torch.distributed in terms of meshes, groups and tensors.

Read `mesh` (which process is which) and `groups` first. `dtensor` tells plain tensors and divided ones apart, `fsdp`
divides layers; on them rest `reductions`, `buckets` (means over replicas), `clipping` and `loss_scaling` of gradients.
`random_state` keeps the random numbers of all ranks in step.
"""
