"""The memory that training will take on this rank, from what is known before its first iteration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.strategy.compat.modules import named_tensors
from lightning_pfo.strategy.compat.tensors import memory_of
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.engine.living_bytes import bytes_on
from lightning_pfo.strategy.engine.stage import received_forms
from lightning_pfo.strategy.model.split import Split
from lightning_pfo.strategy.model.tracing.dividing.program import StageProgram
from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.buckets import ReplicaMeans
from lightning_pfo.strategy.parallel.dtensor import is_divided_over, local
from lightning_pfo.strategy.parallel.fsdp import Sharding, as_traced
from lightning_pfo.strategy.parallel.groups import Shared
from lightning_pfo.strategy.parallel.reductions import gradient_type
from lightning_pfo.strategy.step.batches.batching import Batching
from lightning_pfo.strategy.step.batches.structures import leaves_of
from lightning_pfo.strategy.step.effects.fresh import anew
from lightning_pfo.strategy.step.memory.costs import Cost, StageCosts
from lightning_pfo.strategy.step.memory.exchanges import exchanging
from lightning_pfo.strategy.step.memory.leavings import Left
from lightning_pfo.strategy.step.memory.optimizer_trial import try_optimizers
from lightning_pfo.strategy.step.memory.report import RankMemory
from lightning_pfo.strategy.step.memory.substitutes import NoValues, OwnValues, Substitutes
from lightning_pfo.strategy.step.memory.timeline import Timeline
from lightning_pfo.strategy.step.memory.trial import Found, Tried, try_stages
from lightning_pfo.strategy.step.memory.workspaces import workspace_bytes
from lightning_pfo.strategy.step.programs import Programs, Whole, changes_on_the_way
from lightning_pfo.strategy.step.whole.end import End
from lightning_pfo.strategy.step.whole.joining import joins_of

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
        wants_outputs: bool,
    ) -> RankMemory | None:
        """What an iteration takes that is not the first, so that states of optimizers are there.

        A collective call of the pipeline's ranks.

        Args:
            step: The user's step.
            num_microbatches: Number of microbatches of an ordinary batch.
            step_seed: What random numbers of the step derive from.
            batch: What the step takes first.
            rest: Its other arguments.
            optimizers: The optimizers.
            keeps_gradients: Whether gradients of earlier batches are kept, as where several are accumulated.
            wants_outputs: Whether somebody wants what the step returns beside the loss.

        Returns:
            What it takes; None if the step skips this batch, or optimizes several times in it.
        """
        self.engine.set_num_microbatches(num_microbatches)
        microbatches = self.batching.split(batch, num_microbatches)
        seed = (self.engine.seed, *step_seed)
        whole = None
        if self.batching.joins_microbatches and len(microbatches) > 1:
            whole = Whole(batch, lambda: step(anew(batch, copies=True), *rest), microbatches.sizes)

        def step_of(index: int) -> Any:
            return step(anew(microbatches[index], copies=True), *rest)

        with random_state.isolated(self.engine.device):
            some = microbatches if whole is not None else microbatches[:1]
            phases = self.programs.of_phases("train", some, step_of, seed, train=True, whole=whole)
        found = [of_microbatch[0] for of_microbatch in phases]
        programs, of_whole = found[0]
        if not programs[0].events or len(phases[0]) > 1:
            return None
        last = self.engine.num_stages - 1
        tried = Tried(
            programs,
            lambda: step(anew(microbatches[0], copies=False), *rest),
            [leaf for _, leaf in leaves_of([batch, *microbatches])],
            microbatches.sizes,
            self.batching.batch_dim,
            wants_outputs,
            changes_on_the_way(programs, last, self.owner),
        )
        if whole is not None:
            # in which order rows are joined makes no difference
            joins = joins_of([of_stages[-1] for of_stages, _ in found], of_whole[-1], whole.sizes)
            end = End(of_whole[-1], whole.step, self.engine.device, seed)
            changes = changes_on_the_way(of_whole, last, self.owner)
            tried = replace(tried, changes=changes, end=end, joins=list(joins.values()))
        return self._of_iteration(tried, optimizers, keeps_gradients)

    def _of_iteration(self, tried: Tried, optimizers: Sequence[Optimizer], keeps_gradients: bool) -> RankMemory:
        device, schedule = self.engine.device, self.engine.schedule
        assert schedule is not None
        found, is_exact = self._costs(tried)
        idle = self._idle(found.trained)
        of_optimizers = try_optimizers(optimizers, device, idle)
        timeline = Timeline(schedule, self.engine.rank, found.of_stages, self._bucket_bytes)
        peak = timeline.peak()
        layers = self._layer_bytes()
        gathered = sum(layers) if self._zero_stage < 3 else max(layers, default=0)
        left = sum(self._gradient_bytes(parameter) for parameter in self._trained() if parameter not in idle)
        earlier = left if keeps_gradients else 0
        ends = self.engine.all_gather(found.left)[self.engine.last_rank]
        if not self.engine.is_last:
            ends = ends.as_sent()

        def moment(name: str, gradients: int, gathered: int, activations: int, transfers: int = 0) -> RankMemory:
            return RankMemory(
                _bytes_of(device, map(local, named_tensors(self.owner).values())),
                gathered,
                gradients,
                of_optimizers.state_bytes,
                activations + ends.attribute_bytes,
                transfers,
                _bytes_of(device, tried.batch),
                name,
                is_exact,
                workspace_bytes(device),
            )

        in_iteration = earlier + peak.gradient_bytes
        if self._zero_stage > 1:
            in_iteration += self._divided_bytes()
        whole = sum(each.left_bytes for each in found.of_stages.values())
        divided = left if self._zero_stage else whole
        running, of_results = peak.activation_bytes + found.beside_bytes, timeline.left_bytes
        moments = [
            moment(peak.instruction, in_iteration, gathered, running, peak.transfer_bytes),
            moment("exchange of gradients", earlier + whole + self._divided_at_end(layers), gathered, of_results),
            moment("results put together", earlier + divided, 0, of_results + ends.merging.peak_bytes),
            moment(
                "exchange of gradients",
                earlier + divided + self._shared_bytes(),
                0,
                of_results + ends.merging.kept_bytes,
            ),
            moment("optimizer step", left, 0, of_optimizers.step_bytes + ends.output_bytes),
        ]
        return max(moments, key=lambda moment: moment.peak_bytes)

    def _costs(self, tried: Tried) -> tuple[Found, bool]:
        """What instructions take, and whether that is exact."""
        precision = None if self.sharding is None else as_traced(self.sharding.precision)
        ways: list[Substitutes] = []
        if not any(isinstance(module, nn.RNNBase) for module in self.owner.modules()):
            ways.append(NoValues(precision))  # torch does not know what kernels of recurrent layers keep
        if self.sharding is None:
            ways.append(OwnValues())
        for way in ways:
            try:
                found = try_stages(
                    self.engine,
                    self.owner,
                    self.split,
                    tried,
                    self.parameters,
                    way,
                    precise=self.precise,
                    exchanges=exchanging(self.sharding),
                )
            except Exception as error:
                _log.info("The step does not run with %s: %s", type(way).__name__, error)
            else:
                return found, True
        costs = {stage: self._by_trace(stage, tried.programs[stage]) for stage in self.engine.stages}
        return Found(costs, 0, Left()), False

    def _by_trace(self, stage: int, program: StageProgram) -> StageCosts:
        saved = self.split.saved_bytes[stage] if self.split.saved_bytes else 0
        inputs = {label: program.forms[label] for label in program.received}
        received = sum(form.nbytes for form in inputs.values())
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
        back = sum(form.nbytes for label, form in inputs.items() if program.has_gradient(label, sent=False))
        return StageCosts(received, back, behind, first, again, left)

    def _idle(self, trained: Collection[nn.Parameter] | None) -> set[nn.Parameter]:
        """The parameters of this rank that have no gradient on any: the step uses neither them nor their units.

        A collective call of the pipeline's ranks.
        """
        held = {name: parameter for name, parameter in self.owner.named_parameters() if not is_placeholder(parameter)}
        called = {p for unit in self.split.units.all if self.split.owners.get(unit) for p in unit.module.parameters()}
        used = [name for name, p in held.items() if trained is None or p in trained or p in called]
        anywhere = set(chain.from_iterable(self.engine.all_gather(used)))
        return {parameter for name, parameter in held.items() if name not in anywhere}

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

    def _divided_at_end(self, layers: Sequence[int]) -> int:
        """What is there beside gradients when they are divided over replicas at the end of the iteration."""
        return max(layers, default=0) + self._divided_bytes() if self._zero_stage == 1 else 0

    def _shared_bytes(self) -> int:
        """What is there beside gradients when they are summed over stages."""
        shared = [sum(self._gradient_bytes(p) for p in each.parameters if p.requires_grad) for each in self.shared]
        return max(shared, default=0)


def _bytes_of(device: torch.device, tensors: Iterable[Any]) -> int:
    """Of tensors on a device, each piece of memory once."""
    of_memory: dict[int, int] = {}
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or is_placeholder(tensor):
            continue
        if tensor.device.type == device.type and tensor.layout == torch.strided:
            memory = memory_of(tensor)
            of_memory[memory] = max(of_memory.get(memory, 0), bytes_on(device, tensor.nbytes))
    return sum(of_memory.values())
