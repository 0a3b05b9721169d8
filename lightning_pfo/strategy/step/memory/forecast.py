"""The memory that training will take on this rank, from what is known before its first iteration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.engine.living_bytes import bytes_on
from lightning_pfo.strategy.engine.stage import received_forms
from lightning_pfo.strategy.model.split import Split
from lightning_pfo.strategy.model.tracing.program import StageProgram
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.buckets import ReplicaMeans
from lightning_pfo.strategy.parallel.compat import memory_of, named_tensors
from lightning_pfo.strategy.parallel.dtensor import is_divided_over, local
from lightning_pfo.strategy.parallel.fsdp import Sharding, as_traced
from lightning_pfo.strategy.parallel.groups import Shared
from lightning_pfo.strategy.parallel.reductions import gradient_type
from lightning_pfo.strategy.step.batches.batching import Batching
from lightning_pfo.strategy.step.batches.structures import leaves_of
from lightning_pfo.strategy.step.memory.exchanges import exchanging
from lightning_pfo.strategy.step.memory.optimizer_trial import try_optimizers
from lightning_pfo.strategy.step.memory.report import RankMemory
from lightning_pfo.strategy.step.memory.substitutes import NoValues, OwnValues, Substitutes
from lightning_pfo.strategy.step.memory.timeline import Timeline
from lightning_pfo.strategy.step.memory.trial import Cost, StageCosts, try_stages
from lightning_pfo.strategy.step.programs import Programs

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryForecast:
    """Foretells the memory of iterations on this rank.

    Attributes:
        engine: The pipeline engine of this rank.
        owner: The user's module.
        split: How it is divided.
        programs: What stages do of a step.
        batching: How batches are divided.
        parameters: Parameters of each stage of this rank.
        shared: What this rank holds together with others.
        means: Averages gradients over replicas; None: nobody does.
        precise: Whether gradients of microbatches are added up in 32 bits where parameters have 16.
        sharding: How layers are divided over replicas; None: they are whole.
    """

    engine: PipelineEngine
    owner: nn.Module
    split: Split
    programs: Programs
    batching: Batching
    parameters: Mapping[int, Sequence[nn.Parameter]]
    shared: Sequence[Shared]
    means: ReplicaMeans | None
    precise: bool
    sharding: Sharding | None

    @property
    def _zero_stage(self) -> int:
        return 0 if self.sharding is None else self.sharding.zero_stage

    def of(
        self,
        step: Callable[..., Any],
        num_microbatches: int,
        step_seed: tuple[int, ...],
        batch: Any,
        rest: Sequence[Any],
        optimizers: Sequence[Optimizer],
        *,
        keeps_gradients: bool,
    ) -> RankMemory:
        """What an iteration takes that is not the first, so that states of optimizers are there.

        Args:
            step: The user's step.
            num_microbatches: Number of microbatches of an ordinary batch.
            step_seed: What random numbers of the step derive from.
            batch: What the step takes first.
            rest: Its other arguments.
            optimizers: The optimizers.
            keeps_gradients: Whether gradients of earlier batches are kept, as where several are accumulated.
        """
        self.engine.set_num_microbatches(num_microbatches)
        parts = self.batching.split(batch, num_microbatches).parts

        def first_step(index: int = 0) -> Any:
            return step(parts[index], *rest)

        with random_state.isolated(self.engine.device):
            seed = (self.engine.seed, *step_seed)
            programs = self.programs.of("train", parts[:1], first_step, seed, train=True)[0][0]
        return self._of_iteration(programs, first_step, [batch, *parts], optimizers, keeps_gradients)

    def _of_iteration(
        self,
        programs: Sequence[StageProgram],
        step: Callable[[], Any],
        batch: Any,
        optimizers: Sequence[Optimizer],
        keeps_gradients: bool,
    ) -> RankMemory:
        device, schedule = self.engine.device, self.engine.schedule
        assert schedule is not None
        costs, is_exact = self._costs(programs, step, batch)
        of_optimizers = try_optimizers(optimizers, device)
        peak = Timeline(schedule, self.engine.rank, costs, self._bucket_bytes).peak()
        layers = self._layer_bytes()
        gathered = sum(layers) if self._zero_stage < 3 else max(layers, default=0)
        left = sum(self._gradient_bytes(parameter) for parameter in self._trained())
        earlier = left if keeps_gradients else 0

        def moment(
            name: str, gradients: int, gathered: int = 0, activations: int = 0, transfers: int = 0
        ) -> RankMemory:
            return RankMemory(
                _bytes_of(device, map(local, named_tensors(self.owner).values())),
                gathered,
                gradients,
                of_optimizers.state_bytes,
                activations,
                transfers,
                _bytes_of(device, (leaf for _, leaf in leaves_of(batch))),
                name,
                is_exact,
            )

        in_iteration = earlier + peak.gradient_bytes
        if self._zero_stage > 1:
            in_iteration += self._divided_bytes()
        whole = sum(each.left_bytes for each in costs.values())
        moments = [
            moment(peak.instruction, in_iteration, gathered, peak.activation_bytes, peak.transfer_bytes),
            moment("exchange of gradients", earlier + whole + self._exchanged_bytes(layers), gathered),
            moment("optimizer step", left, activations=of_optimizers.step_bytes),
        ]
        return max(moments, key=lambda moment: moment.peak_bytes)

    def _costs(
        self, programs: Sequence[StageProgram], step: Callable[[], Any], batch: Any
    ) -> tuple[dict[int, StageCosts], bool]:
        """What instructions take, and whether that is exact."""
        precision = None if self.sharding is None else as_traced(self.sharding.precision)
        ways: list[Substitutes] = []
        if not any(isinstance(module, nn.RNNBase) for module in self.owner.modules()):
            ways.append(NoValues(precision))  # torch does not know what kernels of recurrent layers keep
        if self.sharding is None:
            ways.append(OwnValues())
        for way in ways:
            try:
                costs = try_stages(
                    self.engine,
                    self.owner,
                    self.split,
                    programs,
                    step,
                    [leaf for _, leaf in leaves_of(batch)],
                    self.parameters,
                    way,
                    precise=self.precise,
                    exchanges=exchanging(self.sharding),
                )
            except Exception as error:
                _log.info("The step does not run with %s: %s", type(way).__name__, error)
            else:
                return costs, True
        return {stage: self._by_trace(stage, programs[stage]) for stage in self.engine.stages}, False

    def _by_trace(self, stage: int, program: StageProgram) -> StageCosts:
        saved = self.split.saved_bytes[stage] if self.split.saved_bytes else 0
        inputs = [program.forms[label] for label in program.received]
        received = sum(form.nbytes for form in inputs)
        behind = sum(form.nbytes for form in received_forms(program, InstructionType.BACKWARD))
        left = sum(self._gradient_bytes(parameter, whole=True) for parameter in self._trained(stage))
        gone = -saved - received - behind
        again = {
            InstructionType.FORWARD: Cost(saved, saved),
            InstructionType.BACKWARD: Cost(0, gone),
            InstructionType.INPUT_GRADIENT: Cost(0, 0),
            InstructionType.WEIGHT_GRADIENT: Cost(0, gone),
        }
        first = again | {kind: Cost(left, gone + left) for kind, cost in again.items() if cost.kept_bytes == gone}
        back = sum(form.nbytes for form in inputs if form.requires_grad)
        return StageCosts(received, back, behind, first, again, left)

    def _trained(self, *stages: int) -> Iterator[nn.Parameter]:
        """The parameters of stages, or of all of this rank, that have gradients."""
        for stage in stages or self.parameters:
            yield from (parameter for parameter in self.parameters[stage] if parameter.requires_grad)

    def _gradient_bytes(self, parameter: nn.Parameter, *, whole: bool = False) -> int:
        tensor = parameter if whole and is_divided_over(parameter, "data_parallel") else local(parameter.detach())
        if tensor.device.type != self.engine.device.type:  # it is in the host's memory
            return 0
        return bytes_on(self.engine.device, tensor.numel() * gradient_type(parameter, precise=self.precise).itemsize)

    def _divided_bytes(self) -> int:
        """Of this process's part of the gradients of divided parameters."""
        divided = [p for p in self._trained() if is_divided_over(p, "data_parallel")]
        return sum(self._gradient_bytes(p) for p in divided)

    def _layer_bytes(self) -> list[int]:
        """Of the whole weights of each layer that is divided over replicas."""
        layers = {unit.module for stage in self.engine.stages for unit in self.split.layers_of(stage)}
        of_layers = [[p for p in layer.parameters() if is_divided_over(p, "data_parallel")] for layer in layers]
        dtype = (
            None if self.sharding is None or self.sharding.precision is None else self.sharding.precision.param_dtype
        )
        return [
            sum(p.numel() * (dtype or p.dtype).itemsize for p in parameters) for parameters in of_layers if parameters
        ]

    def _bucket_bytes(self, stage: int) -> int:
        return 0 if self.means is None else self.means.largest_bucket_bytes(self._trained(stage))

    def _exchanged_bytes(self, layers: Sequence[int]) -> int:
        """What is there beside gradients when they are summed over stages, or divided over replicas at the end."""
        shared = [sum(self._gradient_bytes(p) for p in each.parameters if p.requires_grad) for each in self.shared]
        divided = max(layers, default=0) + self._divided_bytes() if self._zero_stage == 1 else 0
        return max([divided, *shared])


def _bytes_of(device: torch.device, tensors: Iterable[Any]) -> int:
    """Of tensors on a device, each piece of memory once."""
    of_memory: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.device.type == device.type and tensor.layout == torch.strided:
            memory = memory_of(tensor)
            of_memory[memory] = max(of_memory.get(memory, 0), bytes_on(device, tensor.nbytes))
    return sum(of_memory.values())
