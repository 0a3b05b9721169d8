"""How a module is divided: what its layers weigh, what each stage runs, and the module that runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from lightning_pfo.strategy.model.find import PipelinedModule, find_pipelined_module
from lightning_pfo.strategy.model.ownership import Part
from lightning_pfo.strategy.model.partition import Boundaries, partition_layers
from lightning_pfo.strategy.model.sequential import StageModule
from lightning_pfo.strategy.model.tower.embeddings_and_heads import Phases, find_phases
from lightning_pfo.strategy.model.tower.partial_forward import TowerStage


@dataclass(frozen=True)
class Split:
    """A module to split.

    Attributes:
        pipelined: The module and its layers.
        phases: When what surrounds the layers is called; see `find_phases`.
    """

    pipelined: PipelinedModule
    phases: Phases

    @property
    def types(self) -> list[str]:
        """The class name of each layer."""
        return [type(site.module).__name__ for site in self.pipelined.layers]

    @property
    def num_parameters(self) -> list[int]:
        """Numbers of parameters of each layer and of what is called after it (the first layer: also before it)."""
        numbers = [_count(site.module) for site in self.pipelined.layers]
        for site, phases in self.phases.items():
            for layer in {max(phase - 1, 0) for phase in phases}:
                numbers[layer] += _count(site.module)
        return numbers

    def parts(self, boundaries: Boundaries) -> list[Part]:
        """What each stage runs; modules that are not part of any run on every rank, if at all."""
        stage_of = [stage for stage, (start, stop) in enumerate(pairwise(boundaries)) for _ in range(start, stop)]
        parts = [Part(site.module, frozenset({stage_of[index]})) for index, site in enumerate(self.pipelined.layers)]
        # what follows the call of a layer runs on that layer's stage
        parts += [
            Part(site.module, frozenset(stage_of[max(phase - 1, 0)] for phase in phases))
            for site, phases in self.phases.items()
        ]
        return parts

    def layers(self, stage: int, boundaries: Boundaries) -> list[nn.Module]:
        """The layers of a stage."""
        return [site.module for site in self.pipelined.layers[boundaries[stage] : boundaries[stage + 1]]]

    def stage_module(
        self,
        stage: int,
        boundaries: Boundaries,
        parts: Sequence[Part],
        device: torch.device,
    ) -> StageModule:
        """Make the module that a stage runs.

        Args:
            stage: Index of the stage.
            boundaries: The partition.
            parts: What each stage runs.
            device: Where the stage runs.
        """
        start, stop = boundaries[stage], boundaries[stage + 1]
        is_last = stop == len(self.pipelined.layers)
        if not self.pipelined.is_tower:
            return StageModule(self.layers(stage, boundaries), is_first=start == 0, is_last=is_last)
        owned = [part.module for part in parts[len(self.pipelined.layers) :] if stage in part.stages]
        return TowerStage(self.pipelined, start, stop, owned=owned, device=device)


def find_split(root: nn.Module, name: str | None = None) -> Split:
    """Find the module to split; see `find_pipelined_module`."""
    pipelined = find_pipelined_module(root, name)
    return Split(pipelined, find_phases(pipelined) if pipelined.is_tower else {})


def check_split(root: nn.Module, partition: str, num_stages: int) -> None:
    """Check that a model can be split, before processes are started.

    Raises:
        ConfigurationError: If there are no or several candidates to split.
        PartitionError: If the partition does not fit its layers.
    """
    split = find_split(root)
    weights = split.num_parameters  # in place of times, which nobody has measured
    partition_layers(partition, weights, num_stages, types=split.types, times_s=weights)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
