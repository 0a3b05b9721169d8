"""The whole module as a copy."""

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.state.whole_module import gather_module


class Keeps(nn.Linear):
    """Keeps a loss of its own, and in a list what it has returned."""

    def __init__(self):
        super().__init__(3, 3)
        self.losses = []

    def forward(self, x):
        y = super().forward(x)
        self.aux = y.square().mean()
        self.losses.append({"aux": self.aux, "y": y.detach()})
        return y


def test_what_layers_keep_of_the_last_step_is_copied_without_its_graph():
    module = nn.Sequential(Keeps(), Keeps())
    module(torch.ones(2, 3))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole = gather_module(module, 0, None, Patches())
    finally:
        dist.destroy_process_group()
    for layer, copied in zip(module, whole, strict=True):
        assert layer.aux.requires_grad
        assert not copied.aux.requires_grad
        assert copied.losses[0]["aux"] is copied.aux
        assert copied.aux.data_ptr() != layer.aux.data_ptr()
        torch.testing.assert_close(copied.aux, layer.aux.detach())
        torch.testing.assert_close(copied.weight, layer.weight)
