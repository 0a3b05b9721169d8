"""The stages of a model, all in one process."""

import copy

import torch

from lightning_pfo.strategy.model.ownership import find_shared_parameters, release_other_parts
from lightning_pfo.strategy.model.split import find_split


class Holder(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model


class Stages:
    """A model's stages, each on a copy of the model that lacks what other stages hold."""

    def __init__(self, model, boundaries):
        self.boundaries = boundaries
        self.roots, self.modules, self.shared = [], [], []
        for stage in range(len(boundaries) - 1):
            root = copy.deepcopy(Holder(model))
            split = find_split(root)
            parts = split.parts(boundaries)
            shared = find_shared_parameters(root, parts)
            release_other_parts(parts, [stage], shared)
            self.roots.append(root)
            self.modules.append(split.stage_module(stage, boundaries, parts, torch.device("cpu")))
            self.shared.append(shared)

    def run(self, *args, **kwargs):
        needed = []
        for module in self.modules:
            module.inputs = {0: (args, kwargs)}
            needed.append(module.find_received())
        sent = ()
        for module, positions in zip(self.modules, [*needed[1:], ()], strict=True):
            module.send(positions)
            module.checks = True
            sent = module(*sent)
        return self.modules[-1].output

    def gradients(self):
        """Of all parameters, summed over the stages that hold them."""
        total = {}
        for root in self.roots:
            for name, parameter in root.model.named_parameters():
                if parameter.grad is not None:
                    total[name] = total.get(name, 0) + parameter.grad
        return total
