"""What processes do together, whatever they train: torch.distributed in terms of meshes, groups and tensors.

Read `mesh` (which process is which) first. `dtensor` tells plain tensors and divided ones apart; `loss_scaling` lets
all ranks skip a step together; `random_state` keeps their random numbers in step.
"""
